import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from starlette.types import Message, Scope

from protocol.codec import SSE_DONE, decode_object, encode
from protocol.server_events import ServerEvent
from server.event_stream import EventStream, frames, sse_frames
from tests.protocol.streams import everything, new_stream


class Source:
    """Events that note when they are closed."""

    def __init__(self, events: list[ServerEvent]) -> None:
        self._events = events
        self.is_closed = False

    async def events(self) -> AsyncGenerator[ServerEvent, None]:
        try:
            for event in self._events:
                yield event
        finally:
            self.is_closed = True


def test_an_event_is_one_frame_under_its_own_number() -> None:
    for event in everything(new_stream()):
        (frame,) = frames(event)

        assert frame.sequence_number == event.sequence_number
        name, data, *rest = frame.data.split(b"\n")
        assert name == b"event: " + decode_object(encode(event))["type"].encode()
        assert data == b"data: " + encode(event)
        assert rest == [b"", b""]


def test_a_failure_is_an_error_and_the_failed_response() -> None:
    stream = new_stream()
    stream.start()
    (failure,) = stream.fail("server_error", "the model thread died")

    error, failed = frames(failure)

    assert (error.sequence_number, failed.sequence_number) == (2, 3)
    assert error.data.startswith(b"event: error\n")
    told = decode_object(failed.data.split(b"data: ")[1])
    assert told == decode_object(encode(failure)) | {"sequence_number": 3}


async def test_a_stream_ends_with_done() -> None:
    source = Source(events := everything(new_stream()))

    told = [data async for data in sse_frames(source.events())]

    assert told == [*(frame.data for event in events for frame in frames(event)), SSE_DONE]
    assert source.is_closed


async def test_what_the_client_has_is_left_out_of_the_stream() -> None:
    events = everything(new_stream())
    whole = [data async for data in sse_frames(Source(events).events())]

    rest = [data async for data in sse_frames(Source(events).events(), starting_after=10)]

    assert rest == whole[11:]


async def test_a_stream_that_is_closed_closes_its_source() -> None:
    source = Source(everything(new_stream()))
    async with aclosing(sse_frames(source.events())) as stream:
        await anext(stream)
        assert not source.is_closed

    assert source.is_closed


async def never() -> Message:
    """Receive nothing, or send to a client that reads nothing."""
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_a_client_that_reads_nothing_is_given_up_and_the_source_closed(num_read: int) -> None:
    source = Source(everything(new_stream()))
    scope: Scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    read: list[Message] = []

    async def send(message: Message) -> None:
        if len(read) == num_read:
            await never()
        read.append(message)

    await EventStream(sse_frames(source.events()), 0.01)(scope, never, send)

    assert len(read) == num_read
    assert source.is_closed or num_read < 2


async def test_a_source_that_times_out_is_no_client_that_reads_nothing() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise TimeoutError

    async def send(_: Message) -> None: ...

    with pytest.raises(TimeoutError):
        await EventStream(broken(), 60).stream_response(send)
