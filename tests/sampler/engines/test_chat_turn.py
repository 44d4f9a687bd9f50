"""Chunks of a streamed chat completion to outputs."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.items import CustomToolCall, FunctionCall
from protocol.output_items import Logprob, TopLogprob
from protocol.response_stream import TRANSITIONS, Step, StreamState
from protocol.tools import CallableTool, CustomTool, FunctionTool
from protocol.transitions import next_state
from sampler.engine_error import EngineError
from sampler.engines.chat.chunk import ChatUsage, says_something
from sampler.engines.chat.tools import ToolNames, sent_name
from sampler.engines.chat.turn import ChatTurn
from sampler.engines.endpoint.errors import EndpointError
from sampler.outputs import (
    ArgumentsDelta,
    CallDone,
    CallStarted,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
)
from sampler.recorded_turn import Call
from sampler.run import StopReason
from sampler.sampled_turn import TurnOutput
from sampler.turn_reader import joined

TOOLS: list[CallableTool] = [
    FunctionTool("get_weather"),
    FunctionTool("crm.find"),
    CustomTool("apply_patch"),
]

OSLO = '{"city": "Oslo"}'


def new_turn(*, taken: Sequence[str] = (), wants_logprobs: bool = False) -> ChatTurn:
    return ChatTurn(ToolNames(TOOLS), taken_call_ids=taken, wants_logprobs=wants_logprobs)


def chunk(finish_reason: str | None = None, /, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}


def piece(
    index: int | None = 0, call_id: str | None = None, name: str | None = None, arguments: Any = ""
) -> dict[str, Any]:
    members = {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}
    return {key: member for key, member in members.items() if member is not None}


def calling(*pieces: dict[str, Any]) -> dict[str, Any]:
    return chunk(tool_calls=list(pieces))


STOP = chunk("stop")
TO_CALL = chunk("tool_calls")
CUT = chunk("length")


def merged(outputs: Iterable[TurnOutput]) -> list[TurnOutput]:
    """Return ``outputs`` with the pieces of one text as one."""
    whole: list[TurnOutput] = []
    for output in outputs:
        if whole and (longer := joined(whole[-1], output)) is not None:
            whole[-1] = longer
        else:
            whole.append(output)
    return whole


def outputs_of(chunks: Iterable[dict[str, Any]], turn: ChatTurn | None = None) -> list[TurnOutput]:
    """Return all that ``chunks`` make, with the pieces of one text as one."""
    turn = turn or new_turn()
    outputs = [output for chunk in chunks for output in turn.feed(chunk)]
    return merged([*outputs, *turn.finish()])


def made(call: Call) -> list[TurnOutput]:
    """Return the outputs that ``call`` is told by."""
    is_custom = isinstance(call, CustomToolCall)
    text = call.input if isinstance(call, CustomToolCall) else call.arguments
    deltas = [ArgumentsDelta(text)] if text else []
    return [CallStarted(call.call_id, call.qualified_name, is_custom), *deltas, CallDone(call)]


def calls_of(chunks: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the names and arguments of the calls that ``chunks`` make."""
    turn = new_turn()
    outputs_of([*chunks, TO_CALL], turn)
    return [(call.name, call.arguments) for call in turn.calls if isinstance(call, FunctionCall)]


# --- Text and thoughts ---------------------------------------------------------------------------


def test_thoughts_and_text_come_as_they_are_streamed() -> None:
    turn = new_turn()

    outputs = [
        turn.feed(chunk(role="assistant", content="")),
        turn.feed(chunk(content=None, reasoning="H")),
        turn.feed(chunk(reasoning="m.")),
        turn.feed(chunk(content="Y")),
        turn.feed(chunk(content="es.")),
        turn.feed(STOP),
        turn.finish(),
    ]

    assert outputs == [
        [],
        [ReasoningDelta("H")],
        [ReasoningDelta("m.")],
        [ReasoningDone(), TextDelta("Y")],
        [TextDelta("es.")],
        [],
        [],
    ]
    assert turn.stop_reason is StopReason.END_OF_TURN
    assert turn.calls == []


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning": "Hm."},
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm.", "reasoning_content": "Hm."},
        {"reasoning": "", "reasoning_content": "Hm."},
        {"reasoning": [{"type": "text", "text": "H"}, "m."]},
        {"reasoning": {"content": "Hm."}},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]},
    ],
)
def test_thoughts_are_found_under_all_their_names(delta: dict[str, Any]) -> None:
    outputs = outputs_of([chunk(**delta), chunk(content=[{"type": "text", "text": "Yes."}]), STOP])

    assert outputs == [ReasoningDelta("Hm."), ReasoningDone(), TextDelta("Yes.")]


def test_a_turn_may_end_after_its_thoughts_which_are_complete_unless_it_was_cut() -> None:
    assert outputs_of([chunk(reasoning="Hm."), STOP]) == [ReasoningDelta("Hm."), ReasoningDone()]
    assert outputs_of([chunk(reasoning="Hm."), CUT]) == [ReasoningDelta("Hm.")]


def test_thoughts_that_come_after_text_or_a_call_are_dropped() -> None:
    late = chunk(reasoning="Late.")
    call = FunctionCall("a", "get_weather", OSLO)

    outputs = outputs_of(
        [chunk(content="Yes."), late, calling(piece(0, "a", "get_weather", OSLO)), late, TO_CALL]
    )

    assert outputs == [TextDelta("Yes."), *made(call)]


def test_white_space_does_not_end_the_thoughts() -> None:
    outputs = outputs_of(
        [chunk(content="\n"), chunk(reasoning="Hm."), chunk(content="\n\n"), chunk(content="Yes.")]
    )

    assert outputs == [ReasoningDelta("Hm."), ReasoningDone(), TextDelta("\n\n\nYes.")]


def test_white_space_is_dropped_where_nothing_else_is_said() -> None:
    call = FunctionCall("a", "get_weather", OSLO)
    space = chunk(content="\n\n")

    assert outputs_of([space, STOP]) == []
    assert outputs_of([space, calling(piece(0, "a", "get_weather", OSLO)), space, TO_CALL]) == made(
        call
    )


def test_a_refusal_is_text() -> None:
    assert outputs_of([chunk(refusal="I "), chunk(refusal="won't."), STOP]) == [
        TextDelta("I won't.")
    ]


def test_half_a_surrogate_pair_is_a_replacement_character() -> None:
    [output] = outputs_of([chunk(content="a\ud800"), STOP])

    assert isinstance(output, TextDelta)
    assert output.text.strip("\ufffd") == "a"


# --- Log-probabilities ---------------------------------------------------------------------------

HI = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
HO = {"token": "Ho", "logprob": None}
LOGPROBS = {"content": [HI | {"top_logprobs": [HI, HO]}]}
HI_READ = TopLogprob("Hi", -0.5, (72, 105))
HO_READ = TopLogprob("Ho", -9999.0, (72, 111))
READ = Logprob("Hi", -0.5, (72, 105), (HI_READ, HO_READ))


def with_logprobs(logprobs: Any, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "logprobs": logprobs}]}


def test_text_comes_with_the_log_probabilities_of_its_tokens() -> None:
    turn = new_turn(wants_logprobs=True)
    chunks = [
        with_logprobs(LOGPROBS, reasoning="Hm."),
        with_logprobs(LOGPROBS, content=" "),
        with_logprobs(LOGPROBS, content=""),
        with_logprobs(LOGPROBS, content="Hi"),
        with_logprobs(None, content="!"),
        with_logprobs({"content": None}, content="?"),
    ]

    outputs = outputs_of([*chunks, STOP], turn)

    assert outputs[2:] == [TextDelta(" Hi!?", (READ, READ, READ))]


def test_log_probabilities_are_left_out_where_nobody_asked() -> None:
    for logprobs in (LOGPROBS, "odd"):
        assert outputs_of([with_logprobs(logprobs, content="Hi")]) == [TextDelta("Hi")]


# --- Calls ---------------------------------------------------------------------------------------


def test_the_first_call_is_told_as_it_is_streamed() -> None:
    turn = new_turn()

    outputs = [
        turn.feed(calling(piece(0, "a", "get_weather"))),
        turn.feed(calling(piece(0, arguments='{"city":'))),
        turn.feed(calling(piece(0, arguments=' "Oslo"}'))),
        turn.feed(TO_CALL),
        turn.finish(),
    ]

    call = FunctionCall("a", "get_weather", OSLO)
    assert outputs == [
        [CallStarted("a", "get_weather")],
        [ArgumentsDelta('{"city":')],
        [ArgumentsDelta(' "Oslo"}')],
        [],
        [CallDone(call)],
    ]
    assert turn.calls == [call]


def test_a_later_call_waits_until_the_one_before_is_whole() -> None:
    turn = new_turn()

    first = turn.feed(calling(piece(0, "a", "get_weather", '{"a": '), piece(1, "b", "f", '{"b"')))
    held = turn.feed(calling(piece(1, arguments=": ")))
    second = turn.feed(calling(piece(0, arguments="1}")))
    live = turn.feed(calling(piece(1, arguments="2}")))

    assert first == [CallStarted("a", "get_weather"), ArgumentsDelta('{"a": ')]
    assert held == []
    assert second == [
        ArgumentsDelta("1}"),
        CallDone(FunctionCall("a", "get_weather", '{"a": 1}')),
        CallStarted("b", "f"),
        ArgumentsDelta('{"b": '),
    ]
    assert live == [ArgumentsDelta("2}")]


def test_a_call_without_arguments_holds_back_what_follows_to_the_end() -> None:
    turn = new_turn()

    turn.feed(calling(piece(0, "a", "get_weather"), piece(1, "b", "f", "{}")))
    turn.feed(TO_CALL)

    assert turn.finish() == [
        CallDone(FunctionCall("a", "get_weather", "")),
        *made(FunctionCall("b", "f", "{}")),
    ]


def test_text_after_a_call_comes_last() -> None:
    call = FunctionCall("a", "get_weather", OSLO)

    outputs = outputs_of(
        [
            chunk(content="Let me see. "),
            calling(piece(0, "a", "get_weather", '{"city":')),
            chunk(content="There."),
            calling(piece(0, arguments=' "Oslo"}')),
            TO_CALL,
        ]
    )

    assert outputs == [TextDelta("Let me see. "), *made(call), TextDelta("There.")]


A, B = ("f", '{"a": 1}'), ("f", '{"a": 2}')
C = ("g", "{}")


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param(
            [calling(piece(0, "x", *A), piece(1, "y", *B), piece(2, "z", *C))], id="whole"
        ),
        pytest.param(
            [calling(piece(0, "x", *A)), calling(piece(0, "y", *B)), calling(piece(0, "z", *C))],
            id="all at 0",
        ),
        pytest.param(
            [calling(piece(0, None, *A)), calling(piece(0, None, *B)), calling(piece(0, None, *C))],
            id="all at 0, without ids",
        ),
        pytest.param(
            [calling(piece(None, "x", *A), piece(None, "y", *B)), calling(piece(None, "z", *C))],
            id="no index",
        ),
        pytest.param(
            [calling(piece(None, None, *A), piece(None, "", *B)), calling(piece(None, "", *C))],
            id="no index, no ids",
        ),
        pytest.param(
            [
                calling(piece(None, "x", "f")),
                calling(piece(None, None, None, '{"a":')),
                calling(piece(None, "", "", " 1}")),
                calling(piece(None, "y", "f")),
                calling(piece(None, "y", None, '{"a":')),
                calling(piece(None, "y", None, " 2}")),
                calling(piece(None, "z")),
                calling(piece(None, None, "g", "{}")),
            ],
            id="no index, in pieces",
        ),
        pytest.param(
            [
                calling(piece(0, "x", "f")),
                calling(piece(0, "x", "f", '{"a":')),
                calling(piece(0, "x", "f", " 1}")),
                calling(piece(0, "x", "f", "")),
                calling(piece(1, "y", "f", '{"a":'), piece(2, "z", "g", "{")),
                calling(piece(1, "y", "f", " 2}"), piece(2, "z", "g", "}")),
            ],
            id="names and ids repeated",
        ),
        pytest.param(
            [
                calling(piece(0, "x1", "f", '{"a":')),
                calling(piece(0, "x2", "f", " 1}")),
                calling(piece(0, "x3", "f", "")),
                calling(piece(1, "y1", "f", '{"a":')),
                calling(piece(1, "y2", None, " 2}")),
                calling(piece(2, "z1", "g", "{}")),
            ],
            id="a new id each time",
        ),
        pytest.param(
            [
                calling(piece(0, "x", "f", "")),
                calling(piece(1, arguments='{"a":')),
                calling(piece(2, arguments=" 1}")),
                calling(piece(3, "y", "f", "")),
                calling(piece(4, arguments='{"a": 2}')),
                calling(piece(5, "z", "g", "{}")),
            ],
            id="an index for each piece",
        ),
        pytest.param(
            [
                calling(piece(7, "x", None, '{"a":'), piece(3, "y", "f")),
                calling(piece(7, None, "f", " 1}"), piece(3, arguments='{"a": 2}')),
                calling(piece(5, "z"), piece(5, None, "g"), piece(5, arguments="{}")),
            ],
            id="names late, any index",
        ),
        pytest.param(
            [
                calling(piece(0, "x", "f", {"a": 1}) | {"type": "function", "extra": [1]}),
                calling(piece(1, "y", "f", {"a": 2})),
                calling(piece(2, "z", "g", {})),
            ],
            id="arguments as an object",
        ),
    ],
)
def test_calls_are_told_apart_however_they_are_streamed(chunks: list[dict[str, Any]]) -> None:
    calls = calls_of(chunks)

    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("f", {"a": 1}),
        ("f", {"a": 2}),
        ("g", {}),
    ]


def test_the_function_call_of_old_is_one_call() -> None:
    chunks = [
        chunk(function_call={"name": "f", "arguments": ""}),
        chunk(function_call={"arguments": '{"a":'}),
        chunk(function_call={"arguments": " 1}"}),
        chunk("function_call"),
    ]

    assert calls_of(chunks) == [("f", '{"a": 1}')]


def test_white_space_before_a_call_does_not_come_after_it() -> None:
    call = FunctionCall("a", "get_weather", OSLO)
    told = calling(piece(0, "a", "get_weather", OSLO))

    outputs = outputs_of([chunk(content="\n"), told, chunk(content="There."), TO_CALL])

    assert outputs == [*made(call), TextDelta("There.")]


def test_pieces_that_say_nothing_hold_nothing_back() -> None:
    turn = new_turn()

    turn.feed(calling({"index": 0}))

    assert turn.feed(chunk(reasoning="Hm.")) == [ReasoningDelta("Hm.")]
    assert turn.feed(chunk(content="Yes.")) == [ReasoningDone(), TextDelta("Yes.")]


def test_pieces_that_say_nothing_begin_no_call() -> None:
    chunks = [chunk(content="Yes.", tool_calls=[]), calling({"index": 0}), calling({}), STOP]

    assert outputs_of(chunks) == [TextDelta("Yes.")]


def test_a_call_that_was_never_named_is_nothing_unless_it_has_arguments() -> None:
    assert outputs_of([calling(piece(0, "a")), TO_CALL]) == []
    with pytest.raises(EngineError, match="never named"):
        outputs_of([calling(piece(0, "a", None, "{}")), TO_CALL])


@pytest.mark.parametrize("arguments", ["", '{"a": ', "[1]", "oops", '{"a": 1} and so on'])
def test_arguments_are_told_as_they_were_sampled(arguments: str) -> None:
    chunks = [calling(piece(0, "a", "f", arguments)), calling(piece(1, "b", "g", "{}")), TO_CALL]

    assert outputs_of(chunks) == [
        *made(FunctionCall("a", "f", arguments)),
        *made(FunctionCall("b", "g", "{}")),
    ]


REASONS = {
    "stop": StopReason.END_OF_TURN,
    "tool_calls": StopReason.END_OF_TURN,
    "function_call": StopReason.END_OF_TURN,
    "eos": StopReason.END_OF_TURN,
    "eos_token": StopReason.END_OF_TURN,
    "stop_sequence": StopReason.END_OF_TURN,
    "length": StopReason.MAX_OUTPUT_TOKENS,
    "model_length": StopReason.CONTEXT_LENGTH,
    "content_filter": StopReason.CONTENT_FILTER,
}


@pytest.mark.parametrize(("finish_reason", "stop_reason"), REASONS.items(), ids=REASONS)
def test_only_where_the_model_ends_its_turn_are_half_arguments_a_call(
    finish_reason: str, stop_reason: StopReason
) -> None:
    turn = new_turn()
    half = '{"city": "Os'

    outputs_of([calling(piece(0, "a", "f", half)), chunk(finish_reason)], turn)

    is_the_models = stop_reason is StopReason.END_OF_TURN
    assert turn.stop_reason is stop_reason
    assert turn.calls == ([FunctionCall("a", "f", half)] if is_the_models else [])


@pytest.mark.parametrize(
    "finish_reason",
    ["error", "abort", "insufficient_system_resource", "repetition", "what comes next"],
)
def test_any_other_reason_to_finish_is_a_failure_of_the_endpoint(finish_reason: str) -> None:
    turn = new_turn()
    turn.feed(calling(piece(0, "a", "f", '{"city": "Os')))

    with pytest.raises(EndpointError, match=f"ended with '{finish_reason}'") as failure:
        turn.feed(chunk(finish_reason, tool_calls=[piece(0, arguments='lo"}')]))

    assert failure.value.is_transient
    assert turn.stop_reason is None
    assert turn.finish() == [], "the call stays open"


@pytest.mark.parametrize("cut", [CUT, chunk("content_filter"), chunk()])
def test_a_call_that_was_cut_short_was_never_made(cut: dict[str, Any]) -> None:
    turn = new_turn()
    whole = FunctionCall("a", "get_weather", OSLO)
    chunks = [
        calling(piece(0, "a", "get_weather", OSLO)),
        calling(piece(1, "b", "f", '{"a": ')),
        calling(piece(2, "c", "g", "{}")),
        chunk(content="And"),
        cut,
    ]

    outputs = outputs_of(chunks, turn)

    assert outputs == [*made(whole), CallStarted("b", "f"), ArgumentsDelta('{"a": ')]
    assert turn.calls == [whole]


def test_a_turn_that_is_cut_after_whole_calls_has_made_them() -> None:
    whole = piece(0, "a", "get_weather", OSLO)
    call = FunctionCall("a", "get_weather", OSLO)

    assert outputs_of([calling(whole), CUT]) == made(call)
    assert outputs_of([calling(whole, piece(1, "b")), CUT]) == made(call)


@pytest.mark.parametrize("call_id", ["", "taken", "a" * 65, None])
def test_a_call_gets_an_id_of_ours_where_the_endpoints_is_of_no_use(call_id: str | None) -> None:
    turn = new_turn(taken=["taken"])

    outputs_of([calling(piece(0, call_id, "f", "{}")), TO_CALL], turn)

    [call] = turn.calls
    assert call.call_id not in ("taken", "", call_id)
    assert len(call.call_id) <= 64


def test_two_calls_never_share_an_id() -> None:
    turn = new_turn()

    outputs_of([calling(piece(0, "a", "f", "{}"), piece(1, "a", "g", "{}")), TO_CALL], turn)

    first, second = turn.calls
    assert first.call_id == "a"
    assert second.call_id != "a"


def test_a_tool_in_a_namespace_is_found_by_the_name_it_was_sent_by() -> None:
    call = FunctionCall("a", "find", "{}", "crm")

    outputs = outputs_of([calling(piece(0, "a", sent_name("crm.find"), "{}")), TO_CALL])

    assert outputs == made(call)


def test_a_tool_that_was_not_declared_is_called_like_any_other() -> None:
    assert calls_of([calling(piece(0, "a", "rm", "{}"))]) == [("rm", "{}")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b\\" \\u00e9"}', 'a\n"b" é'),
        ('{"input": ""}', ""),
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"input": 1}', '{"input": 1}'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("", ""),
    ],
)
def test_free_text_is_taken_out_of_its_arguments(arguments: str, text: str) -> None:
    turn = new_turn()
    cut = len(arguments) // 2

    started = turn.feed(calling(piece(0, "a", "apply_patch", arguments[:cut])))
    held = turn.feed(calling(piece(0, arguments=arguments[cut:])))
    turn.feed(TO_CALL)

    assert started == [CallStarted("a", "apply_patch", is_custom=True)]
    assert held == []
    assert [*started, *turn.finish()] == made(CustomToolCall("a", "apply_patch", text))


# --- Whatever a turn says, however it is cut -----------------------------------------------------


@dataclass(frozen=True)
class Scripted:
    """What a turn says."""

    thought: str
    text: str
    calls: tuple[tuple[str, str], ...]
    """Names and arguments."""

    @property
    def outputs(self) -> list[TurnOutput]:
        outputs: list[TurnOutput] = []
        if self.thought:
            outputs += [ReasoningDelta(self.thought), ReasoningDone()]
        if self.text.strip():
            outputs.append(TextDelta(self.text))
        for i, (name, arguments) in enumerate(self.calls):
            outputs += made(FunctionCall(f"id_{i}", name, arguments))
        return outputs


_TEXTS = st.text('ab {}\n"\\é🎉', max_size=12)
_NAMES = st.sampled_from(["f", "g", "get_weather"])
_OBJECTS = st.dictionaries(_TEXTS, _TEXTS | st.integers(), max_size=3).map(json.dumps)


def scripts(arguments: st.SearchStrategy[str]) -> st.SearchStrategy[Scripted]:
    calls = st.lists(st.tuples(_NAMES, arguments), max_size=4).map(tuple)
    return st.builds(Scripted, _TEXTS, _TEXTS, calls)


@st.composite
def _cut(draw: st.DrawFn, text: str) -> list[str]:
    """Cut ``text`` into pieces, of which some may be empty."""
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    return [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]


@st.composite
def _streamed_call(
    draw: st.DrawFn, index: int, name: str, arguments: str, has_index: bool
) -> list[dict[str, Any]]:
    """Cut a call into pieces, its id and name in the first one."""
    first, *rest = draw(_cut(arguments))
    at = index if has_index else None
    repeated = draw(st.booleans())
    call_id, name_again = (f"id_{index}", name) if repeated else (None, None)
    return [
        piece(at, f"id_{index}", name, first),
        *(piece(at, call_id, name_again, text) for text in rest),
    ]


@st.composite
def _streamed(draw: st.DrawFn, deltas: Sequence[dict[str, Any]], end: str) -> list[dict[str, Any]]:
    """Put ``deltas`` into chunks, several in one where they have different members."""
    chunks: list[dict[str, Any]] = []
    for delta in deltas:
        pieces = delta.get("tool_calls", [])
        joins: bool = draw(st.booleans())
        if chunks and joins:
            last = chunks[-1]
            if pieces:
                last.setdefault("tool_calls", []).extend(pieces)
                continue
            if not last.keys() & {"tool_calls", "content", *delta}:
                last |= delta
                continue
        chunks.append({**delta, "tool_calls": list(pieces)} if pieces else dict(delta))
    silent: list[dict[str, Any]] = [{"choices": []}, chunk(role="assistant", content="")]
    streamed = [chunk(**delta) for delta in chunks]
    for at in draw(st.lists(st.integers(0, len(streamed)), max_size=2)):
        streamed.insert(at, draw(st.sampled_from(silent)))
    return [*streamed, chunk(end), {"choices": [], "usage": {"prompt_tokens": 3}}]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(scripts(_OBJECTS | _TEXTS), st.booleans(), st.data())
def test_a_turn_is_the_same_however_it_is_cut_into_chunks(
    script: Scripted, has_index: bool, data: st.DataObject
) -> None:
    deltas: list[dict[str, Any]] = [{"reasoning": text} for text in data.draw(_cut(script.thought))]
    deltas += [{"content": text} for text in data.draw(_cut(script.text))]
    for i, (name, arguments) in enumerate(script.calls):
        pieces = data.draw(_streamed_call(i, name, arguments, has_index))
        deltas += [{"tool_calls": [piece]} for piece in pieces]

    outputs = outputs_of(data.draw(_streamed(deltas, "tool_calls")))

    assert outputs == script.outputs


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(scripts(_OBJECTS), st.data())
def test_calls_are_the_same_however_their_pieces_are_interleaved(
    script: Scripted, data: st.DataObject
) -> None:
    left = [
        data.draw(_streamed_call(i, name, arguments, has_index=True))
        for i, (name, arguments) in enumerate(script.calls)
    ]
    # They begin in their order, and go on in any.
    pieces = [streamed.pop(0) for streamed in left]
    while left := [streamed for streamed in left if streamed]:
        pieces.append(data.draw(st.sampled_from(left)).pop(0))

    outputs = outputs_of(data.draw(_streamed([{"tool_calls": [p]} for p in pieces], "stop")))

    assert outputs == Scripted("", "", script.calls).outputs


# --- The books -----------------------------------------------------------------------------------


COUNTED = {"prompt_tokens": 5, "completion_tokens": 0}


def test_what_a_request_took_is_told_after_the_end() -> None:
    turn = new_turn()
    usage = {
        "prompt_tokens": 300,
        "completion_tokens": 20,
        "total_tokens": 320,
        "prompt_tokens_details": {"cached_tokens": 256},
        "completion_tokens_details": {"reasoning_tokens": 8, "accepted_prediction_tokens": 0},
    }
    times = {"queue_time": 0.25, "created": 1, "note": "x", "odd": None}

    turn.feed(chunk(content="Hi.") | {"usage": None})
    turn.feed(STOP)
    turn.feed({"usage": usage, "time_info": times})

    assert turn.usage == ChatUsage(300, 20, 256, 8)
    assert turn.time_info == {"queue_time": 0.25, "created": 1}


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        (COUNTED | {"prompt_cache_hit_tokens": 4}, ChatUsage(5, 0, 4)),
        (COUNTED | {"prompt_tokens_details": None}, ChatUsage(5, 0)),
        (COUNTED | {"completion_tokens_details": 3}, ChatUsage(5, 0)),
        (COUNTED | {"completion_tokens": "7"}, ChatUsage(5, 0)),
        (COUNTED | {"prompt_tokens": None}, None),
        (COUNTED | {"prompt_tokens": 0}, None),
        ({"prompt_tokens": 5}, ChatUsage(5, 0)),
        ({}, None),
        ("odd", None),
    ],
)
def test_what_cannot_be_read_of_the_books_is_nothing(usage: Any, read: ChatUsage | None) -> None:
    turn = new_turn()

    turn.feed({"choices": [], "usage": usage})

    assert turn.usage == read


def test_how_long_it_is_is_known_of_what_was_said() -> None:
    turn = new_turn()

    turn.feed(chunk(reasoning="Hé."))
    turn.feed(chunk(content="Yes."))
    turn.feed(calling(piece(0, "a", "f", '{"a":'), piece(1, "b", "g", "{}")))

    assert turn.num_thought_bytes == 4
    assert turn.num_bytes == 4 + 4 + len('f{"a":g{}')


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (chunk(role="assistant", content=""), False),
        (chunk(content="\n"), False),
        (calling({"index": 0}), False),
        ({"choices": []}, False),
        ({"choices": [], "usage": COUNTED}, False),
        (chunk(reasoning="Hm."), True),
        (chunk(content="Yes."), True),
        (calling(piece(0, "a", "f")), True),
        (STOP, True),
        (CUT, True),
    ],
)
def test_a_chunk_says_something_where_it_has_something_for_the_client(
    told: dict[str, Any], says: bool
) -> None:
    assert says_something(told) is says


def test_a_turn_is_finished_once() -> None:
    turn = new_turn()
    turn.feed(calling(piece(0, "a", "f", "{}")))
    turn.feed(TO_CALL)

    turn.finish()

    assert turn.finish() == []


# --- What is no chunk ----------------------------------------------------------------------------


def test_only_the_first_choice_counts() -> None:
    other = {"index": 1, "delta": {"content": "No."}, "finish_reason": "length"}
    first = {"index": 0, "delta": {"content": "Yes."}}
    turn = new_turn()

    assert turn.feed({"choices": [other]}) == []
    assert turn.feed({"choices": [other, first]}) == [TextDelta("Yes.")]
    assert turn.stop_reason is None


@pytest.mark.parametrize(
    "odd",
    [
        {"foo": 1},
        {},
        {"choices": None},
        {"choices": {"0": {}}},
        {"choices": [1]},
        {"choices": [{"delta": "Hi."}]},
        {"choices": [{"delta": {"content": 5}}]},
        {"choices": [{"delta": {"tool_calls": {"index": 0}}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": "0"}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": 5}}]}}]},
        [],
        None,
    ],
)
def test_what_is_no_chunk_is_an_error_that_changes_nothing(odd: Any) -> None:
    turn = new_turn()
    turn.feed(chunk(content="Yes"))

    with pytest.raises(EngineError, match="expected a chunk of a chat completion"):
        turn.feed(odd)

    assert turn.feed(chunk(content=".")) == [TextDelta(".")]


def test_a_chunk_that_is_nested_too_deeply_is_an_error() -> None:
    part: Any = "Hi."
    for _ in range(10_000):
        part = [part]

    with pytest.raises(EngineError, match="nested too deeply"):
        new_turn().feed(chunk(content=part))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
_SOME_TEXT = st.sampled_from(["", "a", "\n", '{"a": 1}', '{"input": "a"}', "}", "\ud800", None])
_FUNCTIONS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["", "f", "apply_patch", None]),
        "arguments": _SOME_TEXT | st.just({"a": 1}) | _JSON,
    },
)
_PIECES = st.fixed_dictionaries(
    {},
    optional={
        "index": st.none() | st.integers(-1, 3),
        "id": st.sampled_from(["", "a", "b", None]),
        "function": _FUNCTIONS | st.none(),
        "type": _JSON,
    },
)
_DELTAS = st.fixed_dictionaries(
    {},
    optional={
        "role": _JSON,
        "content": _SOME_TEXT | _JSON,
        "reasoning": _SOME_TEXT | _JSON,
        "reasoning_content": _SOME_TEXT,
        "refusal": _SOME_TEXT,
        "tool_calls": st.lists(_PIECES, max_size=3) | st.none(),
        "function_call": _FUNCTIONS | st.none(),
    },
)
_CHOICES = st.fixed_dictionaries(
    {"delta": _DELTAS},
    optional={
        "index": st.sampled_from([0, 1, None]),
        "finish_reason": st.sampled_from(["stop", "length", "tool_calls", "", None]),
        "logprobs": st.just(LOGPROBS) | _JSON,
    },
)
_CHUNKS = st.fixed_dictionaries(
    {"choices": st.lists(_CHOICES, min_size=1, max_size=2)},
    optional={"usage": _JSON, "time_info": _JSON, "x": _JSON},
)

_STEPS: dict[type[TurnOutput], Step] = {
    ReasoningDelta: Step.REASONING,
    ReasoningDone: Step.REASONING_DONE,
    TextDelta: Step.TEXT,
    CallStarted: Step.CALL,
    ArgumentsDelta: Step.ARGUMENTS,
    CallDone: Step.CALL_DONE,
}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(_CHUNKS | _CHUNKS | _JSON, max_size=8), st.booleans())
def test_whatever_an_endpoint_sends_makes_a_sentence_or_an_error(
    chunks: list[Any], wants_logprobs: bool
) -> None:
    turn = new_turn(wants_logprobs=wants_logprobs)
    outputs: list[TurnOutput] = []

    for junk in chunks:
        with suppress(EngineError):
            outputs += turn.feed(junk)
    with suppress(EngineError):
        outputs += turn.finish()

    state = StreamState.BETWEEN_ITEMS
    for output in outputs:
        state = next_state(TRANSITIONS, state, _STEPS[type(output)])
    assert [output.call for output in outputs if isinstance(output, CallDone)] == turn.calls
    ids = [output.call_id for output in outputs if isinstance(output, CallStarted)]
    assert len(set(ids)) == len(ids)
    kinds = [type(output) for output in outputs]
    if ReasoningDelta in kinds:
        last = len(kinds) - 1 - kinds[::-1].index(ReasoningDelta)
        assert set(kinds[: last + 1]) == {ReasoningDelta}, "thoughts come before all else"
