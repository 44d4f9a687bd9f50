import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from protocol.client_events import TextFormat, TextFormatKind
from protocol.tools import FunctionTool
from sampler.grammar import GrammarCompiler, GrammarError
from sampler.json_schema import bound_strings, relaxed
from sampler.params import Constraint
from tests.sampler.matching import BYTE_LEVEL, admits_text
from tests.sampler.smollm2 import smollm2_tokenizer
from tests.tiny_model import call_text

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTE_LEVEL)


# --- What a schema admits ------------------------------------------------------------------------

S: Schema = {"type": "string"}
KEYWORDS = ["default", "enum", "type", "properties", "const", "$ref", "anyOf", "allOf", "$defs"]


def properties(required: list[str] | None = None, **listed: Any) -> Schema:
    names = list(listed) if required is None else required
    return {"type": "object", "properties": listed, "required": names}


def admits_arguments(
    compiler: GrammarCompiler, parameters: Schema | None, arguments: str, *, forced: bool
) -> bool:
    constraint = Constraint((FunctionTool("f", None, parameters),), int(forced), 1)
    return admits_text(compiler, constraint, call_text("f", arguments))


SCHEMAS: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "a dialect": (
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **properties(a=S)},
        [{"a": ""}],
        [{}, {"a": 1}],
    ),
    "the integers that JavaScript can count": (
        properties(n={"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1}),
        [{"n": 0}, {"n": 2**53 - 1}, {"n": 1 - 2**53}],
        [{"n": 2**53}, {"n": -(2**53)}, {"n": 0.5}],
    ),
    "numbers next to an integer that is excluded": (
        properties(
            a={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.001},
            b={"type": "number", "exclusiveMaximum": -3, "minimum": -3.5},
            c={"type": "number", "exclusiveMaximum": 1, "minimum": 0.5},
        ),
        [{"a": 0.0005, "b": -3.25, "c": 0.75}, {"a": 0.0001, "b": -3.5, "c": 0.999}],
        [
            {"a": 0, "b": -3.25, "c": 0.75},
            {"a": 0.0005, "b": -3, "c": 0.75},
            {"a": 0.0005, "b": -3.25, "c": 1},
        ],
    ),
    "bounds beyond all floats": (
        properties(n={"type": "integer", "exclusiveMinimum": 0, "maximum": 2**70}),
        [{"n": 1}],
        [{"n": 0}],
    ),
    "formats": (
        properties(
            d={"type": "string", "format": "date"}, n={"type": "integer", "format": "int32"}
        ),
        [{"d": "2026-11-29", "n": 1}],
        [{"d": "tomorrow", "n": 1}],
    ),
    "a pattern": (
        properties(p={"type": "string", "pattern": "^[a-z]{2,3}$"}),
        [{"p": "ab"}, {"p": "abc"}],
        [{"p": "a"}, {"p": "AB"}, {"p": "abcd"}],
    ),
    "a reference into $defs": (
        {
            **properties(at={"$ref": "#/$defs/Place", "description": "where"}),
            "$defs": {"Place": properties(city=S)},
        },
        [{"at": {"city": "Oslo"}}],
        [{"at": "Oslo"}, {"at": {}}],
    ),
    "a reference into definitions, as pydantic 1 wrote it": (
        {
            **properties(at={"allOf": [{"$ref": "#/definitions/Place"}], "title": "At"}),
            "definitions": {"Place": properties(city=S)},
        },
        [{"at": {"city": "Oslo"}}],
        [{"at": "Oslo"}, {"at": {}}],
    ),
    "anyOf": (
        properties(a={"anyOf": [{"type": "integer"}, S, {"type": "null"}], "default": None}),
        [{"a": 1}, {"a": "1"}, {"a": None}],
        [{"a": []}, {"a": True}],
    ),
    "oneOf with a tag": (
        properties(
            a={"oneOf": [properties(t={"const": "x"}, a=S), properties(t={"const": "y"}, b=S)]}
        ),
        [{"a": {"t": "x", "a": ""}}, {"a": {"t": "y", "b": ""}}],
        [{"a": {"t": "z"}}, {"a": {"t": "x", "b": ""}}],
    ),
    "const": (properties(a={"const": "x"}), [{"a": "x"}], [{"a": "y"}]),
    "enum": (properties(a={"enum": ["x", 1, None]}), [{"a": "x"}, {"a": 1}, {"a": None}], [{}]),
    "a nullable type": (
        properties(a={"type": ["string", "null"]}),
        [{"a": "x"}, {"a": None}],
        [{"a": 1}],
    ),
    "optional properties": (
        properties(["b"], a=S, b=S, c=S),
        [{"b": ""}, {"a": "", "b": ""}, {"b": "", "c": ""}],
        [{}, {"a": ""}],
    ),
    "lists": (
        properties(a={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}),
        [{"a": [1]}, {"a": [1, 2]}],
        [{"a": []}, {"a": [1, 2, 3]}, {"a": ["1"]}],
    ),
    "recursion": (
        {
            **properties(tree={"$ref": "#/$defs/Node"}),
            "$defs": {
                "Node": properties(
                    v=S, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
                )
            },
        },
        [{"tree": {"v": "a", "next": {"v": "b", "next": None}}}],
        [{"tree": {"v": "a", "next": {}}}],
    ),
    "names that are keywords": (
        properties(None, **dict.fromkeys(KEYWORDS, S)),
        [dict.fromkeys(KEYWORDS, "x")],
        [{"default": "x"}],
    ),
    "maps": (
        properties(m={"type": "object", "additionalProperties": {"type": "integer"}}),
        [{"m": {}}, {"m": {"a": 1, "b": 2}}],
        [{"m": {"a": "1"}}],
    ),
    # Nothing listed at the top, but not nothing: these must not be closed.
    "anyOf at the top": (
        {"type": "object", "anyOf": [properties(a=S), properties(b=S)]},
        [{"a": ""}, {"b": ""}],
        [{}, {"a": 1}],
    ),
    "a reference at the top": (
        {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": properties(a=S)}},
        [{"a": ""}],
        [{}],
    ),
    "a required property that is not listed": ({"required": ["a"]}, [{"a": 1}], [{}]),
    "a required property that is not among the listed": (
        properties(["a", "b"], a=S),
        [{"a": "", "b": 1}],
        [{"a": ""}],
    ),
    "a least number of properties": ({"minProperties": 1}, [{"a": 1}], [{}]),
    # Several schemas for one value: narrowing each by itself would leave nothing.
    "properties beside anyOf": (
        {**properties(a=S), "anyOf": [properties(b=S), properties(c=S)]},
        [{"a": "", "b": ""}, {"a": "", "c": ""}],
        [{"a": ""}],
    ),
    "allOf": (
        {
            **properties(o={"allOf": [{"$ref": "#/$defs/A"}, properties(b=S)]}),
            "$defs": {"A": properties(a=S)},
        },
        [{"o": {"a": "", "b": ""}}],
        [{"o": {"a": ""}}, {"o": {"b": ""}}],
    ),
    "properties beside a reference": (
        {
            **properties(o={"$ref": "#/$defs/A", **properties(b=S)}),
            "$defs": {"A": properties(a=S)},
        },
        [{"o": {"a": "", "b": ""}}],
        [{"o": {"a": ""}}],
    ),
    "two lengths for one string": (
        properties(a={"type": "string", "anyOf": [{"minLength": 70}]}),
        [{"a": "x" * 70}],
        [{"a": "x"}],
    ),
}


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS.values(), ids=SCHEMAS)
def test_arguments_are_admitted_if_and_only_if_they_are_valid(
    byte_compiler: GrammarCompiler, schema: Schema, valid: list[Any], invalid: list[Any],
    forced: bool,
) -> None:  # fmt: skip
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)

    for arguments in valid:
        assert validator.is_valid(arguments)
        assert admits_arguments(byte_compiler, schema, json.dumps(arguments), forced=forced)
    for arguments in invalid:
        assert not validator.is_valid(arguments)
        assert not admits_arguments(byte_compiler, schema, json.dumps(arguments), forced=forced)


def admits_message(compiler: GrammarCompiler, schema: Schema, message: str) -> bool:
    return admits_text(compiler, Constraint(text_format=message_format(schema)), message)


def message_format(schema: Schema, *, strict: bool | None = None) -> TextFormat:
    return TextFormat(TextFormatKind.JSON_SCHEMA, "answer", schema, strict=strict)


MESSAGES: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    **SCHEMAS,
    "a string": (S, ["", "a\n<b>"], [1, {}]),
    "an integer": ({"type": "integer"}, [0, -7], [0.5, "1"]),
    "a list": ({"type": "array", "items": {"type": "null"}}, [[], [None, None]], [[1], {}]),
    "an enum": ({"enum": ["yes", "no"]}, ["yes", "no"], ["maybe"]),
    "anyOf": ({"anyOf": [S, {"type": "boolean"}]}, ["", True], [1]),
    "anything": ({}, ["", 1, None, [], {"a": [1]}], []),
    "an object that lists nothing": ({"type": "object"}, [{}, {"a": 1}], [[]]),
}


@pytest.mark.parametrize(("schema", "valid", "invalid"), MESSAGES.values(), ids=MESSAGES)
def test_a_message_is_admitted_if_and_only_if_it_is_valid(
    byte_compiler: GrammarCompiler, schema: Schema, valid: list[Any], invalid: list[Any]
) -> None:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)

    for message in valid:
        assert validator.is_valid(message)
        assert admits_message(byte_compiler, schema, json.dumps(message))
    for message in invalid:
        assert not validator.is_valid(message)
        assert not admits_message(byte_compiler, schema, json.dumps(message))


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_binds_the_message_strict_or_not(
    byte_compiler: GrammarCompiler, strict: bool | None
) -> None:
    constraint = Constraint(text_format=message_format(properties(a=S), strict=strict))

    assert admits_text(byte_compiler, constraint, '{"a": ""}')
    assert not admits_text(byte_compiler, constraint, '{"b": ""}')


def test_a_schema_makes_no_difference_to_what_is_written_in_a_client_s_own_style(
    byte_compiler: GrammarCompiler,
) -> None:
    schema = {**properties(a=S), "x-guidance": {"whitespace_flexible": True, "lenient": True}}

    assert not admits_message(byte_compiler, schema, '{  "a": ""}')


@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS.values(), ids=SCHEMAS)
def test_a_schema_that_can_be_compiled_passes_the_check(
    byte_compiler: GrammarCompiler, schema: Schema, valid: list[Any], invalid: list[Any]
) -> None:
    byte_compiler.check(FunctionTool("f", None, schema, strict=True))
    byte_compiler.check_text_format(message_format(schema))


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, properties()])
@pytest.mark.parametrize("forced", [False, True])
def test_a_function_that_declares_nothing_takes_nothing(
    byte_compiler: GrammarCompiler, parameters: Schema | None, forced: bool
) -> None:
    assert admits_arguments(byte_compiler, parameters, "{}", forced=forced)
    assert not admits_arguments(byte_compiler, parameters, '{"a": 1}', forced=forced)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (properties(a={"not": S}), 'Unimplemented keys: ["not"]'),
        (properties(a={"$ref": "#/$defs/A"}), "'/$defs/A' does not exist"),
        (properties(a={"type": "string", "pattern": "(?=a)b"}), "look-ahead and look-behind"),
        (properties(a={"type": "string", "pattern": "("}), "unclosed group"),
        (properties(a={"type": "text"}), "text"),
        (properties(a={"type": "string", "minLength": None}), "minLength"),
        (properties(a={"type": "string", "minLength": "1"}), "minLength"),
        (properties(a=False), "'a' is unsatisfiable"),
        ({"properties": ["a"]}, "properties must be an object"),
        ({**properties(a=S), "required": [["a"]]}, "required"),
        # Not the same value is forbidden when strings and objects are bounded, so it is looked at
        # both ways.
        (properties(a={"oneOf": [properties(a=S), properties(a=S, b=S)]}), "oneOf"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_an_error_that_says_why_in_one_line(
    byte_compiler: GrammarCompiler, schema: Schema, reason: str
) -> None:
    with pytest.raises(GrammarError) as of_tool:
        byte_compiler.check(FunctionTool("f", None, schema, strict=True))
    with pytest.raises(GrammarError) as of_message:
        byte_compiler.check_text_format(message_format(schema))

    for message in str(of_tool.value), str(of_message.value):
        assert reason in message
        assert "\n" not in message
        assert "tool_call" not in message  # nothing of our own grammar
        assert not message.startswith("at ")


@pytest.mark.parametrize(
    "remark",
    [
        {"uniqueItems": False},
        {"not": False},
        {"propertyNames": {"type": "string"}},
        {"unevaluatedProperties": {}},
        {"unevaluatedItems": True},
        {"dependentRequired": {}},
        {"then": {"minLength": 1}},
        {"if": {"minLength": 1}},
        {"minContains": 1},
    ],
    ids=lambda remark: " ".join(remark),
)
def test_a_keyword_that_says_nothing_is_a_remark(
    byte_compiler: GrammarCompiler, remark: Schema
) -> None:
    schema = properties(a={"type": ["array", "object", "string"], **remark})

    byte_compiler.check(FunctionTool("f", None, schema, strict=True))
    byte_compiler.check_text_format(message_format(schema, strict=True))


@pytest.mark.parametrize("name", ["zip", "uri-reference", "password"])
def test_a_format_that_nobody_defines_is_a_remark(
    byte_compiler: GrammarCompiler, name: str
) -> None:
    schema = properties(a={"type": "string", "format": name})

    byte_compiler.check(FunctionTool("f", None, schema, strict=True))


# --- Schemas that cannot be enforced, of tools that are not strict --------------------------------

STRINGS: Schema = {"type": "array", "items": S}

# A schema that cannot be enforced; what it admits; what is not admitted nevertheless.
LOOSE: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "uniqueItems": (
        properties(a={**STRINGS, "uniqueItems": True}),
        [{"a": []}, {"a": ["x", "y"]}],
        [{"a": [1]}, {"a": "x"}, {}],
    ),
    "not": (properties(a={**S, "not": {"const": "x"}}), [{"a": "y"}], [{"a": 1}]),
    "not, of all": ({**properties(a=S), "not": {"required": ["b"]}}, [{"a": ""}], [{"a": 1}]),
    "if": (
        {**properties(a=S), "if": {"required": ["b"]}, "then": {}, "else": {}},
        [{"a": ""}],
        [{"a": 1}],
    ),
    "dependentRequired": (
        {**properties(["a"], a=S, b=S), "dependentRequired": {"b": ["a"]}},
        [{"a": ""}, {"a": "", "b": ""}],
        [{"b": ""}],
    ),
    "contains": (
        properties(a={**STRINGS, "contains": {"const": "x"}, "maxContains": 2}),
        [{"a": ["x", "y"]}],
        [{"a": [1]}],
    ),
    "unevaluatedProperties": (
        {**properties(a=S), "unevaluatedProperties": False},
        [{"a": ""}],
        [{"a": 1}],
    ),
    "propertyNames": (
        properties(
            a={"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": S}
        ),
        [{"a": {"x1": ""}}],
        [{"a": {"x1": 1}}],
    ),
    "a look-ahead": (
        properties(a={**S, "pattern": "^(?!x)", "maxLength": 2}),
        [{"a": "yy"}],
        [{"a": "yyy"}, {"a": 1}],
    ),
    "a look-ahead in a name": (
        properties(
            a={
                "type": "object",
                "properties": {"n": {"type": "integer"}},
                "patternProperties": {"^(?!x)": S},
                "additionalProperties": False,
            }
        ),
        [{"a": {}}, {"a": {"y": ""}}],
        [{"a": {"n": ""}}, {"a": []}],
    ),
    "branches that overlap": (
        properties(a={"oneOf": [{**S, "maxLength": 2}, {**S, "minLength": 2}]}),
        [{"a": "x"}, {"a": "xxx"}],
        [{"a": 1}],
    ),
    "branches of required properties": (
        {
            **properties([], a=S, b=S),
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": ""}, {"b": ""}],
        [{}, {"a": 1}],
    ),
    "deep inside": (
        {
            **properties(a={"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}),
            "$defs": {"A": {"type": "array", "items": properties(b={**S, "not": {"const": ""}})}},
        },
        [{"a": None}, {"a": [{"b": "x"}]}],
        [{"a": [{}]}, {"a": [{"b": 1}]}],
    ),
    "a reference abroad": (
        {**properties(["b"], a={"$dynamicRef": "#x"}, b=S), "$dynamicAnchor": "x"},
        [{"b": ""}],
        [{"a": {}}],
    ),
}


def without_strict(schema: Schema) -> FunctionTool:
    return FunctionTool("f", None, schema, strict=False)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(("schema", "valid", "invalid"), LOOSE.values(), ids=LOOSE)
def test_what_cannot_be_enforced_is_not_and_the_rest_is(
    byte_compiler: GrammarCompiler, schema: Schema, valid: list[Any], invalid: list[Any],
    forced: bool,
) -> None:  # fmt: skip
    for arguments in valid:
        assert Draft202012Validator(schema).is_valid(arguments)
        assert admits_arguments(byte_compiler, schema, json.dumps(arguments), forced=forced)
    for arguments in invalid:
        assert not admits_arguments(byte_compiler, schema, json.dumps(arguments), forced=forced)


@pytest.mark.parametrize("schema", [loose for loose, _, _ in LOOSE.values()], ids=LOOSE)
def test_what_cannot_be_enforced_is_an_error_where_it_must_be(
    byte_compiler: GrammarCompiler, schema: Schema
) -> None:
    byte_compiler.check(without_strict(schema))

    with pytest.raises(GrammarError):
        byte_compiler.check(FunctionTool("f", None, schema, strict=True))
    for strict in (True, False, None):
        with pytest.raises(GrammarError):
            byte_compiler.check_text_format(message_format(schema, strict=strict))


def test_relaxing_changes_nothing_of_what_it_is_given() -> None:
    schemas = [loose for loose, _, _ in LOOSE.values()]
    before = json.dumps(schemas)

    for schema in schemas:
        relaxed(schema)

    assert json.dumps(schemas) == before


@pytest.mark.parametrize("unknown", ["any", ["string", "any"], None, []], ids=str)
def test_a_type_that_is_none_admits_anything(byte_compiler: GrammarCompiler, unknown: Any) -> None:
    schema = properties(a={"type": unknown}, b=S)

    assert admits_arguments(byte_compiler, schema, '{"a": [1], "b": ""}', forced=False)
    assert not admits_arguments(byte_compiler, schema, '{"a": [1], "b": 1}', forced=False)


@pytest.mark.parametrize(
    "schema",
    [
        properties(a=False),
        properties(a={"$ref": "#/$defs/A"}),
        properties(a=5),
        {"properties": ["a"]},
        {"required": ["a"], "minProperties": "1", "allOf": 7},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("forced", [False, True])
def test_where_nothing_can_be_enforced_arguments_are_any_object(
    byte_compiler: GrammarCompiler, schema: Schema, forced: bool
) -> None:
    byte_compiler.check(without_strict(schema))

    assert admits_arguments(byte_compiler, schema, '{"a": [{"b": 1}]}', forced=forced)
    assert not admits_arguments(byte_compiler, schema, "[]", forced=forced)


def test_tools_of_one_schema_are_each_as_strict_as_they_say(
    byte_compiler: GrammarCompiler,
) -> None:
    schema = properties(a={**STRINGS, "uniqueItems": True})

    for _ in range(2):
        byte_compiler.check(without_strict(schema))
        with pytest.raises(GrammarError):
            byte_compiler.check(FunctionTool("f", None, schema, strict=True))


@pytest.mark.parametrize(
    "schema",
    [{"enum": ["<|im_end|>"]}, {"const": "a <|im_end|> b"}, {"pattern": r"^<\|im_end\|>$"}],
    ids=["enum", "const", "pattern"],
)
def test_a_control_string_in_a_schema_is_spelled_out_as_text(schema: Schema) -> None:
    compiler = GrammarCompiler(smollm2_tokenizer())
    function = FunctionTool("f", None, properties(a={"type": "string", **schema}))
    value = schema.get("const", "<|im_end|>")
    text = call_text("f", json.dumps({"a": value}))
    tokenizer = smollm2_tokenizer()
    matcher = compiler.matcher(Constraint((function,), 1, 1))
    assert matcher is not None

    for token_id in tokenizer.encode_text(text):
        mask = matcher.mask()
        assert mask[token_id]
        assert not any(mask[control] for control in tokenizer.added_tokens.values())
        matcher.accept(token_id)

    assert all(matcher.mask()[stop] for stop in tokenizer.stop_ids)


NUMBERS = st.integers(-3, 3) | st.sampled_from([-0.5, 0.001, 0.5, 0.999, 1.001, 2.5])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    bounds=st.dictionaries(
        st.sampled_from(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"]), NUMBERS
    ),
    numbers=st.lists(NUMBERS | st.floats(-3, 3).map(lambda x: round(x, 3)), min_size=9),
)
def test_a_number_out_of_bounds_is_never_admitted(
    bounds: dict[str, float], numbers: list[float]
) -> None:
    schema = {"type": "number", **bounds}
    compiler = GrammarCompiler(BYTE_LEVEL)
    try:
        compiler.check_text_format(message_format(schema))
    except GrammarError:
        return  # nothing is within these bounds

    for number in numbers:
        valid = Draft202012Validator(schema).is_valid(number)
        assert valid or not admits_message(compiler, schema, json.dumps(number))


# --- Schemas whose strings are bounded ------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "bounded"),
    [
        (S, {**S, "maxLength": 9}),
        ({"type": ["string", "null"]}, {"type": ["string", "null"], "maxLength": 9}),
        ({**S, "minLength": 3}, {**S, "minLength": 3, "maxLength": 9}),
        ({**S, "minLength": 12}, {**S, "minLength": 12, "maxLength": 12}),
        (
            {"type": "array", "items": S},
            {"type": "array", "items": {**S, "maxLength": 9}},
        ),
        (
            {"type": "array", "prefixItems": [S, True]},
            {"type": "array", "prefixItems": [{**S, "maxLength": 9}, True]},
        ),
        (
            {"anyOf": [S, {"type": "null"}]},
            {"anyOf": [{**S, "maxLength": 9}, {"type": "null"}]},
        ),
        (
            properties(a=properties(b=S)),
            {
                **properties(
                    a={**properties(b={**S, "maxLength": 9}), "additionalProperties": False}
                ),
                "additionalProperties": False,
            },
        ),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": S}},
            {"$ref": "#/$defs/A", "$defs": {"A": {**S, "maxLength": 9}}},
        ),
        (
            {"type": "object", "additionalProperties": S},
            {"type": "object", "additionalProperties": {**S, "maxLength": 9}},
        ),
    ],
)
def test_open_ended_strings_are_bounded_wherever_they_are(schema: Schema, bounded: Schema) -> None:
    assert bound_strings(schema, 9) == bounded


@pytest.mark.parametrize(
    "schema",
    [
        {**S, "maxLength": 100},
        {**S, "enum": ["a rather long string", "b"]},
        {**S, "pattern": "^a*$"},
        {**S, "format": "date-time"},
        {"const": "a rather long string"},
        {"type": "integer"},
        True,
        {},
        {"type": "object"},
        {**properties(a={"type": "null"}), "additionalProperties": {"type": "null"}},
        {"type": "object", "default": S, "examples": [S], "enum": [{"type": "string"}]},
    ],
)
def test_what_is_bounded_already_or_no_string_stays_as_it_is(schema: Any) -> None:
    assert bound_strings(schema, 9) == schema


def test_properties_that_are_named_like_keywords_are_bounded_like_others() -> None:
    schema = properties(None, **dict.fromkeys(KEYWORDS, S))

    bounded = bound_strings(schema, 9)

    assert bounded["properties"] == {name: {**S, "maxLength": 9} for name in KEYWORDS}


def test_bounding_changes_nothing_of_what_it_is_given() -> None:
    schema = properties(a=properties(b=S))
    before = json.dumps(schema)

    bound_strings(schema, 9)

    assert json.dumps(schema) == before


# Schemas and values, small and alike enough that many of the values are valid.
NAMES = st.sampled_from(["a", "b", "type", "default"])
LEAVES: list[Schema] = [
    S,
    {**S, "minLength": 2},
    {**S, "minLength": 6},
    {**S, "maxLength": 5},
    {**S, "enum": ["xxxxx", "b"]},
    {**S, "pattern": "^x*$"},
    {"const": "xxxxx"},
    {"type": ["string", "null"]},
    {"type": "integer"},
    {},
    {"$ref": "#/$defs/A"},
    {"$ref": "#/$defs/B"},
]


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    schema: Schema = {"type": "object", "properties": draw(st.dictionaries(NAMES, inner))}
    schema |= draw(st.fixed_dictionaries({}, optional={"required": st.lists(NAMES, unique=True)}))
    return schema | draw(
        st.fixed_dictionaries({}, optional={"additionalProperties": st.booleans() | inner})
    )


def larger(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    some = st.lists(inner, min_size=1, max_size=2)
    return (
        objects(inner)
        | st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda branches: {"anyOf": branches}, some)
        | st.builds(lambda branches: {"allOf": branches}, some)
        | st.builds(lambda one, branches: {**one, "anyOf": branches}, objects(inner), some)
        | st.builds(lambda one, other: {**one, **other}, objects(inner), inner)
    )


SUBSCHEMAS = st.recursive(st.sampled_from(LEAVES), larger, max_leaves=5)
WHOLE_SCHEMAS = st.builds(
    lambda top, a, b: {**top, "$defs": {"A": a, "B": b}},
    objects(SUBSCHEMAS),
    # A definition that refers to a definition might refer to itself alone and mean nothing.
    objects(st.sampled_from(LEAVES[:-2])),
    st.sampled_from(LEAVES[:-2]),
)
VALUES = st.recursive(
    st.sampled_from(["", "x", "xx", "xxx", "xxxxx", "xxxxxx", "xxxxxxx", "b", 1, None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(schema=WHOLE_SCHEMAS, values=st.lists(VALUES, min_size=5, max_size=10))
def test_a_bounded_schema_admits_only_what_the_original_admits(
    schema: Schema, values: list[Any]
) -> None:
    original, bounded = map(Draft202012Validator, (schema, bound_strings(schema, 3)))

    for value in values:
        assert original.is_valid(value) or not bounded.is_valid(value)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(schema=WHOLE_SCHEMAS)
def test_a_schema_that_compiles_also_compiles_bounded(schema: Schema) -> None:
    function = FunctionTool("f", None, schema, strict=True)
    compiler = GrammarCompiler(BYTE_LEVEL, max_forced_string=3)
    try:
        compiler.matcher(Constraint((function,)))
    except GrammarError:
        return

    assert compiler.matcher(Constraint((function,), 1)) is not None


# --- Faults of llguidance ------------------------------------------------------------------------


@pytest.mark.parametrize("num_before", range(4))
def test_an_error_that_cannot_be_told_is_no_panic(num_before: int) -> None:
    # Its text is cut at byte 100, which is in the middle of a character for some of these.
    schema = {"type": "object", "required": [{"x" * num_before + "<e\u0301" * 40: True}]}
    tool = FunctionTool("f", parameters=schema)

    GrammarCompiler(BYTE_LEVEL).check(tool)  # it is not strict: what cannot be kept is left out
    with pytest.raises(GrammarError):
        GrammarCompiler(BYTE_LEVEL).check(FunctionTool("f", parameters=schema, strict=True))
