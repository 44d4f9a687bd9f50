"""The HTTP routes: each request brings the whole history, or names what is stored."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protocol import errors
from protocol.client_events import CreateParams
from protocol.codec import decode_object, encode
from protocol.dialect import Dialect
from protocol.server_events import ServerEvent
from protocol.validation import JsonObject
from sampler.engine import EngineError
from server.compaction import Compacting, compaction_resource
from server.error_response import error_response
from server.event_stream import EventStream, sse_frames
from server.ledger import RunOpened
from server.memory import Memory
from server.post_inference import Account
from server.reading import model_of_parent, read_compact, read_create, read_input_tokens
from server.request_body import read_body
from server.responder import Responder
from server.run_report import mark_of
from server.services import Services
from server.stored_responses import key_id
from server.work import Stage, Work

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
        pre_inference = self._services.pre_inference
        body, memory, work = await self._received(request)
        parent_model = await model_of_parent(body, memory, work)
        params = read_create(body, memory, work, "http", parent_model)
        prepared = await pre_inference.prepare(params, memory, work)
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
        pre_inference = self._services.pre_inference
        body, memory, work = await self._received(request)
        params = read_compact(body, memory, work, await model_of_parent(body, memory, work))
        compacting = await pre_inference.prepare_compaction(params, memory, work)
        opened = RunOpened(
            run_id=compacting.run.id,
            key=memory.key_id,
            model=params.model,
            requested_model=work.requested_model or params.model,
            design="compact",
            created_at=int(time.time()),
            is_simulated=self._services.engine.is_simulated,
        )
        account = self._services.post_inference.open(opened, work)
        return await _unless_gone(request, self._compacted(compacting, account))

    async def _compacted(self, compacting: Compacting, account: Account) -> Response:
        with self._services.draining.track(compacting.cancel):
            try:
                summary = await self._services.compactor.summarise(compacting)
            except EngineError as error:
                return error_response(errors.failure(error.code, str(error)))
            finally:
                account.close([compacting.run], compacting.run.state.value)
        if compacting.is_cancelled:
            return error_response(errors.shutting_down())
        mark = mark_of(is_simulated=self._services.engine.is_simulated)
        resource = compaction_resource(compacting, summary, int(time.time()), mark)
        return Response(encode(resource), media_type="application/json")

    async def count_input_tokens(self, request: Request) -> Response:
        """``POST /v1/responses/input_tokens``: how long the context of a create would be."""
        if not self._services.engine.capabilities.token_exact:
            raise errors.unsupported_parameter("model", "its tokens are counted by somebody else")
        pre_inference = self._services.pre_inference
        body, memory, work = await self._received(request)
        parent_model = await model_of_parent(body, memory, work)
        params = read_input_tokens(body, memory, work, parent_model)
        num_tokens = await pre_inference.count_tokens(params, memory, work)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def upgrade_required(self, request: Request) -> Response:
        """``GET /v1/responses`` without an upgrade."""
        return error_response(errors.upgrade_required())

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return JSONResponse({"object": "list", "data": list(map(self._model, self._names))})

    async def get_model(self, request: Request) -> Response:
        """``GET /v1/models/{model}``."""
        if (name := request.path_params["model"]) not in self._names:
            raise errors.model_not_found(name)
        return JSONResponse(self._model(name))

    async def health(self, request: Request) -> Response:
        """``GET /health``: 503 once nothing can be sampled any more."""
        if (failure := self._services.engine.failure) is not None:
            failed = {"status": "failed", "model": self._model_name, "reason": failure}
            return JSONResponse(failed, status_code=503)
        return JSONResponse({"status": "ok", "model": self._model_name})

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics`` in the Prometheus text format."""
        return Response(self._services.telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)

    @property
    def _model_name(self) -> str:
        return self._services.engine.name

    @property
    def _names(self) -> Sequence[str]:
        return self._services.routes.names

    def _model(self, name: str) -> JsonObject:
        engine = self._services.engine
        model = {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "suspended-sampling",
            "suspend:capabilities": engine.capabilities.as_json(),
        }
        # Whatever its name says: an alias may be that of a model.
        return {**model, "suspend:simulated": True} if engine.is_simulated else model

    async def _received(self, request: Request) -> tuple[JsonObject, Memory, Work]:
        """Return the body of a request, what it may go on from, and the work on it."""
        body = await read_body(request, self._services.settings.max_frame_bytes)
        work = self._services.new_work()
        work.absorb(request.state.admission)
        with work.stage(Stage.PARSE, runs=0, items=0):
            return decode_object(body), self._memory(request), work

    def _memory(self, request: Request) -> Memory:
        """Return what a request may go on from. With ``?cache=off``, our extension for whoever
        compares designs, that is what it brings itself: nothing is reused, and nothing is left."""
        match request.query_params.get("cache"):
            case None:
                return self._services.recent_responses(key_id(request))
            case "off":
                return self._services.forgetful_memory(key_id(request))
            case other:
                raise errors.unexpected_value("cache", other, "'off'")


async def _whole_response(responder: Responder) -> Response:
    """Sample to the end, and answer with the finished response."""
    async for _ in responder.events():
        pass
    if (failure := responder.response.error) is not None:
        refusal = responder.prepared.refusal
        return error_response(refusal or errors.failure(failure.code, failure.message))
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
