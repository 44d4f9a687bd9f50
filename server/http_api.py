"""The HTTP routes: each request brings the whole history, or names what is stored."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protocol import errors
from protocol.client_events import CreateParams, parse_compact, parse_create, parse_input_tokens
from protocol.codec import decode_object, encode
from protocol.dialect import Dialect
from protocol.server_events import ServerEvent
from protocol.validation import JsonObject
from sampler.engine import EngineError
from server.compaction import Compacting, compaction_resource
from server.error_response import error_response
from server.event_stream import EventStream, sse_frames
from server.memory import Memory
from server.request_body import read_body
from server.responder import Responder
from server.services import Services
from server.stored_responses import key_id

CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client is gone (nginx's number): for logs, nobody receives it."""


class HttpApi:
    """The endpoints of one server."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._started_at = int(time.time())

    def routes(self) -> list[Route]:
        """Return the routes, to be put into an application."""
        return [
            Route("/v1/responses", self.create_response, methods=["POST"]),
            Route("/v1/responses", self.upgrade_required, methods=["GET"]),
            Route("/v1/codex/responses", self.create_response, methods=["POST"]),
            Route("/v1/codex/responses", self.upgrade_required, methods=["GET"]),
            Route("/v1/responses/compact", self.compact, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_input_tokens, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{model:path}", self.get_model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]

    async def create_response(self, request: Request) -> Response:
        """``POST /v1/responses``: one response as JSON, as server-sent events, or to be polled."""
        self._services.draining.check()
        params = parse_create(
            await self._body(request), transport="http", default_model=self._model_name
        )
        memory = self._services.recent_responses(key_id(request))
        prepared = await self._services.pre_inference.prepare(params, memory)
        responder = Responder(prepared, Dialect.CHAINED, self._services, memory, slot=prepared.id)
        if params.background:
            return await self._in_background(params, responder, memory)
        if params.stream:
            return self._stream(responder.events())
        return await _unless_gone(request, _whole_response(responder))

    async def _in_background(
        self, params: CreateParams, responder: Responder, memory: Memory
    ) -> Response:
        if self._services.store is None:
            raise errors.unsupported_parameter("background", "nothing is stored here")
        await responder.store_as_it_is()
        live = self._services.background.start(
            memory.key_id, responder.response, responder.events(), responder.cancel
        )
        if params.stream:
            return self._stream(live.follow())
        return Response(encode(live.response), media_type="application/json")

    def _stream(self, events: AsyncGenerator[ServerEvent, None]) -> EventStream:
        return EventStream(sse_frames(events), self._services.settings.send_timeout_seconds)

    async def compact(self, request: Request) -> Response:
        """``POST /v1/responses/compact``: the input of a new conversation that goes on from this.
        Nothing of it is stored."""
        self._services.draining.check()
        params = parse_compact(await self._body(request), default_model=self._model_name)
        memory = self._services.recent_responses(key_id(request))
        compacting = await self._services.pre_inference.prepare_compaction(params, memory)
        return await _unless_gone(request, self._compacted(compacting))

    async def _compacted(self, compacting: Compacting) -> Response:
        with self._services.draining.track(compacting.cancel):
            try:
                summary = await self._services.compactor.summarise(compacting)
            except EngineError as error:
                return error_response(errors.server_error(str(error)))
            finally:
                self._services.post_inference.finish(compacting.run)
        if compacting.is_cancelled:
            return error_response(errors.shutting_down())
        resource = compaction_resource(compacting, summary, int(time.time()))
        return Response(encode(resource), media_type="application/json")

    async def count_input_tokens(self, request: Request) -> Response:
        """``POST /v1/responses/input_tokens``: how long the context of a create would be."""
        params = parse_input_tokens(await self._body(request), default_model=self._model_name)
        memory = self._services.recent_responses(key_id(request))
        num_tokens = await self._services.pre_inference.count_tokens(params, memory)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def upgrade_required(self, request: Request) -> Response:
        """``GET /v1/responses`` without an upgrade."""
        return error_response(errors.upgrade_required())

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def get_model(self, request: Request) -> Response:
        """``GET /v1/models/{model}``."""
        if (name := request.path_params["model"]) != self._model_name:
            raise errors.model_not_found(name)
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """``GET /health``."""
        return JSONResponse({"status": "ok", "model": self._model_name})

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics`` in the Prometheus text format."""
        return Response(self._services.telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)

    @property
    def _model_name(self) -> str:
        return self._services.engine.model.name

    def _model(self) -> JsonObject:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "suspended-sampling",
        }

    async def _body(self, request: Request) -> JsonObject:
        return decode_object(await read_body(request, self._services.settings.max_frame_bytes))


async def _whole_response(responder: Responder) -> Response:
    """Sample to the end, and answer with the finished response."""
    async for _ in responder.events():
        pass
    if (failure := responder.response.error) is not None:
        return error_response(errors.server_error(failure.message))
    return Response(encode(responder.response), media_type="application/json")


async def _unless_gone(request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
    """Return the answer, or cancel what makes it when the client goes away."""
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(answering)
        disconnect = tasks.create_task(_disconnected(request))
        await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        is_gone = not answer.done()
        answer.cancel()
        disconnect.cancel()
    return Response(status_code=CLIENT_CLOSED_REQUEST) if is_gone else answer.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
