from collections.abc import Callable
from itertools import count, product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.conformance.stream_grammar import check_stream
from protocol.errors import orphan_output, response_already_completed
from protocol.output_items import OutputCompaction, OutputFunctionCall, OutputMessage
from protocol.response import ResponseResource, Usage
from protocol.response_stream import TRANSITIONS, ResponseStream, Step, StreamState
from protocol.sealed import seal
from protocol.server_events import (
    FunctionCallOutputStub,
    OutputItemDone,
    ResponseCompleted,
    ResponseDone,
    ResponseFailed,
    ResponseIncomplete,
    ServerEvent,
    event_type,
    inject_failed,
    steer_failed,
)
from protocol.transitions import InvalidTransitionError
from tests.protocol.streams import (
    LOGPROB,
    USAGE,
    everything,
    frames,
    new_stream,
    two_segments,
)

Act = Callable[[ResponseStream], object]
ERROR = response_already_completed("resp_1")

WAY_TO: dict[StreamState, list[Act]] = {
    StreamState.NEW: [],
    StreamState.QUEUED: [lambda s: s.queue()],
    StreamState.BETWEEN_ITEMS: [lambda s: s.start()],
    StreamState.IN_MESSAGE: [lambda s: s.start(), lambda s: s.text_delta("a")],
    StreamState.IN_REASONING: [lambda s: s.start(), lambda s: s.reasoning_delta("a")],
    StreamState.IN_CALL: [lambda s: s.start(), lambda s: s.call_started("c", "f")],
    StreamState.SUSPENDED: [lambda s: s.start(), lambda s: s.suspend(USAGE)],
    StreamState.FINISHED: [lambda s: s.start(), lambda s: s.fail("server_error", "oops")],
}
ACTS: list[tuple[Step, Act]] = [
    (Step.QUEUE, lambda s: s.queue()),
    (Step.START, lambda s: s.start()),
    (Step.TEXT, lambda s: s.text_delta("b")),
    (Step.TEXT, lambda s: s.refusal_delta("b")),
    (Step.TEXT, lambda s: s.empty_message()),
    (Step.REASONING, lambda s: s.reasoning_delta("b")),
    (Step.REASONING_DONE, lambda s: s.reasoning_done()),
    (Step.CALL, lambda s: s.call_started("d", "g")),
    (Step.CALL, lambda s: s.call_started("d", "g", "n", is_custom=True)),
    (Step.ARGUMENTS, lambda s: s.arguments_delta("{}")),
    (Step.CALL_DONE, lambda s: s.call_done()),
    (Step.COMPACTION, lambda s: s.compaction("sealed")),
    (Step.SUSPEND, lambda s: s.suspend(USAGE)),
    (Step.SUSPEND, lambda s: s.pause()),
    (Step.ACKNOWLEDGE, lambda s: s.steer_accepted("steer_1")),
    (Step.ACKNOWLEDGE, lambda s: s.steer_pending("steer_1", ())),
    (Step.ACKNOWLEDGE, lambda s: s.steer_failed(ERROR, "x", "steer_1")),
    (Step.ACKNOWLEDGE, lambda s: s.inject_created()),
    (Step.ACKNOWLEDGE, lambda s: s.inject_failed(ERROR, [])),
    (Step.FINISH, lambda s: s.complete(USAGE, None, 2)),
    (Step.FINISH, lambda s: s.incomplete("max_output_tokens", USAGE)),
    (Step.FINISH, lambda s: s.cancel(USAGE)),
    (Step.FINISH, lambda s: s.fail("server_error", "oops")),
]


def stream_in(state: StreamState) -> ResponseStream:
    stream = new_stream()
    for act in WAY_TO[state]:
        act(stream)
    return stream


def types(events: list[ServerEvent]) -> list[str]:
    return [event_type(event).removeprefix("response.") for event in events]


def whole_response(event: ServerEvent) -> ResponseResource:
    match event:
        case ResponseDone() | ResponseCompleted() | ResponseIncomplete() | ResponseFailed():
            return event.response
        case _:
            raise AssertionError(f"{event} carries no finished response")


# --- The table -----------------------------------------------------------------------------------


def test_every_state_has_a_row_and_every_step_a_method() -> None:
    assert TRANSITIONS.keys() == set(StreamState)
    assert {step for step, _ in ACTS} == set(Step)


@pytest.mark.parametrize(("state", "step_and_act"), [*product(StreamState, ACTS)])
def test_a_stream_takes_the_steps_of_the_table_and_an_illegal_one_changes_nothing(
    state: StreamState, step_and_act: tuple[Step, Act]
) -> None:
    step, act = step_and_act
    stream, untouched = stream_in(state), stream_in(state)

    if step in TRANSITIONS[state]:
        act(stream)
        assert stream.state is TRANSITIONS[state][step]
        return
    with pytest.raises(InvalidTransitionError):
        act(stream)

    assert stream.state is state
    assert stream.response == untouched.response
    if state is not StreamState.FINISHED:
        rest: Act = two_segments if state is StreamState.NEW else lambda s: s.fail("x", "y")
        assert rest(stream) == rest(untouched)


# --- The events ----------------------------------------------------------------------------------


def test_a_response_starts_with_created_and_in_progress() -> None:
    events = new_stream().start()

    assert types(events) == ["created", "in_progress"]
    assert [event["response"]["usage"] for event in frames(events)] == [None, None]


def test_a_queued_response_says_so_until_it_starts() -> None:
    stream = new_stream()

    queued = stream.queue()
    assert stream.response.status == "queued"
    started = stream.start()

    assert types([*queued, *started]) == ["created", "queued", "in_progress"]
    statuses = [event["response"]["status"] for event in frames([*queued, *started])]
    assert statuses == ["queued", "queued", "in_progress"]


def test_a_queued_response_may_end_before_its_turn() -> None:
    stream = stream_in(StreamState.QUEUED)

    assert types(stream.cancel()) == ["incomplete"]


def test_the_first_text_opens_a_message_and_its_part() -> None:
    stream = stream_in(StreamState.BETWEEN_ITEMS)

    assert types(stream.text_delta("a")) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
    ]
    assert types(stream.text_delta("b")) == ["output_text.delta"]


@pytest.mark.parametrize("end", [lambda s: s.complete(USAGE, None, 2), lambda s: s.cancel(USAGE)])
def test_a_message_may_be_empty(end: Callable[[ResponseStream], list[ServerEvent]]) -> None:
    stream = new_stream()
    events = stream.start()
    had_items = stream.has_items

    events += [*stream.empty_message(), *stream.empty_message()]
    has_items = stream.has_items
    events += end(stream)

    check_stream(frames(events))
    assert types(events)[2:-1] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    (item,) = frames(events)[-1]["response"]["output"]
    assert item["content"] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ]
    assert (had_items, has_items, stream.has_items) == (False, True, True)


def test_a_refusal_is_another_part_of_the_message() -> None:
    stream = stream_in(StreamState.IN_MESSAGE)

    assert types(stream.refusal_delta("b")) == [
        "output_text.done",
        "content_part.done",
        "content_part.added",
        "refusal.delta",
    ]
    assert types(stream.refusal_delta("c")) == ["refusal.delta"]
    part = frames(stream.text_delta("d"))[2]
    assert (part["type"], part["content_index"]) == ("response.content_part.added", 2)


def test_a_text_delta_brings_its_logprobs_and_the_part_has_them_all() -> None:
    stream = stream_in(StreamState.BETWEEN_ITEMS)
    stream.text_delta("a", (LOGPROB,))

    (delta,) = frames(stream.text_delta("b", (LOGPROB, LOGPROB)))
    done, part, _ = frames(stream.pause())

    assert len(delta["logprobs"]) == 2
    assert len(done["logprobs"]) == len(part["part"]["logprobs"]) == 3
    assert delta["logprobs"][0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "é", "logprob": -2.0, "bytes": [195]},
        ],
    }


@pytest.mark.parametrize(
    "next_item",
    [
        lambda s: s.reasoning_delta("b"),
        lambda s: s.call_started("c", "f"),
        lambda s: s.call_started("c", "f", is_custom=True),
        lambda s: s.compaction("sealed"),
    ],
)
def test_another_item_closes_the_message_before_it(
    next_item: Callable[[ResponseStream], list[ServerEvent]],
) -> None:
    stream = stream_in(StreamState.IN_MESSAGE)

    assert types(next_item(stream))[:4] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ]


def test_a_call_ends_with_its_whole_arguments() -> None:
    stream = stream_in(StreamState.IN_CALL)
    stream.arguments_delta('{"a"')
    stream.arguments_delta(": 1}")

    arguments, item = frames(stream.call_done())

    assert (arguments["name"], arguments["arguments"]) == ("f", '{"a": 1}')
    assert item["item"]["arguments"] == '{"a": 1}'
    assert "namespace" not in item["item"]


def test_a_custom_call_has_an_input_in_the_place_of_arguments() -> None:
    stream = stream_in(StreamState.BETWEEN_ITEMS)

    events = [
        *stream.call_started("c", "exec", "shell", is_custom=True),
        *stream.arguments_delta("ls"),
        *stream.call_done(),
    ]

    assert types(events) == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert frames(events)[-1]["item"] == {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "c",
        "name": "exec",
        "input": "ls",
        "status": "completed",
        "namespace": "shell",
    }


def test_reasoning_is_told_as_it_is() -> None:
    stream = stream_in(StreamState.BETWEEN_ITEMS)

    events = [*stream.reasoning_delta("a"), *stream.reasoning_delta("b"), *stream.reasoning_done()]

    assert types(events) == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert frames(events)[-1]["item"] == {
        "type": "reasoning",
        "id": "rs_1",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "ab"}],
    }


def test_reasoning_can_be_told_as_a_summary() -> None:
    stream = new_stream(reasoning_as_summary=True)
    stream.start()

    events = [*stream.reasoning_delta("a"), *stream.reasoning_done()]

    assert types(events) == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = frames(events)[-1]["item"]
    assert (item["summary"], item["content"]) == ([{"type": "summary_text", "text": "a"}], [])


@pytest.mark.parametrize(
    "end", [lambda s: s.reasoning_done(), lambda s: s.incomplete("max_output_tokens", USAGE)]
)
def test_reasoning_brings_its_text_sealed_whichever_way_it_ends(
    end: Callable[[ResponseStream], list[ServerEvent]],
) -> None:
    stream = new_stream(seals_reasoning=True)
    stream.start()
    stream.reasoning_delta("a")
    stream.reasoning_delta("b")

    (item,) = [event["item"] for event in frames(end(stream)) if "item" in event]

    assert item["encrypted_content"] == seal("ab")


def test_a_compaction_is_announced_before_it_is_there() -> None:
    stream = stream_in(StreamState.BETWEEN_ITEMS)

    events = stream.compaction("sealed")

    assert types(events) == ["output_item.added", "compaction.compacting", "output_item.done"]
    assert stream.output == (OutputCompaction("cmp_1", "sealed", "completed"),)


def test_every_delta_is_padded_on_its_own_and_nothing_else_is() -> None:
    paddings = (f"{number}" for number in count())
    stream = new_stream(padding=lambda: next(paddings))

    told = frames(everything(stream))

    deltas = [event for event in told if event["type"].endswith(".delta")]
    assert [event["obfuscation"] for event in deltas] == [f"{i}" for i in range(len(deltas))]
    assert len(deltas) == sum("obfuscation" in event for event in told)


def test_two_segments_are_one_response_with_one_count() -> None:
    events = two_segments(new_stream())

    check_stream(frames(events))
    assert types(events).count("done") == 1
    assert types(events).count("completed") == 1


def test_a_suspension_carries_the_response_in_progress_and_the_usage_of_its_segment() -> None:
    stream = stream_in(StreamState.BETWEEN_ITEMS)
    stream.call_started("c", "f")

    *_, done = stream.suspend(USAGE, {"segments": 1})

    response = whole_response(done)
    assert (response.status, response.usage) == ("in_progress", USAGE)
    assert response.suspend_run == {"segments": 1}
    assert [type(item) for item in response.output] == [OutputFunctionCall]


def test_a_pause_closes_the_segment_without_a_word() -> None:
    stream = stream_in(StreamState.IN_MESSAGE)

    paused = stream.pause()
    resumed = stream.text_delta("b")

    assert types(paused) == ["output_text.done", "content_part.done", "output_item.done"]
    assert types(resumed)[0] == "output_item.added"


def test_the_terminal_output_holds_the_very_items_that_were_streamed() -> None:
    events = two_segments(new_stream())

    streamed = [event.item for event in events if isinstance(event, OutputItemDone)]

    final = whole_response(events[-1]).output
    assert [type(item) for item in final] == [
        OutputMessage,
        OutputFunctionCall,
        OutputFunctionCall,
        OutputMessage,
    ]
    assert all(one is other for one, other in zip(final, streamed, strict=True))


def test_an_incomplete_response_delivers_the_torn_message() -> None:
    stream = stream_in(StreamState.IN_MESSAGE)

    events = stream.incomplete("max_output_tokens", USAGE)

    assert types(events) == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    item, terminal = frames(events)[-2:]
    assert item["item"]["status"] == "incomplete"
    assert terminal["response"]["output"] == [item["item"]]
    assert terminal["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert terminal["response"]["completed_at"] is None


def test_a_cancelled_response_is_told_as_incomplete() -> None:
    stream = stream_in(StreamState.IN_REASONING)

    *_, item, terminal = frames(stream.cancel(USAGE, {"segments": 1}))

    assert item["item"]["status"] == "incomplete"
    assert terminal["type"] == "response.incomplete"
    assert terminal["response"]["status"] == "cancelled"
    assert terminal["response"]["incomplete_details"] is None
    assert terminal["response"]["usage"]["total_tokens"] == 7


def test_a_failed_response_says_why_and_delivers_the_torn_call() -> None:
    stream = stream_in(StreamState.IN_CALL)

    *_, terminal = frames(stream.fail("server_error", "out of memory"))

    assert terminal["response"]["error"] == {"code": "server_error", "message": "out of memory"}
    assert [item["status"] for item in terminal["response"]["output"]] == ["incomplete"]


def test_a_completed_response_knows_when_and_has_the_extension() -> None:
    stream = stream_in(StreamState.IN_MESSAGE)

    (*_, terminal) = frames(stream.complete(USAGE, {"segments": 1}, 7))

    assert terminal["response"]["completed_at"] == 7
    assert terminal["response"]["suspend:run"] == {"segments": 1}


def test_without_an_extension_its_member_is_absent() -> None:
    (*_, terminal) = frames(stream_in(StreamState.IN_MESSAGE).complete(USAGE, None, 7))

    assert "suspend:run" not in terminal["response"]


def test_the_extension_may_be_a_struct() -> None:
    (*_, terminal) = frames(stream_in(StreamState.IN_MESSAGE).complete(USAGE, USAGE, 7))

    assert terminal["response"]["suspend:run"]["total_tokens"] == 7


def test_an_event_once_returned_never_changes() -> None:
    stream = new_stream()
    extension: dict[str, Any] = {"time": {"queue": 0.5}}
    events = [*stream.start(), *stream.text_delta("a"), *stream.suspend(USAGE, extension)]
    before = [encode(event) for event in events]

    extension["time"]["queue"] = 9
    stream.text_delta("b")
    stream.complete(Usage.of(1, 1), None, 2)

    assert [encode(event) for event in events] == before


def test_every_event_can_be_put_on_a_lane() -> None:
    events = [
        msgspec.structs.replace(event, stream_id="lane") for event in everything(new_stream())
    ]

    check_stream(frames(events))
    assert {event["stream_id"] for event in frames(events)} == {"lane"}


def test_a_finished_stream_says_so() -> None:
    stream = new_stream()
    assert not stream.is_finished

    two_segments(stream)

    assert stream.is_finished
    assert stream.response.status == "completed"


# --- Acknowledgements ----------------------------------------------------------------------------


def test_an_acknowledgement_takes_a_number_of_the_response() -> None:
    stream = stream_in(StreamState.SUSPENDED)  # 0 created, 1 in_progress, 2 done

    assert frames([stream.inject_created()]) == [
        {"type": "response.inject.created", "sequence_number": 3, "response_id": "resp_1"}
    ]
    assert frames(stream.fail("server_error", "x"))[0]["sequence_number"] == 4
    assert frames([stream.steer_accepted("steer_1")])[0]["sequence_number"] == 5


def test_a_pending_steer_says_what_it_waits_for() -> None:
    stream = stream_in(StreamState.FINISHED)

    (pending,) = frames([stream.steer_pending("steer_1", (FunctionCallOutputStub("c", "f"),))])

    assert pending == {
        "type": "response.steer.pending",
        "sequence_number": 3,
        "steer": {"id": "steer_1", "previous_response_id": "resp_1"},
        "reason": "waiting_for_required_input",
        "required_input": [{"type": "function_call_output", "call_id": "c", "name": "f"}],
    }


def test_rejected_input_comes_back_as_it_came() -> None:
    stream = stream_in(StreamState.FINISHED)
    raw_input = [{"role": "user", "content": "é", "nobody": None}]

    steer, inject = frames(
        [stream.steer_failed(ERROR, raw_input), stream.inject_failed(ERROR, raw_input)]
    )

    assert steer["steer"] == {"previous_response_id": "resp_1", "input": raw_input}
    assert steer["error"]["type"] == "invalid_request_error"
    assert (inject["response_id"], inject["input"]) == ("resp_1", raw_input)
    assert steer["error"]["code"] == inject["error"]["code"] == "response_already_completed"


def test_a_rejected_steer_has_its_id_if_it_was_accepted() -> None:
    stream = stream_in(StreamState.FINISHED)

    (failed,) = frames([stream.steer_failed(ERROR, "x", "steer_1")])

    assert failed["steer"]["id"] == "steer_1"


def test_input_for_a_response_that_nobody_knows_comes_back_too() -> None:
    error = orphan_output("c")  # an error without a code

    steer, inject = frames(
        [steer_failed(error, "x", "resp_9", 4), inject_failed(error, [], "resp_9", 5)]
    )

    assert (steer["steer"]["previous_response_id"], steer["sequence_number"]) == ("resp_9", 4)
    assert (inject["response_id"], inject["sequence_number"]) == ("resp_9", 5)
    assert steer["error"]["code"] == inject["error"]["code"] == "invalid_input"


# --- Any order -----------------------------------------------------------------------------------


WALK: list[Callable[[ResponseStream, str, int], list[ServerEvent]]] = [
    lambda s, text, _: s.start(),
    lambda s, text, _: s.text_delta(text),
    lambda s, text, _: s.text_delta(text, (LOGPROB,)),
    lambda s, text, _: s.refusal_delta(text),
    lambda s, text, _: s.reasoning_delta(text),
    lambda s, text, _: s.reasoning_done(),
    lambda s, text, number: s.call_started(f"call_{number}", "f"),
    lambda s, text, number: s.call_started(f"call_{number}", "f", "n", is_custom=True),
    lambda s, text, _: s.arguments_delta(text),
    lambda s, text, _: s.call_done(),
    lambda s, text, _: s.compaction(f"sealed {text}"),
    lambda s, text, _: s.pause(),
    lambda s, text, _: s.suspend(USAGE, {"text": text}),
    lambda s, text, number: [s.steer_accepted(f"steer_{number}")],
    lambda s, text, _: [s.steer_failed(ERROR, text)],
    lambda s, text, _: [s.inject_created()],
    lambda s, text, _: [s.inject_failed(ERROR, [text])],
]
ENDS: list[Callable[[ResponseStream], list[ServerEvent]]] = [
    lambda s: s.complete(USAGE, None, 2),
    lambda s: s.incomplete("max_output_tokens", USAGE),
    lambda s: s.cancel(),
    lambda s: s.fail("server_error", "oops"),
]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(WALK), st.text(max_size=3)), max_size=25),
    end=st.sampled_from(ENDS),
    is_queued=st.booleans(),
    as_summary=st.booleans(),
)
def test_no_order_of_steps_makes_a_stream_that_breaks_the_grammar(
    steps: list[tuple[Callable[[ResponseStream, str, int], list[ServerEvent]], str]],
    end: Callable[[ResponseStream], list[ServerEvent]],
    is_queued: bool,
    as_summary: bool,
) -> None:
    stream = new_stream(reasoning_as_summary=as_summary, seals_reasoning=is_queued)

    events = stream.queue() if is_queued else stream.start()
    for number, (step, text) in enumerate(steps):
        try:
            events += step(stream, text, number)
        except InvalidTransitionError:
            continue
    events += end(stream)
    events.append(stream.inject_failed(ERROR, []))

    check_stream(frames(events))
