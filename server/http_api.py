"""The HTTP routes: the stateless design, where each request brings the whole history."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from protocol import errors
from protocol.codec import SSE_DONE, decode_object, encode, sse
from protocol.dialect import Dialect
from protocol.errors import ProtocolError
from protocol.server_events import ResponseFailed
from server.responder import Responder
from server.services import Services

CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client is gone (nginx's number): for logs, nobody receives it."""


class HttpApi:
    """The endpoints of one server."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._started_at = int(time.time())

    async def create_response(self, request: Request) -> Response:
        """``POST /v1/responses``: one response as JSON, or as server-sent events."""
        body = decode_object(await self._read_body(request))
        prepared = await self._services.pre_inference.prepare(body, "http")
        responder = self._services.responder(prepared, Dialect.COMPLETED)
        if prepared.params.stream:
            return EventStream(_sse_frames(responder), media_type="text/event-stream")
        return await _whole_response(request, responder)

    async def upgrade_required(self, request: Request) -> Response:
        """``GET /v1/responses`` without an upgrade."""
        # RFC 9110, 15.5.22: a 426 names the protocol.
        return error_response(errors.upgrade_required(), {"Upgrade": "websocket"})

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def get_model(self, request: Request) -> Response:
        """``GET /v1/models/{model}``."""
        if (name := request.path_params["model"]) != self._services.engine.model.name:
            raise errors.model_not_found(name)
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """``GET /health``."""
        return JSONResponse({"status": "ok", "model": self._services.engine.model.name})

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics`` in the Prometheus text format."""
        return Response(self._services.telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)

    def _model(self) -> dict[str, object]:
        return {
            "id": self._services.engine.model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "suspended-sampling",
        }

    async def _read_body(self, request: Request) -> bytes:
        limit = self._services.settings.max_frame_bytes
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise errors.payload_too_large(limit)
        return bytes(body)


class EventStream(StreamingResponse):
    """A stream that closes its source when the client goes away, and with it the run."""

    async def stream_response(self, send: Send) -> None:
        """Send the stream to its end."""
        assert isinstance(self.body_iterator, AsyncGenerator)
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


async def _sse_frames(responder: Responder) -> AsyncGenerator[bytes, None]:
    async with aclosing(responder.events()) as events:
        async for event in events:
            if isinstance(event, ResponseFailed):
                for frame in _failure_frames(event):
                    yield frame
            else:
                yield sse(event)
    yield SSE_DONE


def _failure_frames(event: ResponseFailed) -> Iterator[bytes]:
    """Give an ``error`` event and the failed response (Open Responses 2026-04-24, Errors)."""
    assert event.response.error is not None, "a failed response says why"
    error = errors.server_error(event.response.error.message)
    number = event.sequence_number
    yield sse(errors.sse_error_event(error, number))
    yield sse(msgspec.structs.replace(event, sequence_number=number + 1))


async def _whole_response(request: Request, responder: Responder) -> Response:
    """Sample to the end, or until the client is gone, and answer with the finished response."""
    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(_drain(responder))
        disconnect = tasks.create_task(_disconnected(request))
        await asyncio.wait({sampling, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        is_gone = not sampling.done()
        sampling.cancel()
        disconnect.cancel()
    if is_gone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if (failure := responder.response.error) is not None:
        return error_response(errors.server_error(failure.message))
    return Response(encode(responder.response), media_type="application/json")


async def _drain(responder: Responder) -> None:
    async with aclosing(responder.events()) as events:
        async for _ in events:
            pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(error: ProtocolError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP answer for ``error``."""
    return Response(
        encode(errors.error_body(error)),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )
