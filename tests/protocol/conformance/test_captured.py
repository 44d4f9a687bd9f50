"""Streams are told apart and judged, over WebSocket and over HTTP."""

from collections.abc import Callable, Sequence

import pytest

from protocol.codec import SSE_DONE, encode
from protocol.conformance.captured import (
    CapturedSocket,
    read_event_stream,
    read_response,
)
from protocol.conformance.rules import NonconformityError, Rule
from protocol.conformance.shapes import Event
from protocol.server_events import ServerEvent
from server.event_stream import frames as server_frames
from tests.protocol.streams import USAGE, frames, new_stream, two_segments

DONE = b"data: [DONE]\n\n"


def short_stream() -> list[Event]:
    stream = new_stream()
    return frames([*stream.start(), *stream.text_delta("Hi."), *stream.complete(USAGE, None, 2)])


def take_all(socket: CapturedSocket, events: Sequence[Event]) -> None:
    for event in events:
        socket.take(encode(event).decode())


def sse(events: Sequence[Event], *, end: bytes = DONE) -> bytes:
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


@pytest.mark.parametrize("last", ["response.done", "response.completed"])
def test_an_event_of_an_extension_may_come_before_the_next_response(last: str) -> None:
    socket = CapturedSocket()
    events = frames(two_segments(new_stream()))
    types = [event["type"] for event in events]
    told = events[: types.index(last) + 1]

    take_all(socket, [*told, {"type": "acme:trace", "sequence_number": len(told)}])
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


@pytest.mark.parametrize("num_told", range(1, len(short_stream())))
def test_a_stream_need_not_have_ended(num_told: int) -> None:
    socket = CapturedSocket()

    take_all(socket, short_stream()[:num_told])

    socket.judge()


def test_a_stream_that_has_not_ended_is_judged_as_far_as_it_came() -> None:
    socket = CapturedSocket()
    *told, _ = short_stream()

    take_all(socket, [*told[:-1], told[-1] | {"sequence_number": 0}])

    socket.judge(only_whole=True)
    with pytest.raises(NonconformityError) as caught:
        socket.judge()
    assert rule_of(caught) is Rule.SEQUENCE_NUMBERS


def test_a_suspended_response_is_judged() -> None:
    socket = CapturedSocket()
    events = frames(two_segments(new_stream()))
    types = [event["type"] for event in events]
    done = events[types.index("response.done")]

    done["response"]["output"].pop()
    take_all(socket, events[: types.index("response.done") + 1])

    with pytest.raises(NonconformityError) as caught:
        socket.judge()
    assert rule_of(caught) is Rule.TERMINAL_OUTPUT


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
    "spelled",
    [
        lambda body: body.replace(b"\n", b"\r\n"),
        lambda body: body.replace(b"\n", b"\r"),
        lambda body: b"\xef\xbb\xbf" + body,
        lambda body: body.replace(b"event: ", b"retry: 1000\nevent:"),
        lambda body: body.replace(DONE, b"retry: 1000\n" + DONE),
        lambda body: body.replace(b"data: ", b": beat\ndata:"),
        lambda body: body + b": beat\n\n",
    ],
)
def test_a_stream_may_be_spelled_in_other_ways(spelled: Callable[[bytes], bytes]) -> None:
    events = short_stream()

    assert read_event_stream(spelled(sse(events))) == events


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085"])
def test_other_line_separators_end_no_line(character: str) -> None:
    stream = new_stream()
    begun = [*stream.start(), *stream.text_delta(f"Hi{character}there.")]
    events = frames([*begun, *stream.complete(USAGE, None, 2)])

    assert character.encode() in sse(events), "it is not escaped"
    assert read_event_stream(sse(events)) == events


def test_data_in_several_lines_is_read_but_not_framed_right() -> None:
    events = short_stream()
    body = sse(events).replace(b'","', b'",\ndata: "')

    assert read_event_stream(body, judges_frames=False) == events
    with pytest.raises(NonconformityError) as caught:
        read_event_stream(body)
    assert rule_of(caught) is Rule.SSE_FRAMES


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        (b"", Rule.ONE_TERMINAL),
        (sse(short_stream()[:-1]), Rule.ONE_TERMINAL),
        (sse(short_stream(), end=b""), Rule.SSE_FRAMES),
        (sse(short_stream(), end=b"data: [DONE]\n"), Rule.SSE_FRAMES),
        (sse(short_stream(), end=b"")[:-1], Rule.ONE_TERMINAL),
        (DONE + sse(short_stream()), Rule.SSE_FRAMES),
        (b"event: x\n" + DONE + sse(short_stream()), Rule.SSE_FRAMES),
        (sse(short_stream()) + DONE, Rule.SSE_FRAMES),
        (sse(short_stream(), end=b"event: x\n" + DONE), Rule.SSE_FRAMES),
        (sse(short_stream(), end=b"id: 1\n" + DONE), Rule.SSE_FRAMES),
        (b"id: 1\n" + sse(short_stream()), Rule.SSE_FRAMES),
        (sse(short_stream()).replace(b"event: ", b"event: x", 1), Rule.SSE_FRAMES),
        (b"event: x\ndata: 5\n\n" + sse(short_stream()), Rule.FRAME_IS_JSON),
    ],
)
def test_a_stream_with_a_fault_is_noticed(body: bytes, rule: Rule) -> None:
    with pytest.raises(NonconformityError) as caught:
        read_event_stream(body)

    assert rule_of(caught) is rule


def failing() -> list[ServerEvent]:
    stream = new_stream()
    return [*stream.start(), *stream.fail("server_error", "oops")]


def test_the_failure_of_our_own_server_is_right() -> None:
    body = b"".join(frame.data for event in failing() for frame in server_frames(event))

    found = read_event_stream(body + SSE_DONE)

    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]


@pytest.mark.parametrize(
    ("of_error", "of_failure", "is_right"),
    [({"sequence_number": 2}, 3, True), ({}, 2, True), ({"sequence_number": 2}, 2, False)],
)
def test_the_number_of_an_error_counts(of_error: Event, of_failure: int, is_right: bool) -> None:
    *begun, failed = frames(failing())
    error = {"type": "error", "message": "oops"} | of_error
    events = [*begun, error, failed | {"sequence_number": of_failure}]

    if is_right:
        assert read_event_stream(sse(events)) == events
    else:
        with pytest.raises(NonconformityError, match="not numbered"):
            read_event_stream(sse(events))


def test_an_error_may_not_follow_the_end() -> None:
    error = {"type": "error", "message": "oops"}

    with pytest.raises(NonconformityError) as caught:
        read_event_stream(sse([*short_stream(), error]))

    assert rule_of(caught) is Rule.ONE_TERMINAL


def test_a_response_is_judged() -> None:
    response = short_stream()[-1]["response"]

    assert read_response(encode(response)) == response
    with pytest.raises(NonconformityError) as caught:
        read_response(encode(response | {"error": {"code": "x"}}))
    assert rule_of(caught) is Rule.TERMINAL_STATUS
