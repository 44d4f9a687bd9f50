import json
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer as FastTokenizer

from protocol.tools import FunctionTool
from sampler.grammar import GrammarCompiler, GrammarError, Matcher
from sampler.json_schema import bound_strings
from sampler.params import ToolConstraint
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import BEGIN
from tests.sampler.smollm2 import smollm2_tokenizer
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, WEATHER, byte_tokenizer, call_text

Schema = dict[str, Any]

BYTE_LEVEL = Tokenizer(byte_tokenizer(), [END_OF_TEXT, IM_END], 288)
STOP_IDS = [END_OF_TEXT, IM_END]

FORECAST = FunctionTool(
    "get_weather_forecast",
    None,
    {
        "type": "object",
        "properties": {"days": {"type": "integer"}, "where": {"type": "string"}},
        "required": ["days"],
        "additionalProperties": False,
    },
)
BOTH = (WEATHER, FORECAST)

AUTO = ToolConstraint(BOTH)
NONE = ToolConstraint(BOTH, max_calls=0)
REQUIRED = ToolConstraint(BOTH, min_calls=1)
NAMED = ToolConstraint((WEATHER,), min_calls=1, max_calls=1)
AT_MOST_ONE = ToolConstraint(BOTH, max_calls=1)
CONSTRAINTS = {
    "auto": AUTO,
    "none": NONE,
    "required": REQUIRED,
    "named": NAMED,
    "at most one": AT_MOST_ONE,
}

OSLO = call_text("get_weather", '{"city": "Oslo"}')
WEEK = call_text("get_weather_forecast", '{"days": 7, "where": "Oslo"}')


@pytest.fixture(scope="module")
def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTE_LEVEL)


@pytest.fixture(scope="module")
def smollm2_compiler() -> GrammarCompiler:
    return GrammarCompiler(smollm2_tokenizer())


def new_matcher(compiler: GrammarCompiler, constraint: ToolConstraint) -> Matcher:
    matcher = compiler.matcher(constraint)
    assert matcher is not None
    return matcher


def num_accepted(matcher: Matcher, ids: Sequence[int]) -> int:
    """Move past as many of ``ids`` as the mask allows, and return how many that were."""
    for index, token_id in enumerate(ids):
        if not matcher.mask()[token_id]:
            return index
        matcher.accept(token_id)
    return len(ids)


def may_end(matcher: Matcher) -> bool:
    allowed = matcher.mask()[STOP_IDS]
    assert allowed.all() == allowed.any(), "the stop ids are one as good as the other"
    return bool(allowed.all())


def admits(matcher: Matcher, ids: Sequence[int]) -> bool:
    """Tell whether ``ids`` may be all of a turn."""
    return num_accepted(matcher, ids) == len(ids) and may_end(matcher)


def admits_text(compiler: GrammarCompiler, constraint: ToolConstraint, text: str) -> bool:
    return admits(new_matcher(compiler, constraint), BYTE_LEVEL.encode_text(text))


def refused(matcher: Matcher, text: str) -> str:
    """Return what of ``text`` is left when the first byte of it is refused."""
    ids = BYTE_LEVEL.encode_text(text)
    return b"".join(map(BYTE_LEVEL.token_bytes, ids[num_accepted(matcher, ids) :])).decode()


# --- Which turns are legal -----------------------------------------------------------------------

LEGAL = {
    "auto": ["", "Hi.", "a <tool_cal b", OSLO, f"Hi.\n{OSLO}", f"é🎉{WEEK}", f"{OSLO}\n{WEEK}"],
    "none": ["", "Hi.", "a <tool_cal b", "<tool", "</tool_call>", "🎉"],
    "required": [OSLO, WEEK, f"{OSLO}\n{OSLO}\n{WEEK}"],
    "named": [OSLO, call_text("get_weather", '{"city": "</tool_call>\\n \\"<tool_call>"}')],
    "at most one": ["", "Hi.", OSLO, f"Hi. {WEEK}"],
}
ILLEGAL = {
    "auto": [
        BEGIN,
        "a <tool_call> b",
        OSLO.removesuffix(">"),
        f"{OSLO}\n",
        f"{OSLO} Done.",
        OSLO + OSLO,
        call_text("get_time", "{}"),
        call_text("get_weather", "{}"),
        call_text("get_weather", '{"days": 1}'),
        call_text("get_weather_forecast", '{"city": "Oslo"}'),
        call_text("get_weather", '{"city": 1}'),
        call_text("get_weather", '{"city": null}'),
        call_text("get_weather_forecast", '{"days": 1.5}'),
        call_text("get_weather_forecast", '{"days": "1"}'),
        call_text("get_weather_forecast", '{"days": 1, "hours": 2}'),
        call_text("get_weather", '{"city":"Oslo"}'),
        call_text("get_weather", '{"city": "Os\nlo"}'),
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>',
    ],
    "none": [BEGIN, f"Hi. {BEGIN}", OSLO, f"<tool_{BEGIN}"],
    "required": ["", "Hi.", f"Hi. {OSLO}", f"\n{OSLO}", f"{OSLO}\n", f"{OSLO}Hi."],
    "named": ["", f"{OSLO}\n{OSLO}", WEEK, f" {OSLO}"],
    "at most one": [f"{OSLO}\n{OSLO}", f"{OSLO}\n", BEGIN],
}


def named_cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(name, text) for name, texts in table.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), named_cases(LEGAL))
def test_a_legal_turn_is_admitted(byte_compiler: GrammarCompiler, name: str, text: str) -> None:
    assert admits_text(byte_compiler, CONSTRAINTS[name], text)


@pytest.mark.parametrize(("name", "text"), named_cases(LEGAL))
def test_a_legal_turn_is_admitted_in_a_real_vocabulary(
    smollm2_compiler: GrammarCompiler, name: str, text: str
) -> None:
    matcher = new_matcher(smollm2_compiler, CONSTRAINTS[name])

    assert admits(matcher, smollm2_tokenizer().encode_text(text))


@pytest.mark.parametrize(("name", "text"), named_cases(ILLEGAL))
def test_an_illegal_turn_is_refused(byte_compiler: GrammarCompiler, name: str, text: str) -> None:
    assert not admits_text(byte_compiler, CONSTRAINTS[name], text)


@pytest.mark.parametrize(("name", "text"), named_cases(ILLEGAL))
def test_an_illegal_turn_is_refused_in_a_real_vocabulary(
    smollm2_compiler: GrammarCompiler, name: str, text: str
) -> None:
    matcher = new_matcher(smollm2_compiler, CONSTRAINTS[name])

    assert not admits(matcher, smollm2_tokenizer().encode_text(text))


@pytest.mark.parametrize(
    ("constraint", "legal", "illegal"),
    [
        (NONE, "a <tool_call", "> b"),
        (AUTO, BEGIN, " b"),
        (AUTO, '<tool_call>\n{"name": "get_', "time"),
        (NAMED, '<tool_call>\n{"name": "get_weather', '_forecast"'),
        (AUTO, '<tool_call>\n{"name": "get_weather", "arguments": {"city": ', "1}"),
        (AUTO, '<tool_call>\n{"name": "get_weather", "arguments": {', "}"),
        (AT_MOST_ONE, OSLO, f"\n{OSLO}"),
        (REQUIRED, "", "Hi."),
    ],
)
def test_a_turn_is_refused_where_it_goes_wrong(
    byte_compiler: GrammarCompiler, constraint: ToolConstraint, legal: str, illegal: str
) -> None:
    matcher = new_matcher(byte_compiler, constraint)

    assert refused(matcher, legal + illegal) == illegal


def test_an_unlisted_property_is_refused_at_its_name(byte_compiler: GrammarCompiler) -> None:
    legal = '<tool_call>\n{"name": "get_weather_forecast", "arguments": {"days": 1, "'

    assert refused(new_matcher(byte_compiler, AUTO), legal + 'hours": 2}') == 'hours": 2}'


def test_without_functions_there_is_nothing_to_constrain(byte_compiler: GrammarCompiler) -> None:
    assert byte_compiler.matcher(ToolConstraint()) is None


def test_a_token_that_the_mask_does_not_allow_is_an_error(byte_compiler: GrammarCompiler) -> None:
    matcher = new_matcher(byte_compiler, NAMED)

    with pytest.raises(RuntimeError, match="grammar refused"):
        matcher.accept(IM_START)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_function_names_of_every_kind_can_be_called(name: str) -> None:
    functions = tuple(map(FunctionTool, ["f", "get-weather_2", "9", "_", "A" * 64]))
    compiler = GrammarCompiler(BYTE_LEVEL)

    for function in functions:
        text = call_text(function.name, "{}")
        constraint = ToolConstraint(functions, min_calls=1)
        assert admits_text(compiler, constraint, text)


@pytest.mark.parametrize(
    ("least", "most", "admitted"),
    [(0, None, [0, 1, 2, 3, 4]), (0, 2, [0, 1, 2]), (1, 2, [1, 2]), (2, 3, [2, 3]), (3, 3, [3])],
)
def test_the_number_of_calls_is_kept(
    byte_compiler: GrammarCompiler, least: int, most: int | None, admitted: list[int]
) -> None:
    constraint = ToolConstraint(BOTH, least, most)

    counts = [n for n in range(5) if admits_text(byte_compiler, constraint, "\n".join([OSLO] * n))]

    assert counts == admitted


# --- Tokens --------------------------------------------------------------------------------------


def cut_otherwise(text: str, length: int) -> list[int]:
    """Return ids of ``text`` that the tokenizer would not have chosen."""
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    return [i for piece in pieces for i in smollm2_tokenizer().encode_text(piece)]


@pytest.mark.parametrize(("name", "text"), named_cases(LEGAL))
@pytest.mark.parametrize("length", [1, 3])
def test_a_legal_turn_is_accepted_however_it_is_cut_into_tokens(
    smollm2_compiler: GrammarCompiler, name: str, text: str, length: int
) -> None:
    matcher = new_matcher(smollm2_compiler, CONSTRAINTS[name])

    for token_id in cut_otherwise(text, length):
        matcher.accept(token_id)

    assert may_end(matcher)


@pytest.mark.parametrize("length", [1, 3])
def test_where_the_model_has_a_choice_the_mask_leaves_it_the_choice_of_tokens(
    smollm2_compiler: GrammarCompiler, length: int
) -> None:
    matcher = new_matcher(smollm2_compiler, ToolConstraint((WEATHER,), max_calls=1))
    # Where only one text is possible, the mask gives its own tokens and no others.
    forced_head = '\n{"name": "get_weather", "arguments": {"city": "'
    forced_tail = "}\n</tool_call>"

    ids = [
        *cut_otherwise(f"Hello, wonderful 🎉 world.\n{BEGIN}", length),
        *smollm2_tokenizer().encode_text(forced_head),
        *cut_otherwise('Wonderful Oslo 🎉, Norway"}', length),
        *smollm2_tokenizer().encode_text(forced_tail),
    ]

    assert admits(matcher, ids)


WIDE = [">\n", ">\n{", "hi<", "<tool", "_call>", BEGIN, f"{BEGIN}\n", f"hi {BEGIN}\n{{", "><", "> "]


@pytest.fixture(scope="module")
def wide_tokenizer() -> Tokenizer:
    """Bytes, and tokens that reach over the ends of the marker."""
    description = json.loads(byte_tokenizer().to_str())
    spelled = [word.replace("\n", "Ċ").replace(" ", "Ġ") for word in WIDE]
    description["model"]["vocab"] |= {word: 259 + i for i, word in enumerate(spelled)}
    return Tokenizer(FastTokenizer.from_str(json.dumps(description)), STOP_IDS)


def ids_of(pieces: Sequence[str]) -> list[int]:
    return [
        i
        for piece in pieces
        for i in ([259 + WIDE.index(piece)] if piece in WIDE else BYTE_LEVEL.encode_text(piece))
    ]


REST = OSLO.removeprefix(f"{BEGIN}\n")


@pytest.mark.parametrize(
    "pieces",
    [
        ["<tool_call", ">\n", REST],
        ["<tool_call", ">\n{", REST[1:]],
        ["<tool", "_call>", "\n", REST],
        ["hi<", "tool", "_call>", "\n" + REST],
        ["hi<", "tool_call", ">\n{", REST[1:]],
        [BEGIN, "\n" + REST],
        [f"{BEGIN}\n", REST],
        [f"hi {BEGIN}\n{{", REST[1:]],
        ["hi<", "hi<", "<tool", BEGIN, "\n" + REST],
    ],
)
def test_a_token_may_reach_over_the_ends_of_the_marker(
    wide_tokenizer: Tokenizer, pieces: list[str]
) -> None:
    matcher = new_matcher(GrammarCompiler(wide_tokenizer), ToolConstraint(BOTH))

    assert admits(matcher, ids_of(pieces))


@pytest.mark.parametrize(
    ("pieces", "wrong"),
    [
        (["<tool_call"], "><"),
        (["<tool_call"], "> "),
        ([OSLO.removesuffix(">")], "><"),
        ([OSLO.removesuffix(">")], "> "),
    ],
)
def test_a_token_that_goes_wrong_after_the_marker_is_masked(
    wide_tokenizer: Tokenizer, pieces: list[str], wrong: str
) -> None:
    matcher = new_matcher(GrammarCompiler(wide_tokenizer), ToolConstraint(BOTH))
    assert num_accepted(matcher, ids_of(pieces)) == len(ids_of(pieces))

    assert not matcher.mask()[ids_of([wrong])[0]]


@pytest.mark.parametrize("begun", ["<tool_call", "x <tool_", ""])
def test_no_token_completes_a_marker_where_no_calls_are_allowed(
    wide_tokenizer: Tokenizer, begun: str
) -> None:
    matcher = new_matcher(GrammarCompiler(wide_tokenizer), NONE)
    num_accepted(matcher, BYTE_LEVEL.encode_text(begun))

    allowed = [wide_tokenizer.token_bytes(int(i)) for i in np.flatnonzero(matcher.mask())]

    assert allowed
    assert not any(BEGIN.encode() in begun.encode() + token for token in allowed)


def test_no_token_of_a_real_vocabulary_completes_a_marker_where_no_calls_are_allowed(
    smollm2_compiler: GrammarCompiler,
) -> None:
    tokenizer = smollm2_tokenizer()
    matcher = new_matcher(smollm2_compiler, NONE)
    num_accepted(matcher, tokenizer.encode_text("x <tool_call"))

    allowed = [tokenizer.token_bytes(int(i)) for i in np.flatnonzero(matcher.mask())]

    assert len(allowed) > 40_000
    assert not any(token.startswith(b">") for token in allowed)


@pytest.mark.parametrize("name", ["auto", "required", "named", "at most one"])
def test_after_the_marker_a_real_vocabulary_can_only_go_on_with_a_call(
    smollm2_compiler: GrammarCompiler, name: str
) -> None:
    tokenizer = smollm2_tokenizer()
    matcher = new_matcher(smollm2_compiler, CONSTRAINTS[name])
    num_accepted(matcher, tokenizer.encode_text("<tool_call>"))

    allowed = [tokenizer.token_bytes(int(i)) for i in np.flatnonzero(matcher.mask())]

    assert allowed
    assert all(b'\n{"name": "'.startswith(token) for token in allowed)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_control_tokens_are_never_text(byte_compiler: GrammarCompiler, name: str) -> None:
    text = max(LEGAL[name], key=len)
    matcher = new_matcher(byte_compiler, CONSTRAINTS[name])

    for token_id in BYTE_LEVEL.encode_text(text):
        assert not matcher.mask()[IM_START]
        matcher.accept(token_id)
    assert not matcher.mask()[IM_START]


def test_no_control_token_of_a_real_vocabulary_is_text(smollm2_compiler: GrammarCompiler) -> None:
    controls = set(smollm2_tokenizer().added_tokens.values()) - set(STOP_IDS)

    for constraint in AUTO, NONE:
        matcher = new_matcher(smollm2_compiler, constraint)
        assert not matcher.mask()[list(controls)].any()


# --- Where a turn may end ------------------------------------------------------------------------


def ends_of(compiler: GrammarCompiler, constraint: ToolConstraint, text: str) -> list[bytes]:
    """Return the beginnings of ``text`` that may be whole turns."""
    matcher = new_matcher(compiler, constraint)
    data = text.encode()
    ends = [b""] if may_end(matcher) else []
    for length, token_id in enumerate(BYTE_LEVEL.encode_text(text), start=1):
        assert matcher.mask()[token_id]
        matcher.accept(token_id)
        if may_end(matcher):
            ends.append(data[:length])
    return ends


def beginnings(text: str) -> list[bytes]:
    return [text[:length].encode() for length in range(len(text) + 1)]


def test_a_turn_may_end_anywhere_in_text_and_after_a_call(byte_compiler: GrammarCompiler) -> None:
    ends = ends_of(byte_compiler, AUTO, f"Hi.{OSLO}\n{WEEK}")

    in_text = beginnings("Hi.<tool_call")
    assert ends == [*in_text, f"Hi.{OSLO}".encode(), f"Hi.{OSLO}\n{WEEK}".encode()]


def test_a_turn_may_not_end_inside_a_character(byte_compiler: GrammarCompiler) -> None:
    for constraint in AUTO, NONE:
        assert ends_of(byte_compiler, constraint, "aé🎉") == beginnings("aé🎉")


def test_a_forced_turn_may_end_after_a_call_only(byte_compiler: GrammarCompiler) -> None:
    assert ends_of(byte_compiler, REQUIRED, f"{OSLO}\n{OSLO}") == [
        OSLO.encode(),
        f"{OSLO}\n{OSLO}".encode(),
    ]
    assert ends_of(byte_compiler, NAMED, OSLO) == [OSLO.encode()]


@pytest.mark.parametrize("constraint", [NAMED, AT_MOST_ONE], ids=["named", "at most one"])
def test_after_the_last_call_allowed_a_turn_can_only_end(
    byte_compiler: GrammarCompiler, constraint: ToolConstraint
) -> None:
    matcher = new_matcher(byte_compiler, constraint)
    num_accepted(matcher, BYTE_LEVEL.encode_text(OSLO))

    assert np.flatnonzero(matcher.mask()).tolist() == STOP_IDS


@pytest.mark.parametrize("stop_id", STOP_IDS)
def test_a_matcher_accepts_either_end(byte_compiler: GrammarCompiler, stop_id: int) -> None:
    matcher = new_matcher(byte_compiler, AUTO)

    matcher.accept(stop_id)


# --- Schemas -------------------------------------------------------------------------------------

S: Schema = {"type": "string"}
KEYWORDS = ["default", "enum", "type", "properties", "const", "$ref", "anyOf", "allOf", "$defs"]


def properties(required: list[str] | None = None, **listed: Any) -> Schema:
    names = list(listed) if required is None else required
    return {"type": "object", "properties": listed, "required": names}


def admits_arguments(
    compiler: GrammarCompiler, parameters: Schema | None, arguments: str, *, forced: bool
) -> bool:
    constraint = ToolConstraint((FunctionTool("f", None, parameters),), int(forced), 1)
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


@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS.values(), ids=SCHEMAS)
def test_a_schema_that_can_be_compiled_passes_the_check(
    byte_compiler: GrammarCompiler, schema: Schema, valid: list[Any], invalid: list[Any]
) -> None:
    byte_compiler.check(FunctionTool("f", None, schema))


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
    with pytest.raises(GrammarError) as caught:
        byte_compiler.check(FunctionTool("f", None, schema))

    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert "tool_call" not in message  # nothing of our own grammar
    assert not message.startswith("at ")


def test_names_that_may_be_any_string_are_a_remark(byte_compiler: GrammarCompiler) -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": S}

    byte_compiler.check(FunctionTool("f", None, properties(a=record)))


@pytest.mark.parametrize("name", ["zip", "uri-reference", "password"])
def test_a_format_that_nobody_defines_is_a_remark(
    byte_compiler: GrammarCompiler, name: str
) -> None:
    schema = properties(a={"type": "string", "format": name})

    byte_compiler.check(FunctionTool("f", None, schema))


# --- Compiling once ------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars compiled during the test."""
    grammars: list[str] = []

    compile_grammar = llguidance.LLMatcher

    def record(tokenizer: Any, grammar: str, **kwargs: Any) -> Any:
        grammars.append(grammar)
        return compile_grammar(tokenizer, grammar, **kwargs)

    monkeypatch.setattr(llguidance, "LLMatcher", record)
    return grammars


def test_equal_constraints_are_compiled_once(compiled: list[str]) -> None:
    compiler = GrammarCompiler(BYTE_LEVEL)

    for _ in range(3):
        compiler.matcher(ToolConstraint((WEATHER,), 1))
        compiler.matcher(ToolConstraint((FunctionTool("g"),), 1))

    assert len(compiled) == 2


def test_different_constraints_are_compiled_apart(compiled: list[str]) -> None:
    compiler = GrammarCompiler(BYTE_LEVEL)

    for constraint in CONSTRAINTS.values():
        compiler.matcher(constraint)

    assert len(set(compiled)) == len(compiled) == len(CONSTRAINTS)


def test_a_check_is_compiled_once(compiled: list[str]) -> None:
    compiler = GrammarCompiler(BYTE_LEVEL)
    compiler.check(WEATHER)
    compiler.check(FORECAST)
    before = len(compiled)

    compiler.check(WEATHER)
    compiler.check(FORECAST)

    assert len(compiled) == before


def test_matchers_of_one_grammar_move_apart(byte_compiler: GrammarCompiler) -> None:
    ahead, behind = new_matcher(byte_compiler, NAMED), new_matcher(byte_compiler, NAMED)

    assert admits(ahead, BYTE_LEVEL.encode_text(OSLO))

    assert admits(behind, BYTE_LEVEL.encode_text(OSLO))


def test_masks_are_values(byte_compiler: GrammarCompiler) -> None:
    matcher = new_matcher(byte_compiler, NAMED)
    before = matcher.mask()
    copy = before.copy()

    num_accepted(matcher, BYTE_LEVEL.encode_text("<tool"))
    matcher.mask()

    assert (before == copy).all()


# --- Bounds on the strings of forced calls -------------------------------------------------------


def longest_city(compiler: GrammarCompiler, constraint: ToolConstraint, character: str) -> int:
    """Return how many times ``character`` may be repeated in a string, up to 100 times."""
    matcher = new_matcher(compiler, constraint)
    head = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
    left = refused(matcher, head + character * 100)
    return 100 - left.count(character)


@pytest.mark.parametrize("constraint", [REQUIRED, NAMED], ids=["required", "named"])
@pytest.mark.parametrize("character", ["x", "é", "🎉"])
def test_strings_of_forced_calls_end_after_64_characters(
    byte_compiler: GrammarCompiler, constraint: ToolConstraint, character: str
) -> None:
    assert longest_city(byte_compiler, constraint, character) == 64


@pytest.mark.parametrize("constraint", [AUTO, AT_MOST_ONE], ids=["auto", "at most one"])
def test_strings_of_calls_that_the_model_chose_to_make_are_not_bounded(
    byte_compiler: GrammarCompiler, constraint: ToolConstraint
) -> None:
    assert longest_city(byte_compiler, constraint, "x") == 100


def test_the_bound_can_be_set_and_lifted() -> None:
    assert longest_city(GrammarCompiler(BYTE_LEVEL, max_forced_string=5), NAMED, "x") == 5
    assert longest_city(GrammarCompiler(BYTE_LEVEL, max_forced_string=0), NAMED, "x") == 100


def test_a_bound_of_the_schema_counts_instead() -> None:
    city = properties(city={"type": "string", "maxLength": 80})
    constraint = ToolConstraint((FunctionTool("get_weather", None, city),), 1)

    assert longest_city(GrammarCompiler(BYTE_LEVEL), constraint, "x") == 80


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
    function = FunctionTool("f", None, schema)
    compiler = GrammarCompiler(BYTE_LEVEL, max_forced_string=3)
    try:
        compiler.matcher(ToolConstraint((function,)))
    except GrammarError:
        return

    assert compiler.matcher(ToolConstraint((function,), 1)) is not None


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
    matcher = compiler.matcher(ToolConstraint((function,), 1, 1))
    assert matcher is not None

    for token_id in tokenizer.encode_text(text):
        mask = matcher.mask()
        assert mask[token_id]
        assert not any(mask[control] for control in tokenizer.added_tokens.values())
        matcher.accept(token_id)

    assert all(matcher.mask()[stop] for stop in tokenizer.stop_ids)
