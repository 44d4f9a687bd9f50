from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.items import OutputFunctionCall, OutputMessage
from protocol.response import ResponseResource, Usage
from protocol.response_stream import TRANSITIONS, ResponseStream, Step, StreamState
from protocol.server_events import (
    OutputItemDone,
    ResponseCompleted,
    ResponseDone,
    ResponseFailed,
    ResponseIncomplete,
    ServerEvent,
    event_type,
)
from protocol.transitions import InvalidTransitionError
from tests.protocol.stream_grammar import check_stream
from tests.protocol.streams import USAGE, frames, new_response, new_stream, two_segments

Act = Callable[[ResponseStream], object]

WAY_TO: dict[StreamState, list[Act]] = {
    StreamState.NEW: [],
    StreamState.BETWEEN_ITEMS: [lambda s: s.start()],
    StreamState.IN_MESSAGE: [lambda s: s.start(), lambda s: s.text_delta("a")],
    StreamState.IN_CALL: [lambda s: s.start(), lambda s: s.call_started("c", "f")],
    StreamState.SUSPENDED: [lambda s: s.start(), lambda s: s.suspend(USAGE)],
    StreamState.FINISHED: [lambda s: s.start(), lambda s: s.fail("server_error", "oops")],
}
ACTS: list[tuple[Step, Act]] = [
    (Step.START, lambda s: s.start()),
    (Step.TEXT, lambda s: s.text_delta("b")),
    (Step.CALL, lambda s: s.call_started("d", "g")),
    (Step.ARGUMENTS, lambda s: s.arguments_delta("{}")),
    (Step.CALL_DONE, lambda s: s.call_done()),
    (Step.SUSPEND, lambda s: s.suspend(USAGE)),
    (Step.ACKNOWLEDGE, lambda s: s.next_sequence_number()),
    (Step.FINISH, lambda s: s.complete(USAGE, None, 2)),
    (Step.FINISH, lambda s: s.incomplete("max_output_tokens", USAGE)),
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


def test_the_first_text_opens_a_message_and_its_part() -> None:
    stream = stream_in(StreamState.BETWEEN_ITEMS)

    assert types(stream.text_delta("a")) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
    ]
    assert types(stream.text_delta("b")) == ["output_text.delta"]


def test_a_call_closes_the_message_before_it() -> None:
    stream = stream_in(StreamState.IN_MESSAGE)

    assert types(stream.call_started("c", "f")) == [
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


def test_an_acknowledgement_takes_a_number_of_the_response() -> None:
    stream = stream_in(StreamState.SUSPENDED)  # 0 created, 1 in_progress, 2 done

    assert stream.next_sequence_number() == 3
    assert frames(stream.fail("server_error", "x"))[0]["sequence_number"] == 4


def test_an_event_once_returned_never_changes() -> None:
    stream = new_stream()
    extension: dict[str, Any] = {"time": {"queue": 0.5}}
    events = [*stream.start(), *stream.text_delta("a"), *stream.suspend(USAGE, extension)]
    before = [encode(event) for event in events]

    extension["time"]["queue"] = 9
    stream.text_delta("b")
    stream.complete(Usage.of(1, 1), None, 2)

    assert [encode(event) for event in events] == before


def test_a_finished_stream_says_so() -> None:
    stream = new_stream()
    assert not stream.is_finished

    two_segments(stream)

    assert stream.is_finished
    assert stream.response.status == "completed"


# --- Any order -----------------------------------------------------------------------------------


def play(stream: ResponseStream, act: int, text: str, calls: int) -> list[ServerEvent]:
    """Do one thing, sensible or not."""
    match act:
        case 0 | 1 | 2:
            return stream.text_delta(text)
        case 3 | 4:
            return stream.call_started(f"call_{calls}", "f")
        case 5 | 6:
            return stream.arguments_delta(text)
        case 7 | 8:
            return stream.call_done()
        case 9 | 10:
            return stream.suspend(USAGE, {"text": text})
        case 11:
            return stream.start()
        case 12:
            return stream.complete(USAGE, None, 2)
        case 13:
            return stream.incomplete("max_output_tokens", USAGE)
        case _:
            return stream.fail("server_error", text)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    acts=st.lists(st.tuples(st.integers(0, 14), st.text(max_size=3)), max_size=25),
    has_tools=st.booleans(),
)
def test_no_order_of_calls_makes_a_stream_that_breaks_the_grammar(
    acts: list[tuple[int, str]], has_tools: bool
) -> None:
    ids = (f"_{number}" for number in range(100))
    response = new_response() if has_tools else new_response(tools=[])
    stream = ResponseStream(response, lambda prefix: prefix + next(ids))

    events = stream.start()
    for number, (act, text) in enumerate(acts):
        try:
            events += play(stream, act, text, number)
        except InvalidTransitionError:
            continue
    if not stream.is_finished:
        events += stream.complete(USAGE, None, 2)

    check_stream(frames(events))
