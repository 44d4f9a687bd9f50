"""What a grammar admits, the parser reads back as it was meant."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from protocol.client_events import TextFormat, TextFormatKind
from protocol.items import CustomToolCall, FunctionCall
from sampler.conversation import call_text
from sampler.detokenizer import Detokenizer
from sampler.grammar import GrammarCompiler
from sampler.outputs import CallStarted, ReasoningDelta, TextDelta
from sampler.params import Constraint
from sampler.sampled_turn import SampledTurn, TurnOutput
from sampler.sampling import Sampled
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import BEGIN, END
from tests.sampler.matching import BYTE_LEVEL, free_form_tool, input_text, new_matcher
from tests.sampler.smollm2 import smollm2_tokenizer
from tests.tiny_model import WEATHER
from tests.tiny_model import call_text as function_call_text

INPUTS = {
    "say": r"(?s:.*)",
    "day": r"[0-9]{4}-[0-9]{2}",
    "list": r"([^;]*;)+",
}
TOOLS = (
    WEATHER,
    free_form_tool("say"),
    free_form_tool("day", "regex", INPUTS["day"]),
    free_form_tool("list", "lark", 'start: (/[^;]*/ ";")+'),
)
CITY = TextFormat(TextFormatKind.JSON_SCHEMA, "city", WEATHER.parameters)
AUTO = Constraint(TOOLS)
CONSTRAINTS = {
    "auto": AUTO,
    "none": replace(AUTO, max_calls=0),
    "required": replace(AUTO, min_calls=1),
    "one or two": replace(AUTO, min_calls=1, max_calls=2),
    "at most one": replace(AUTO, max_calls=1),
    "schema": Constraint(text_format=CITY),
    "schema or call": replace(AUTO, text_format=CITY),
    "JSON or call": replace(AUTO, text_format=TextFormat(TextFormatKind.JSON_OBJECT)),
}
ALL_CONSTRAINTS = {
    f"{thinking}{name}": replace(constraint, thinks=bool(thinking), think_is_open=is_open)
    for thinking, is_open in (("", False), ("thinks, ", False), ("thinking, ", True))
    for name, constraint in CONSTRAINTS.items()
}

PIECES = [
    *(BEGIN, END, f"\n{END}", "\n", "\n\n", " ", "a", "é🎉", ";", '"', "}", "{}", "<", "\\"),
    *("<think>", "</think>", "Hi. ", "<tool_", "2026-11", '{"city": "', 'Oslo"}'),
    *(f'{BEGIN}\n{{"name": "{name}' for name in ("", "get_weather", "say", "day", "list")),
    *('"}\n', '", "arguments": {"city": "'),
    function_call_text("get_weather", '{"city": "Oslo"}'),
    input_text("say", "Hi"),
    input_text("day", "2026-11"),
    input_text("list", "a;\nb;"),
]


@dataclass
class Walk:
    """A turn that was sampled somehow."""

    constraint: Constraint
    turn: SampledTurn
    text: str = ""
    is_whole: bool = False
    outputs: list[TurnOutput] = field(default_factory=list)

    @property
    def calls(self) -> Sequence[FunctionCall | CustomToolCall]:
        return self.turn.calls

    def joined(self, kind: type[TextDelta] | type[ReasoningDelta]) -> str:
        return "".join(output.text for output in self.outputs if isinstance(output, kind))


def walk(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, seed: int) -> Walk:
    """Sample a turn that tries to say now this, now that, for some 100 bytes."""
    constraint = ALL_CONSTRAINTS[name]
    matcher = new_matcher(compiler, constraint)
    turn = SampledTurn(
        Detokenizer(tokenizer),
        matcher,
        may_call=constraint.allows_calls,
        thinks=constraint.thinks,
        think_is_open=constraint.think_is_open,
    )
    walked, data = Walk(constraint, turn), b""
    for token_id in _tokens(matcher.mask, tokenizer, random.Random(seed)):
        if token_id in tokenizer.stop_ids:
            walked.is_whole = True
            break
        matcher.accept(token_id)
        walked.outputs += turn.feed([Sampled(token_id)])
        data += tokenizer.token_bytes(token_id)
    if walked.is_whole:
        walked.outputs += turn.flush()
    walked.text = data.decode("utf-8", "replace")
    return walked


def _tokens(
    mask: Callable[[], np.ndarray], tokenizer: Tokenizer, rng: random.Random
) -> Iterator[int]:
    for _ in range(25):
        piece = rng.choice(PIECES)
        for token_id in tokenizer.encode_text(piece):
            if not mask()[token_id]:
                break
            yield token_id
        allowed = np.flatnonzero(mask())
        assert len(allowed), "there is always a way to go on"
        stops = sorted(tokenizer.stop_ids.intersection(allowed.tolist()))
        if len(allowed) <= len(stops) or (stops and rng.random() < 0.2):
            yield stops[0]
        elif len(allowed) < 20 or rng.random() < 0.1:
            yield int(rng.choice(allowed))


def check(walked: Walk) -> None:
    check_calls(walked)
    check_text(walked)
    if walked.is_whole:
        check_whole(walked)


def check_calls(walked: Walk) -> None:
    constraint = walked.constraint
    most = len(TOOLS) * 100 if constraint.max_calls is None else constraint.max_calls
    assert len(walked.calls) <= most
    for call in walked.calls:
        if isinstance(call, FunctionCall):
            assert call.name == WEATHER.name
            assert Draft202012Validator(WEATHER.parameters).is_valid(json.loads(call.arguments))
        else:
            assert re.fullmatch(INPUTS[call.name], call.input)
            assert not f"\n{call.input}".count(f"\n{END}")


def check_text(walked: Walk) -> None:
    text = walked.joined(TextDelta)
    if walked.constraint.wants_json:
        assert not (text and walked.calls)
        assert text == "" or text.startswith("{")
    else:
        assert BEGIN not in text
    if not walked.constraint.thinks:
        assert walked.joined(ReasoningDelta) == ""
        assert walked.turn.num_reasoning_tokens == 0


def check_whole(walked: Walk) -> None:
    constraint, calls = walked.constraint, walked.calls
    assert not walked.turn.is_in_call
    assert len(calls) == sum(isinstance(output, CallStarted) for output in walked.outputs)
    assert len(calls) >= constraint.min_calls
    text, thoughts = walked.joined(TextDelta), walked.joined(ReasoningDelta)
    if constraint.wants_json and not calls:
        assert isinstance(json.loads(text), dict)
        if constraint.text_format.schema:
            assert Draft202012Validator(constraint.text_format.schema).is_valid(json.loads(text))
    # Nothing is lost: the turn is its thoughts, its text and its calls.
    said = text + "".join(map(call_text, calls))
    ways = [f"<think>{thoughts}</think>{said}", f"{thoughts}</think>{said}", said]
    assert squeezed(walked.text) in map(squeezed, ways if not thoughts else ways[:2])


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.fixture(scope="module")
def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTE_LEVEL)


@pytest.fixture(scope="module")
def smollm2_compiler() -> GrammarCompiler:
    return GrammarCompiler(smollm2_tokenizer())


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_CONSTRAINTS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_sampled_byte_by_byte_is_read_as_it_was_meant(
    byte_compiler: GrammarCompiler, name: str, seed: int
) -> None:
    check(walk(byte_compiler, BYTE_LEVEL, name, seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_CONSTRAINTS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_sampled_in_real_tokens_is_read_as_it_was_meant(
    smollm2_compiler: GrammarCompiler, name: str, seed: int
) -> None:
    check(walk(smollm2_compiler, smollm2_tokenizer(), name, seed))


def test_walks_get_everywhere(byte_compiler: GrammarCompiler) -> None:
    walks = [walk(byte_compiler, BYTE_LEVEL, "thinks, auto", seed) for seed in range(60)]

    called = {call.name for walked in walks for call in walked.calls}
    assert called == {"get_weather", "say", "day", "list"}
    assert any(walked.joined(ReasoningDelta) for walked in walks)
    assert {walked.is_whole for walked in walks} == {True, False}
