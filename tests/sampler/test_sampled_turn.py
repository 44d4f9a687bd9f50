import json
from collections.abc import Sequence

import pytest

from protocol.items import FunctionCall
from sampler.detokenizer import Detokenizer
from sampler.outputs import ArgumentsDelta, CallDone, CallStarted, TextDelta
from sampler.sampled_turn import SampledTurn, TurnOutput, new_call_id
from sampler.tokenizer import Tokenizer
from tests.tiny_model import END_OF_TEXT, IM_END, byte_tokenizer, call_text

TOKENIZER = Tokenizer(byte_tokenizer(), [END_OF_TEXT, IM_END])

OSLO = call_text("get_weather", '{"city": "Oslo"}')
TIME = call_text("get_time", "{}")


def new_turn(*, may_call: bool = True) -> SampledTurn:
    return SampledTurn(Detokenizer(TOKENIZER), None, may_call=may_call)


def feed(turn: SampledTurn, text: str) -> list[TurnOutput]:
    """Feed ``text`` and the end of the turn, a byte a token."""
    ids = [*TOKENIZER.encode_text(text), IM_END]
    outputs = [output for token_id in ids for output in turn.feed(token_id)]
    return [*outputs, *turn.flush()]


def text_in(outputs: Sequence[TurnOutput]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, TextDelta))


def kinds(outputs: Sequence[TurnOutput]) -> list[str]:
    """Return the names of the outputs, runs of one kind as one."""
    names = [type(output).__name__ for output in outputs]
    return [name for i, name in enumerate(names) if names[i - 1 : i] != [name]]


def test_text_comes_as_it_is_sampled() -> None:
    turn = new_turn()

    outputs = feed(turn, "Hé 🎉")

    assert outputs == [TextDelta("H"), TextDelta("é"), TextDelta(" "), TextDelta("🎉")]
    assert turn.calls == []


def test_a_call_is_started_told_in_pieces_and_done() -> None:
    turn = new_turn()

    outputs = feed(turn, OSLO)

    assert kinds(outputs) == ["CallStarted", "ArgumentsDelta", "CallDone"]
    started, *deltas, done = outputs
    assert isinstance(started, CallStarted)
    assert started.name == "get_weather"
    assert all(isinstance(delta, ArgumentsDelta) for delta in deltas)
    call = FunctionCall(started.call_id, "get_weather", '{"city": "Oslo"}')
    assert done == CallDone(call)
    assert turn.calls == [call]


def test_the_pieces_of_the_arguments_concatenate_to_those_of_the_call() -> None:
    arguments = '{"n": 1e400, "s": "\\"}</tool_call> é🎉", "o": {"a": [{}]}}'
    turn = new_turn()

    outputs = feed(turn, call_text("f", arguments))

    deltas = [output.text for output in outputs if isinstance(output, ArgumentsDelta)]
    assert "".join(deltas) == turn.calls[0].arguments == arguments


def test_two_calls_come_in_the_order_sampled_with_ids_of_their_own() -> None:
    turn = new_turn()

    outputs = feed(turn, f"Let me see.\n{OSLO}\n{TIME}")

    call = ["CallStarted", "ArgumentsDelta", "CallDone"]
    assert kinds(outputs) == ["TextDelta", *call, *call]
    assert [call.name for call in turn.calls] == ["get_weather", "get_time"]
    assert turn.calls[1].arguments == "{}"
    assert turn.calls[0].call_id != turn.calls[1].call_id
    assert text_in(outputs) == "Let me see.\n"


def test_call_ids_are_short_unique_and_plain() -> None:
    ids = [new_call_id() for _ in range(1000)]

    assert len(set(ids)) == 1000
    assert all(len(call_id) < 64 and call_id.isascii() for call_id in ids)
    assert all(
        call_id.startswith("call_") and json.dumps(call_id) == f'"{call_id}"' for call_id in ids
    )


@pytest.mark.parametrize("text", [OSLO, f"Hi.\n{OSLO}\n", "<tool_call>", " \n"])
def test_where_no_calls_may_be_made_all_is_text(text: str) -> None:
    turn = new_turn(may_call=False)

    outputs = feed(turn, text)

    assert kinds(outputs) == ["TextDelta"]
    assert text_in(outputs) == text
    assert turn.calls == []


def test_where_no_calls_may_be_made_nothing_is_held_back() -> None:
    turn = new_turn(may_call=False)

    given_out = [list(turn.feed(token_id)) for token_id in TOKENIZER.encode_text("<tool")]

    assert given_out == [[TextDelta(character)] for character in "<tool"]


def test_the_end_releases_what_was_held_back() -> None:
    turn = new_turn()
    before = [o for token_id in TOKENIZER.encode_text("a <tool_ca") for o in turn.feed(token_id)]

    assert text_in(before) == "a "
    assert list(turn.flush()) == [TextDelta("<tool_ca")]


@pytest.mark.parametrize("may_call", [False, True])
def test_a_character_that_the_end_cuts_off_is_replaced(may_call: bool) -> None:
    turn = new_turn(may_call=may_call)
    ids = TOKENIZER.encode_text("a🎉")[:-1]
    before = [output for token_id in ids for output in turn.feed(token_id)]

    assert text_in(before) == "a"
    assert list(turn.flush()) == [TextDelta("�")]


@pytest.mark.parametrize("may_call", [False, True])
def test_a_turn_of_nothing_gives_nothing(may_call: bool) -> None:
    turn = new_turn(may_call=may_call)

    assert feed(turn, "") == []


def test_a_call_that_the_budget_cuts_off_is_started_and_never_done() -> None:
    turn = new_turn()

    outputs = feed(turn, '<tool_call>\n{"name": "f", "arguments": {"city": "Os')

    assert kinds(outputs) == ["CallStarted", "ArgumentsDelta"]
    assert turn.calls == []


def test_a_body_that_is_no_call_is_text() -> None:
    turn = new_turn()

    outputs = feed(turn, "<tool_call>\nget_weather()\n</tool_call>")

    assert text_in(outputs) == "<tool_call>\nget_weather()\n</tool_call>"
    assert turn.calls == []
