"""Whether a value matches a schema, for the few keywords that checks use.

Specification: JSON Schema 2020-12, Validation. A keyword that is not known here is an error of the
check that uses it: to read over it would let anything pass.
"""

from collections.abc import Iterator
from typing import Any

from protocol.conformance.shapes import Event

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_KEYWORDS = {
    "type",
    "enum",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
}


def mismatch(value: Any, schema: Event) -> str | None:
    """Return where and how ``value`` does not match ``schema``; None if it does."""
    return next(_mismatches(value, schema, "$"), None)


def _mismatches(value: Any, schema: Event, path: str) -> Iterator[str]:
    assert schema.keys() <= _KEYWORDS, f"keywords that are not known here: {schema}"
    if "type" in schema and not _is_of_type(value, schema["type"]):
        yield f"{path} is no {schema['type']}: {value!r}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is none of {schema['enum']}: {value!r}"
    if isinstance(value, dict):
        yield from _in_object(value, schema, path)
    if isinstance(value, list):
        yield from _in_array(value, schema, path)


def _is_of_type(value: Any, name: str) -> bool:
    # In Python a truth value is a number; in JSON it is none.
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _in_object(value: Event, schema: Event, path: str) -> Iterator[str]:
    members: Event = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path} has no member {name!r}"
    for name, member in value.items():
        if name in members:
            yield from _mismatches(member, members[name], f"{path}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{path} has a member {name!r}"


def _in_array(value: list[Any], schema: Event, path: str) -> Iterator[str]:
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
    if not least <= len(value) <= most:
        yield f"{path} has {len(value)} elements"
    for i, element in enumerate(value):
        yield from _mismatches(element, schema.get("items", {}), f"{path}[{i}]")
