"""Values match a schema, or it is said where they do not."""

from typing import Any

import jsonschema
import pytest

from protocol.conformance.json_schema import mismatch
from protocol.conformance.shapes import Event

SCHEMA: Event = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer"},
        "is_dry": {"type": "boolean"},
        "wind": {"type": "number"},
        "hours": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        "note": {"type": "null"},
    },
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "value",
    [
        {"city": "Oslo"},
        {"city": "Rome", "days": 3, "is_dry": False, "wind": 0.5, "hours": [1, 2], "note": None},
        {"city": "Rome", "wind": 1},
    ],
)
def test_a_value_matches(value: Event) -> None:
    jsonschema.validate(value, SCHEMA)

    assert mismatch(value, SCHEMA) is None


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([], "$ is"),
        ("Oslo", "$ is"),
        ({}, "'city'"),
        ({"city": "Paris"}, "$.city"),
        ({"city": 5}, "$.city"),
        ({"city": "Oslo", "town": 1}, "'town'"),
        ({"city": "Oslo", "days": 1.5}, "$.days"),
        ({"city": "Oslo", "days": True}, "$.days"),
        ({"city": "Oslo", "is_dry": 1}, "$.is_dry"),
        ({"city": "Oslo", "wind": True}, "$.wind"),
        ({"city": "Oslo", "wind": "1"}, "$.wind"),
        ({"city": "Oslo", "hours": []}, "$.hours"),
        ({"city": "Oslo", "hours": [1, 2, 3]}, "$.hours"),
        ({"city": "Oslo", "hours": [1, "2"]}, "$.hours[1]"),
        ({"city": "Oslo", "note": 0}, "$.note"),
    ],
)
def test_it_is_said_where_a_value_does_not_match(value: Any, where: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, SCHEMA)

    assert where in (mismatch(value, SCHEMA) or "")


def test_what_a_schema_says_nothing_of_may_be_anything() -> None:
    assert mismatch({"a": [1, "b"]}, {}) is None
    assert mismatch({"a": 1}, {"properties": {"b": {"type": "null"}}}) is None
    assert mismatch([1, "b"], {"type": "array"}) is None


def test_a_keyword_that_is_not_known_is_no_match_for_anything() -> None:
    with pytest.raises(AssertionError, match="uniqueItems"):
        mismatch([1], {"uniqueItems": True})
