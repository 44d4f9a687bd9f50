"""Streams are told apart and judged, over WebSocket and over HTTP."""

from collections.abc import Sequence

import pytest

from protocol.codec import encode
from protocol.conformance.captured import (
    CapturedSocket,
    read_event_stream,
    read_response,
)
from protocol.conformance.rules import NonconformityError, Rule
from protocol.conformance.shapes import Event
from tests.protocol.streams import USAGE, frames, new_stream, two_segments


def short_stream() -> list[Event]:
    stream = new_stream()
    return frames([*stream.start(), *stream.text_delta("Hi."), *stream.complete(USAGE, None, 2)])


def take_all(socket: CapturedSocket, events: Sequence[Event]) -> None:
    for event in events:
        socket.take(encode(event).decode())


def sse(events: Sequence[Event], *, end: bytes = b"data: [DONE]\n\n") -> bytes:
    blocks = [b"event: %b\ndata: %b\n\n" % (e["type"].encode(), encode(e)) for e in events]
    return b"".join(blocks) + end


def rule_of(caught: pytest.ExceptionInfo[NonconformityError]) -> Rule | None:
    return caught.value.rule


# --- WebSocket -----------------------------------------------------------------------------------


def test_streams_that_follow_one_another_are_judged_apart() -> None:
    socket = CapturedSocket()

    take_all(socket, [*short_stream(), *frames(two_segments(new_stream()))])

    socket.judge()


def test_streams_of_two_lanes_may_interleave() -> None:
    socket = CapturedSocket()
    one, two = ([e | {"stream_id": name} for e in short_stream()] for name in ("one", "two"))

    take_all(socket, [event for pair in zip(one, two, strict=True) for event in pair])

    socket.judge()


def test_streams_of_one_lane_may_not() -> None:
    socket = CapturedSocket()
    events = short_stream()

    with pytest.raises(NonconformityError) as caught:
        take_all(socket, [events[0], events[0]])

    assert rule_of(caught) is Rule.LANE_ORDER


def test_a_suspended_response_may_be_given_up_for_another() -> None:
    socket = CapturedSocket()
    events = frames(two_segments(new_stream()))
    types = [event["type"] for event in events]

    take_all(socket, events[: types.index("response.done") + 1])
    take_all(socket, short_stream())

    socket.judge()


def test_what_comes_after_the_end_is_noticed() -> None:
    socket = CapturedSocket()
    events = short_stream()

    take_all(socket, [*events, events[1] | {"sequence_number": len(events)}])

    with pytest.raises(NonconformityError) as caught:
        socket.judge()
    assert rule_of(caught) is Rule.ONE_TERMINAL


def test_an_event_of_a_lane_on_which_nothing_was_begun_is_noticed() -> None:
    socket = CapturedSocket()
    first, second, *_ = short_stream()
    socket.take(encode(first | {"stream_id": "one"}).decode())

    with pytest.raises(NonconformityError) as caught:
        socket.take(encode(second).decode())

    assert rule_of(caught) is Rule.ONE_LANE


def test_a_stream_that_has_not_ended_is_not_judged() -> None:
    socket = CapturedSocket()

    take_all(socket, short_stream()[:-1])

    socket.judge()


def test_errors_belong_to_no_stream() -> None:
    socket = CapturedSocket()
    error = {"type": "error", "status": 400, "error": {"type": "x", "message": "x"}}
    first, *others = short_stream()

    take_all(socket, [first, error, *others])

    socket.judge()


# --- HTTP ----------------------------------------------------------------------------------------


def test_a_whole_stream_is_read() -> None:
    events = short_stream()

    assert read_event_stream(b": beat\n\n" + sse(events)) == events


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        (b"", Rule.ONE_TERMINAL),
        (sse(short_stream()[:-1]), Rule.ONE_TERMINAL),
        (sse(short_stream(), end=b""), Rule.SSE_FRAMES),
        (b"id: 1\n" + sse(short_stream()), Rule.SSE_FRAMES),
        (sse(short_stream()).replace(b"event: ", b"event: x", 1), Rule.SSE_FRAMES),
        (b"event: x\ndata: 5\n\n" + sse(short_stream()), Rule.FRAME_IS_JSON),
    ],
)
def test_a_stream_with_a_fault_is_noticed(body: bytes, rule: Rule) -> None:
    with pytest.raises(NonconformityError) as caught:
        read_event_stream(body)

    assert rule_of(caught) is rule


def test_an_error_may_stand_before_the_failure() -> None:
    stream = new_stream()
    events = frames([*stream.start(), *stream.fail("server_error", "oops")])
    error = {"type": "error", "message": "oops", "sequence_number": 2}

    found = read_event_stream(sse([*events[:2], error, *events[2:]]))

    assert found[2] == error


def test_a_response_is_judged() -> None:
    response = short_stream()[-1]["response"]

    assert read_response(encode(response)) == response
    with pytest.raises(NonconformityError) as caught:
        read_response(encode(response | {"error": {"code": "x"}}))
    assert rule_of(caught) is Rule.TERMINAL_STATUS
