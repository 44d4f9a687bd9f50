import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from protocol.items import CustomToolCall, FunctionCall
from protocol.output_items import Logprob, TopLogprob
from sampler import conversation
from sampler.detokenizer import Detokenizer
from sampler.outputs import (
    ArgumentsDelta,
    CallDone,
    CallStarted,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
)
from sampler.sampled_turn import SampledTurn, TurnOutput, new_call_id
from sampler.sampling import Sampled, TokenLogprobs
from sampler.tokenizer import Tokenizer
from sampler.turn_reader import joined
from tests.sampler.smollm2 import smollm2_tokenizer
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, byte_tokenizer, call_text

TOKENIZER = Tokenizer(byte_tokenizer(), [END_OF_TEXT, IM_END])

OSLO = call_text("get_weather", '{"city": "Oslo"}')
TIME = call_text("get_time", "{}")


def new_turn(
    tokenizer: Tokenizer = TOKENIZER,
    *,
    may_call: bool = True,
    thinks: bool = False,
    think_is_open: bool = False,
) -> SampledTurn:
    return SampledTurn(
        Detokenizer(tokenizer),
        None,
        may_call=may_call,
        thinks=thinks,
        think_is_open=think_is_open,
    )


def feed(turn: SampledTurn, text: str) -> list[TurnOutput]:
    """Feed ``text`` and the end of the turn, a byte a token."""
    ids = [*TOKENIZER.encode_text(text), IM_END]
    outputs = [output for token_id in ids for output in turn.feed([Sampled(token_id)])]
    return [*outputs, *turn.flush()]


def text_in(outputs: Sequence[TurnOutput]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, TextDelta))


def arguments_of(call: FunctionCall | CustomToolCall) -> str:
    assert isinstance(call, FunctionCall)
    return call.arguments


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
    assert "".join(deltas) == arguments
    assert [arguments_of(call) for call in turn.calls] == [arguments]


def test_two_calls_come_in_the_order_sampled_with_ids_of_their_own() -> None:
    turn = new_turn()

    outputs = feed(turn, f"Let me see.\n{OSLO}\n{TIME}")

    call = ["CallStarted", "ArgumentsDelta", "CallDone"]
    assert kinds(outputs) == ["TextDelta", *call, *call]
    assert [call.name for call in turn.calls] == ["get_weather", "get_time"]
    assert arguments_of(turn.calls[1]) == "{}"
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

    given_out = [
        list(turn.feed([Sampled(token_id)])) for token_id in TOKENIZER.encode_text("<tool")
    ]

    assert given_out == [[TextDelta(character)] for character in "<tool"]


def test_the_end_releases_what_was_held_back() -> None:
    turn = new_turn()
    before = [
        o
        for token_id in TOKENIZER.encode_text("a <tool_ca")
        for o in turn.feed([Sampled(token_id)])
    ]

    assert text_in(before) == "a "
    assert list(turn.flush()) == [TextDelta("<tool_ca")]


@pytest.mark.parametrize("may_call", [False, True])
def test_a_character_that_the_end_cuts_off_is_replaced(may_call: bool) -> None:
    turn = new_turn(may_call=may_call)
    ids = TOKENIZER.encode_text("a🎉")[:-1]
    before = [output for token_id in ids for output in turn.feed([Sampled(token_id)])]

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


def patch_text(patch: str) -> str:
    return conversation.call_text(CustomToolCall("", "apply_patch", patch))


def test_a_call_of_a_free_form_tool_is_started_told_in_pieces_and_done() -> None:
    turn = new_turn()

    outputs = feed(turn, patch_text("+ é\n"))

    started, *deltas, done = outputs
    assert isinstance(started, CallStarted)
    assert (started.name, started.is_custom) == ("apply_patch", True)
    assert all(isinstance(delta, ArgumentsDelta) for delta in deltas)
    call = CustomToolCall(started.call_id, "apply_patch", "+ é\n")
    assert done == CallDone(call)
    assert turn.calls == [call]


def test_a_call_of_nothing_has_no_pieces() -> None:
    outputs = feed(new_turn(), patch_text(""))

    assert kinds(outputs) == ["CallStarted", "CallDone"]


def test_an_input_that_the_budget_cuts_off_is_started_and_never_done() -> None:
    turn = new_turn()

    outputs = feed(turn, patch_text("+1\n+2").removesuffix("ool_call>"))

    assert kinds(outputs) == ["CallStarted", "ArgumentsDelta"]
    assert turn.calls == []
    assert turn.is_in_call


def test_a_call_knows_its_namespace_by_the_name_it_was_called_by() -> None:
    turn = new_turn()
    custom = conversation.call_text(CustomToolCall("", "exec", "x", "functions"))

    outputs = feed(turn, f"{call_text('clock.now', '{}')}\n{custom}")

    started = [output for output in outputs if isinstance(output, CallStarted)]
    assert [call.name for call in started] == ["clock.now", "functions.exec"]
    assert turn.calls == [
        FunctionCall(started[0].call_id, "now", "{}", "clock"),
        CustomToolCall(started[1].call_id, "exec", "x", "functions"),
    ]


# --- Thoughts ------------------------------------------------------------------------------------


def test_thoughts_come_first_and_apart() -> None:
    turn = new_turn(thinks=True)

    outputs = feed(turn, f"<think>\nHm, 🎉.\n</think>\n\nHi.\n{OSLO}")

    assert kinds(outputs)[:3] == ["ReasoningDelta", "ReasoningDone", "TextDelta"]
    thoughts = [output.text for output in outputs if isinstance(output, ReasoningDelta)]
    assert "".join(thoughts) == "Hm, 🎉."
    assert text_in(outputs) == "Hi.\n"
    assert len(turn.calls) == 1


def test_thoughts_of_nothing_are_none() -> None:
    outputs = feed(new_turn(thinks=True), "<think>\n\n</think>\n\nHi.")

    assert kinds(outputs) == ["TextDelta"]


def test_thoughts_that_the_budget_cuts_off_are_never_done() -> None:
    outputs = feed(new_turn(thinks=True, may_call=False), "<think>\nHm")

    assert kinds(outputs) == ["ReasoningDelta"]


def test_the_last_thought_and_its_end_come_with_the_token_that_decides_them() -> None:
    turn = new_turn(thinks=True, think_is_open=True)
    before = [
        o for token_id in TOKENIZER.encode_text("Hm</think") for o in turn.feed([Sampled(token_id)])
    ]
    (last,) = TOKENIZER.encode_text(">")

    assert kinds(before) == ["ReasoningDelta"]
    assert turn.feed([Sampled(last)]) == [ReasoningDone()]


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [
        ("Hi <think>", ""),
        ("<think>a</think>bc", "<think>a</think>"),
        ("\n<think>\n\n</think>\n\nb", "\n<think>\n\n</think>"),
        ("<think>a", "<think>a"),
    ],
)
def test_tokens_of_thoughts_are_counted_with_their_markers(text: str, thoughts: str) -> None:
    turn = new_turn(thinks=True)

    for token_id in TOKENIZER.encode_text(text):
        turn.feed([Sampled(token_id)])

    assert turn.num_reasoning_tokens == len(thoughts)


def test_tokens_of_thoughts_that_the_prompt_began_are_counted() -> None:
    turn = new_turn(thinks=True, think_is_open=True)

    feed(turn, "ab</think>c")

    assert turn.num_reasoning_tokens == len("ab</think>")


# --- Several tokens at once -----------------------------------------------------------------------

TURNS = ["Grüße, 世界! ", f"Let me see. {OSLO}\n{TIME}", f"{OSLO} \n done", "a <tool_c b", " \n"]


def all_joined(outputs: Sequence[TurnOutput]) -> list[TurnOutput]:
    whole: list[TurnOutput] = []
    for output in outputs:
        if whole and (longer := joined(whole[-1], output)) is not None:
            whole[-1] = longer
        else:
            whole.append(output)
    return whole


def nameless(outputs: Sequence[TurnOutput]) -> list[TurnOutput]:
    """Return ``outputs`` without the ids of calls, which are made up."""
    found: list[TurnOutput] = []
    for output in outputs:
        match output:
            case CallStarted():
                found.append(replace(output, call_id=""))
            case CallDone(call):
                found.append(CallDone(structs.replace(call, call_id="")))
            case _:
                found.append(output)
    return found


@given(st.sampled_from(TURNS), st.lists(st.integers(1, 40), min_size=1), st.booleans())
def test_it_makes_no_difference_how_many_tokens_come_at_once(
    text: str, sizes: list[int], has_logprobs: bool
) -> None:
    tokens = [
        Sampled(token_id, TokenLogprobs(token_id, float(-i)) if has_logprobs else None)
        for i, token_id in enumerate(TOKENIZER.encode_text(text))
    ]
    one_by_one, at_once = new_turn(), new_turn()
    expected = [output for token in tokens for output in one_by_one.feed([token])]
    outputs: list[TurnOutput] = []
    rest = tokens
    for size in itertools.cycle(sizes):
        if not rest:
            break
        outputs += at_once.feed(rest[:size])
        rest = rest[size:]

    whole = nameless(all_joined([*outputs, *at_once.end()]))
    assert whole == nameless(all_joined([*expected, *one_by_one.end()]))
    assert nameless([CallDone(call) for call in at_once.calls]) == nameless(
        [CallDone(call) for call in one_by_one.calls]
    )


# --- Log-probabilities ---------------------------------------------------------------------------


def feed_with_logprobs(turn: SampledTurn, ids: Sequence[int]) -> list[TurnOutput]:
    """Feed ``ids``; the i-th has the log-probability -i."""
    outputs = [
        output
        for i, token_id in enumerate(ids)
        for output in turn.feed([Sampled(token_id, TokenLogprobs(token_id, float(-i)))])
    ]
    return [*outputs, *turn.flush()]


def logprobs_in(outputs: Sequence[TurnOutput]) -> list[Logprob]:
    return [one for o in outputs if isinstance(o, TextDelta) for one in o.logprobs]


def test_a_token_of_text_has_its_logprobs_with_it() -> None:
    (a, b) = TOKENIZER.encode_text("ab")
    turn = new_turn()

    logprobs = TokenLogprobs(a, -0.5, ((a, -0.5), (b, -1.5), (IM_END, -2.0)))
    outputs = turn.feed([Sampled(a, logprobs)])

    top = (
        TopLogprob("a", -0.5, (97,)),
        TopLogprob("b", -1.5, (98,)),
        TopLogprob("<|im_end|>", -2.0, ()),
    )
    assert outputs == [TextDelta("a", (Logprob("a", -0.5, (97,), top),))]


def test_text_has_no_logprobs_unless_they_are_fed() -> None:
    assert all(
        not output.logprobs for output in feed(new_turn(), "a") if isinstance(output, TextDelta)
    )


@pytest.fixture(scope="module", params=["bytes", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZER if request.param == "bytes" else smollm2_tokenizer()


@pytest.mark.parametrize("text", ["Hé 🎉 naïve", "a <tool b", "a <tool_call>b </tool", "日本🎉"])
@pytest.mark.parametrize("may_call", [False, True])
def test_the_bytes_of_the_tokens_are_those_of_the_text(
    tokenizer: Tokenizer, text: str, may_call: bool
) -> None:
    turn = new_turn(tokenizer, may_call=may_call)
    ids = tokenizer.encode_text(text)

    outputs = feed_with_logprobs(turn, [*ids, IM_END])

    logprobs = logprobs_in(outputs)
    assert text_in(outputs) == text
    assert b"".join(bytes(one.bytes) for one in logprobs) == text.encode()
    assert [one.logprob for one in logprobs] == [float(-i) for i in range(len(ids))]


def test_of_a_character_in_pieces_all_tokens_come_with_it() -> None:
    outputs = feed_with_logprobs(new_turn(), TOKENIZER.encode_text("a🎉b"))

    deltas = [output for output in outputs if isinstance(output, TextDelta)]
    assert [(delta.text, len(delta.logprobs)) for delta in deltas] == [
        ("a", 1),
        ("🎉", 4),
        ("b", 1),
    ]
    assert [one.token for one in deltas[1].logprobs] == ["�"] * 4


def test_tokens_that_were_held_back_come_with_the_text_that_is_released() -> None:
    outputs = feed_with_logprobs(new_turn(), TOKENIZER.encode_text("a<tool b"))

    deltas = [output for output in outputs if isinstance(output, TextDelta)]
    assert [(d.text, len(d.logprobs)) for d in deltas] == [("a", 1), ("<tool ", 6), ("b", 1)]


def test_only_text_has_logprobs() -> None:
    text = f"<think>\nHm.\n</think>\n\nHi.\n{OSLO}\n{patch_text('+1')}\nBye."

    outputs = feed_with_logprobs(new_turn(thinks=True), TOKENIZER.encode_text(text))

    assert text_in(outputs) == "Hi.\n\nBye."
    assert "".join(one.token for one in logprobs_in(outputs)) == "Hi.\n\nBye."


def test_the_end_of_the_turn_and_other_control_tokens_are_no_text() -> None:
    outputs = feed_with_logprobs(new_turn(), [*TOKENIZER.encode_text("a"), IM_START, IM_END])

    assert [one.token for one in logprobs_in(outputs)] == ["a"]


def test_a_character_that_the_end_cuts_off_has_the_logprobs_of_its_pieces() -> None:
    outputs = feed_with_logprobs(new_turn(), TOKENIZER.encode_text("a🎉")[:-1])

    assert text_in(outputs) == "a�"
    assert len(logprobs_in(outputs)) == 4
