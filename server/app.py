"""The ASGI application: which path leads where."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from protocol import errors
from protocol.dialect import negotiate
from protocol.errors import ProtocolError
from sampler.engine import Engine
from server.access import Access
from server.connection import Connection
from server.error_response import error_response
from server.http_api import CLIENT_CLOSED_REQUEST, HttpApi
from server.operator_files import OperatorFiles, read_operator_files
from server.services import Services
from server.settings import Settings
from server.stored_responses import StoredResponsesApi

logger = logging.getLogger(__name__)


def create_app(
    engine: Engine, settings: Settings | None = None, files: OperatorFiles | None = None
) -> Starlette:
    """Return the application around ``engine``, which stays the caller's to close.

    Its services are ``app.state.services``. They are closed at the end of its life span, or by
    whoever serves it without one.

    Args:
        engine: what samples.
        settings: how the server is to behave.
        files: what is in those that ``settings`` name; None reads them.

    Raises:
        ApiKeyFileError: the API keys cannot be read.
        ModelRoutesError: the file of models cannot be used.
        PriceError: one of the prices in it is none.
        SafetyError: there is no such classifier.
        SettingsError: a file of traces cannot be read, or ``engine`` replays none.
        TraceError: it does not hold traces.
        StoreError: the response store cannot be opened.
        LedgerError: the ledger cannot be opened.
    """
    settings = settings or Settings()
    files = files or read_operator_files(settings, engine.name)
    services = Services(engine, settings, files)

    async def responses_socket(websocket: WebSocket) -> None:
        beta = ",".join(websocket.headers.getlist("openai-beta"))
        query = websocket.query_params.get("dialect")
        try:
            dialect = negotiate(beta, query)
            services.draining.check()
        except ProtocolError as error:
            await websocket.send_denial_response(error_response(error))
            return
        key = websocket.state.key_id or ""
        admission = websocket.state.admission
        connection = Connection(
            websocket, services, dialect, key, admission, keeps_open=query is not None
        )
        await connection.serve()

    async def no_socket(websocket: WebSocket) -> None:
        await websocket.send_denial_response(
            error_response(errors.unknown_path(websocket.url.path))
        )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        await services.start()
        yield
        await services.close()

    app = Starlette(
        routes=[
            WebSocketRoute("/v1/responses", responses_socket),
            WebSocketRoute("/v1/codex/responses", responses_socket),
            *HttpApi(services).routes(),
            *StoredResponsesApi(
                services.store,
                services.background,
                services.forget_response,
                settings.send_timeout_seconds,
            ).routes(),
            WebSocketRoute("/{path:path}", no_socket),
        ],
        middleware=[
            Middleware(Access, keys=files.keys, settings=settings, stages=services.telemetry.stages)
        ],
        exception_handlers={
            ProtocolError: _protocol_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _internal_error,
        },
        lifespan=lifespan,
    )
    app.state.services = services
    app.state.draining = services.draining
    return app


async def _protocol_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProtocolError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: no such path, no such method."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(errors.unknown_path(request.url.path))
    response = error_response(ProtocolError(error.detail, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    """The client left before its body was whole, which is no mistake of ours."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    """A bug: Starlette logs it with its traceback after this answer."""
    return error_response(errors.server_error("the server made a mistake"))
