"""Server-sent events: what a stream is made of, and that it stops when nobody reads it."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from protocol import errors
from protocol.codec import SSE_DONE, encode, sse, sse_frame
from protocol.response import ResponseError, ResponseResource
from protocol.server_events import ResponseFailed, ServerEvent

logger = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """A stream that closes its source when the client goes away, or reads nothing for too long."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], send_timeout_seconds: float) -> None:
        """Stream the frames of ``source``, and wait so long for each to be taken."""
        super().__init__(source)
        self._source = source
        self._send_timeout_seconds = send_timeout_seconds

    async def stream_response(self, send: Send) -> None:
        """Send the stream, to its end if the client reads that far."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._send_timeout_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientDisconnect from None

        async with aclosing(self._source):
            try:
                await super().stream_response(send_in_time)
            except ClientDisconnect:
                logger.info("a client reads nothing any more; its stream ends")


class Frame(NamedTuple):
    """An event as it stands in the stream, and its number there."""

    sequence_number: int
    data: bytes


async def sse_frames(
    events: AsyncGenerator[ServerEvent, None], starting_after: int = -1
) -> AsyncGenerator[bytes, None]:
    """Give the frames of ``events`` and the end of the stream.

    Args:
        events: of one response, up to the terminal one. Closed with this generator.
        starting_after: the number of the last event that the client has.
    """
    async with aclosing(events):
        async for event in events:
            for number, data in frames(event):
                if number > starting_after:
                    yield data
    yield SSE_DONE


def frames(event: ServerEvent) -> tuple[Frame, ...]:
    """Return what an event stream says for ``event``: one frame, two for a failure."""
    if isinstance(event, ResponseFailed):
        assert event.response.error is not None, "a failed response says why"
        return failure_frames(event.sequence_number, event.response.error, event.response)
    return (Frame(event.sequence_number, sse(event)),)


def failure_frames(
    sequence_number: int, failure: ResponseError, response: ResponseResource | msgspec.Raw
) -> tuple[Frame, Frame]:
    """Return an ``error`` event and the failed response (Open Responses 2026-04-24, Errors).

    The error has the number that the failure alone would have had, the failed response the next.
    """
    error = errors.sse_error_event(errors.failure(failure.code, failure.message), sequence_number)
    failed = {
        "type": "response.failed",
        "sequence_number": sequence_number + 1,
        "response": response,
    }
    return (
        Frame(sequence_number, sse(error)),
        Frame(sequence_number + 1, sse_frame("response.failed", encode(failed))),
    )
