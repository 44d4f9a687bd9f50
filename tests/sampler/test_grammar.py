from dataclasses import replace
from typing import Any

import llguidance
import msgspec
import numpy as np
import pytest

from protocol.client_events import TextFormat, TextFormatKind
from protocol.tools import CallableTool, FunctionTool
from sampler.grammar import GrammarCompiler
from sampler.params import Constraint
from sampler.tool_calls import BEGIN, END
from tests.sampler.matching import (
    BYTE_LEVEL,
    STOP_IDS,
    WideTokenizer,
    admits,
    admits_text,
    cut_otherwise,
    free_form_tool,
    input_text,
    may_end,
    new_matcher,
    num_accepted,
    refused,
)
from tests.sampler.smollm2 import smollm2_tokenizer
from tests.tiny_model import IM_START, WEATHER, call_text

Schema = dict[str, Any]

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

AUTO = Constraint(BOTH)
NONE = Constraint(BOTH, max_calls=0)
REQUIRED = Constraint(BOTH, min_calls=1)
NAMED = Constraint((WEATHER,), min_calls=1, max_calls=1)
AT_MOST_ONE = Constraint(BOTH, max_calls=1)

SAY = free_form_tool("say")
FREE_FORM = Constraint((WEATHER, SAY))

JSON = TextFormat(TextFormatKind.JSON_OBJECT)
CITY = TextFormat(TextFormatKind.JSON_SCHEMA, "city", WEATHER.parameters, strict=False)
CITY_OR_CALL = Constraint(BOTH, text_format=CITY)

CONSTRAINTS = {
    "auto": AUTO,
    "none": NONE,
    "required": REQUIRED,
    "named": NAMED,
    "at most one": AT_MOST_ONE,
    "free form": FREE_FORM,
    "JSON": Constraint(text_format=JSON),
    "schema": Constraint(text_format=CITY),
    "schema or call": CITY_OR_CALL,
    "schema, no calls": replace(CITY_OR_CALL, max_calls=0),
    "schema, required": replace(CITY_OR_CALL, min_calls=1),
    "thinks": replace(AUTO, thinks=True),
    "thinks, none": replace(NONE, thinks=True),
    "thinks, required": replace(REQUIRED, thinks=True),
    "thinks, schema or call": replace(CITY_OR_CALL, thinks=True),
    "thinking": replace(AUTO, thinks=True, think_is_open=True),
    "thinking, schema": Constraint(text_format=CITY, thinks=True, think_is_open=True),
}

OSLO = call_text("get_weather", '{"city": "Oslo"}')
WEEK = call_text("get_weather_forecast", '{"days": 7, "where": "Oslo"}')
HI = input_text("say", "Hi!")
MARKERS = f"{BEGIN}\n{{{END} <think> <tool_call>"


@pytest.fixture(scope="module")
def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTE_LEVEL)


@pytest.fixture(scope="module")
def smollm2_compiler() -> GrammarCompiler:
    return GrammarCompiler(smollm2_tokenizer())


# --- Which turns are legal -----------------------------------------------------------------------

LEGAL = {
    "auto": ["", "Hi.", "a <tool_cal b", OSLO, f"Hi.\n{OSLO}", f"é🎉{WEEK}", f"{OSLO}\n{WEEK}"],
    "none": ["", "Hi.", "a <tool_cal b", "<tool", "</tool_call>", "🎉"],
    "required": [OSLO, WEEK, f"{OSLO}\n{OSLO}\n{WEEK}"],
    "named": [OSLO, call_text("get_weather", '{"city": "</tool_call>\\n \\"<tool_call>"}')],
    "at most one": ["", "Hi.", OSLO, f"Hi. {WEEK}"],
    "free form": [
        "Hi.",
        HI,
        f"Hi. {HI}\n{OSLO}\n{HI}",
        input_text("say", ""),
        f'{BEGIN}\n{{"name": "say"}}\n{END}',
        input_text("say", f"\n é🎉 {END}\n\n{BEGIN}\n</tool_cal\n"),
        input_text("say", '{"name": "get_weather", "arguments": {"city": "Oslo"}}'),
    ],
    "JSON": ["{}", '{"a": [1, {"b": null}], "c": "<tool_call>"}'],
    "schema": ['{"city": "Oslo"}', '{"city": "<think><tool_call>\\n"}'],
    "schema or call": ['{"city": "Oslo"}', OSLO, f"{OSLO}\n{WEEK}"],
    "schema, no calls": ['{"city": "Oslo"}'],
    "schema, required": [OSLO, f"{OSLO}\n{WEEK}"],
    "thinks": [
        "",
        "Hi.",
        "Hi <think>",
        f"Hi. {OSLO}",
        "<thin",
        "<think></think>",
        f"\n <think>\n{MARKERS}\n</think>\n\n \nHi.",
        f"<think>{MARKERS}</think>Hi.\n{OSLO}",
        f"<think>{OSLO}</think>\n\n{OSLO}",
        "<think></think><think>Hi.",
    ],
    "thinks, none": ["", "Hi.", f"<think>{MARKERS}</think>Hi.", "<think></think><tool_call"],
    "thinks, required": [
        OSLO,
        f"<think>\n{MARKERS}\n</think>\n\n{OSLO}",
        f"<think>Hm.</think>{OSLO}\n{OSLO}",
    ],
    "thinks, schema or call": [
        OSLO,
        '{"city": "<think>"}',
        f"<think>{MARKERS}</think>\n{OSLO}",
        f'<think>\n{MARKERS}\n</think>\n\n{{"city": "Oslo"}}',
    ],
    "thinking": ["</think>", f"\n{MARKERS}</think>Hi.", f"{OSLO}</think>\n\n{OSLO}"],
    "thinking, schema": [f'{MARKERS}\n</think>\n\n{{"city": "Oslo"}}'],
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
    "free form": [
        f"{HI}\n",
        f"{HI} Bye.",
        HI + HI,
        HI.removesuffix(END),
        f'{BEGIN}\n{{"name": "say"}} Hi!\n{END}',
        f'{BEGIN}\n{{"name": "say"}}\nHi!{END}',
        call_text("say", '{"input": "Hi!"}'),
        input_text("get_weather", "Oslo"),
        input_text("say", f"Hi.\n{END}"),
    ],
    "JSON": ["", "1", "[]", "{", " {}", "{} ", '{"a":1}', "Hi.", BEGIN, "{}{}"],
    "schema": ["", "{}", '{"city": 1}', '{"city": "Oslo"}.', "Oslo", OSLO],
    "schema or call": [
        "",
        "{}",
        f"Hi. {OSLO}",
        f'{{"city": "Oslo"}}\n{OSLO}',
        f'{OSLO}\n{{"city": "Oslo"}}',
        f"\n{OSLO}",
    ],
    "schema, no calls": ["", OSLO, "{}"],
    "schema, required": ["", '{"city": "Oslo"}', f"Hi. {OSLO}"],
    "thinks": ["<think>", f"<think>{OSLO}", " <think>Hi.</think", f"Hi. <think>{BEGIN}</think>"],
    "thinks, none": ["<think>", f"<think></think>{BEGIN}", f"Hi. <think>{BEGIN}</think>"],
    "thinks, required": [
        "",
        "<think></think>",
        "<think></think>Hi.",
        f"<think></think> {OSLO}",
        f"<think></think>\n\n\n{OSLO}",
        f"<think>{OSLO}",
        f"<think></think><think></think>{OSLO}",
    ],
    "thinks, schema or call": [
        "",
        "Hi.",
        "<think></think>Hi.",
        '<think>{"city": "Oslo"}',
        '<think></think>{"city": 1}',
    ],
    "thinking": ["", "Hi.", OSLO, f"</think>{BEGIN}"],
    "thinking, schema": ["", '{"city": "Oslo"}', "</think>", "</think>Hi."],
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
        (FREE_FORM, '<tool_call>\n{"name": "say"}', " Hi"),
        (FREE_FORM, f"{HI}\n", "Hi"),
        (CITY_OR_CALL, "", "Hi."),
        (CITY_OR_CALL, '{"city": "Oslo"}', "\n"),
        (replace(REQUIRED, thinks=True), "<think>Hi.</think>\n\n", "Hi."),
        (replace(REQUIRED, thinks=True), "<t", "alk>"),
    ],
)
def test_a_turn_is_refused_where_it_goes_wrong(
    byte_compiler: GrammarCompiler, constraint: Constraint, legal: str, illegal: str
) -> None:
    matcher = new_matcher(byte_compiler, constraint)

    assert refused(matcher, legal + illegal) == illegal


def test_an_unlisted_property_is_refused_at_its_name(byte_compiler: GrammarCompiler) -> None:
    legal = '<tool_call>\n{"name": "get_weather_forecast", "arguments": {"days": 1, "'

    assert refused(new_matcher(byte_compiler, AUTO), legal + 'hours": 2}') == 'hours": 2}'


@pytest.mark.parametrize(
    "constraint",
    [Constraint(), Constraint(max_calls=0), Constraint(thinks=True, think_is_open=True)],
)
def test_without_tools_and_a_format_there_is_nothing_to_constrain(
    byte_compiler: GrammarCompiler, constraint: Constraint
) -> None:
    assert byte_compiler.matcher(constraint) is None


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
        constraint = Constraint(functions, min_calls=1)
        assert admits_text(compiler, constraint, text)


@pytest.mark.parametrize(
    ("least", "most", "admitted"),
    [(0, None, [0, 1, 2, 3, 4]), (0, 2, [0, 1, 2]), (1, 2, [1, 2]), (2, 3, [2, 3]), (3, 3, [3])],
)
def test_the_number_of_calls_is_kept(
    byte_compiler: GrammarCompiler, least: int, most: int | None, admitted: list[int]
) -> None:
    constraint = Constraint(BOTH, least, most)

    counts = [n for n in range(5) if admits_text(byte_compiler, constraint, "\n".join([OSLO] * n))]

    assert counts == admitted


# --- Tokens --------------------------------------------------------------------------------------


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
    matcher = new_matcher(smollm2_compiler, Constraint((WEATHER,), max_calls=1))
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
def wide_tokenizer() -> WideTokenizer:
    """Bytes, and tokens that reach over the ends of the marker."""
    return WideTokenizer(WIDE)


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
    wide_tokenizer: WideTokenizer, pieces: list[str]
) -> None:
    matcher = new_matcher(GrammarCompiler(wide_tokenizer), Constraint(BOTH))

    assert admits(matcher, wide_tokenizer.ids_of(pieces))


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
    wide_tokenizer: WideTokenizer, pieces: list[str], wrong: str
) -> None:
    matcher = new_matcher(GrammarCompiler(wide_tokenizer), Constraint(BOTH))
    assert num_accepted(matcher, wide_tokenizer.ids_of(pieces)) == len(
        wide_tokenizer.ids_of(pieces)
    )

    assert not matcher.mask()[wide_tokenizer.ids_of([wrong])[0]]


@pytest.mark.parametrize("begun", ["<tool_call", "x <tool_", ""])
def test_no_token_completes_a_marker_where_no_calls_are_allowed(
    wide_tokenizer: WideTokenizer, begun: str
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


def ends_of(compiler: GrammarCompiler, constraint: Constraint, text: str) -> list[bytes]:
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
    byte_compiler: GrammarCompiler, constraint: Constraint
) -> None:
    matcher = new_matcher(byte_compiler, constraint)
    num_accepted(matcher, BYTE_LEVEL.encode_text(OSLO))

    assert np.flatnonzero(matcher.mask()).tolist() == STOP_IDS


@pytest.mark.parametrize("stop_id", STOP_IDS)
def test_a_matcher_accepts_either_end(byte_compiler: GrammarCompiler, stop_id: int) -> None:
    matcher = new_matcher(byte_compiler, AUTO)

    matcher.accept(stop_id)


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


def strict(tool: CallableTool) -> CallableTool:
    """Return ``tool`` as one that is not tried before it is compiled with others."""
    if isinstance(tool, FunctionTool):
        return msgspec.structs.replace(tool, strict=True)
    return tool


def test_equal_constraints_are_compiled_once(compiled: list[str]) -> None:
    compiler = GrammarCompiler(BYTE_LEVEL)

    for _ in range(3):
        compiler.matcher(Constraint((strict(WEATHER),), 1))
        compiler.matcher(Constraint((FunctionTool("g"),), 1))

    assert len(compiled) == 2


def test_a_schema_that_cannot_be_enforced_is_tried_once(compiled: list[str]) -> None:
    compiler = GrammarCompiler(BYTE_LEVEL)
    function = FunctionTool("f", None, {"properties": {"a": {"not": {"type": "string"}}}})
    constraint = Constraint((function, WEATHER))
    compiler.matcher(constraint)
    before = len(compiled)

    compiler.matcher(constraint)

    assert len(compiled) == before


def test_different_constraints_are_compiled_apart(compiled: list[str]) -> None:
    compiler = GrammarCompiler(BYTE_LEVEL)

    for constraint in CONSTRAINTS.values():
        tools = tuple(map(strict, constraint.tools))
        compiler.matcher(replace(constraint, tools=tools))

    # To forced calls a schema makes no difference, nor do tools that may not be called to a schema.
    assert len(set(compiled)) == len(compiled) == len(CONSTRAINTS) - 2


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


def longest_city(compiler: GrammarCompiler, constraint: Constraint, character: str) -> int:
    """Return how many times ``character`` may be repeated in a string, up to 100 times."""
    matcher = new_matcher(compiler, constraint)
    head = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
    left = refused(matcher, head + character * 100)
    return 100 - left.count(character)


@pytest.mark.parametrize("constraint", [REQUIRED, NAMED], ids=["required", "named"])
@pytest.mark.parametrize("character", ["x", "é", "🎉"])
def test_strings_of_forced_calls_end_after_64_characters(
    byte_compiler: GrammarCompiler, constraint: Constraint, character: str
) -> None:
    assert longest_city(byte_compiler, constraint, character) == 64


@pytest.mark.parametrize("constraint", [AUTO, AT_MOST_ONE], ids=["auto", "at most one"])
def test_strings_of_calls_that_the_model_chose_to_make_are_not_bounded(
    byte_compiler: GrammarCompiler, constraint: Constraint
) -> None:
    assert longest_city(byte_compiler, constraint, "x") == 100


def longest_input(compiler: GrammarCompiler, constraint: Constraint) -> int:
    """Return how many characters an input may have, up to 100."""
    matcher = new_matcher(compiler, constraint)
    left = refused(matcher, '<tool_call>\n{"name": "say"}\n' + "🎉" * 100)
    return 100 - left.count("🎉")


def test_inputs_of_forced_calls_end_after_64_characters(byte_compiler: GrammarCompiler) -> None:
    assert longest_input(byte_compiler, Constraint((SAY,), min_calls=1)) == 64
    assert longest_input(byte_compiler, Constraint((SAY,))) == 100
    assert longest_input(GrammarCompiler(BYTE_LEVEL, 0), Constraint((SAY,), 1)) == 100


def test_strings_of_messages_are_not_bounded(byte_compiler: GrammarCompiler) -> None:
    city = f'{{"city": "{"x" * 100}"}}'

    assert admits_text(byte_compiler, Constraint(text_format=CITY), city)


def test_the_bound_can_be_set_and_lifted() -> None:
    assert longest_city(GrammarCompiler(BYTE_LEVEL, max_forced_string=5), NAMED, "x") == 5
    assert longest_city(GrammarCompiler(BYTE_LEVEL, max_forced_string=0), NAMED, "x") == 100


def test_a_bound_of_the_schema_counts_instead() -> None:
    city = {"type": "string", "maxLength": 80}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    constraint = Constraint((FunctionTool("get_weather", None, schema),), 1)

    assert longest_city(GrammarCompiler(BYTE_LEVEL), constraint, "x") == 80
