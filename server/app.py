"""The ASGI application: which path leads where."""

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from protocol import errors
from protocol.dialect import negotiate
from protocol.errors import ProtocolError
from sampler.engine import Engine
from server.connection import Connection
from server.http_api import CLIENT_CLOSED_REQUEST, HttpApi, error_response
from server.services import Services
from server.settings import Settings

logger = logging.getLogger(__name__)


def create_app(engine: Engine, settings: Settings | None = None) -> Starlette:
    """Return the application around ``engine``, which stays the caller's to close."""
    services = Services(engine, settings or Settings())
    api = HttpApi(services)

    async def responses_socket(websocket: WebSocket) -> None:
        beta = ",".join(websocket.headers.getlist("openai-beta"))
        try:
            dialect = negotiate(beta, websocket.query_params.get("dialect"))
        except ProtocolError as error:
            await websocket.send_denial_response(error_response(error))
            return
        await Connection(websocket, services, dialect).serve()

    return Starlette(
        routes=[
            WebSocketRoute("/v1/responses", responses_socket),
            Route("/v1/responses", api.create_response, methods=["POST"]),
            Route("/v1/responses", api.upgrade_required, methods=["GET"]),
            Route("/v1/models", api.list_models),
            Route("/v1/models/{model:path}", api.get_model),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
        ],
        exception_handlers={
            ProtocolError: _protocol_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _internal_error,
        },
    )


async def _protocol_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProtocolError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: no such path, no such method."""
    assert isinstance(error, HTTPException)
    return error_response(ProtocolError(error.detail, status=error.status_code), error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    """The client left before its body was whole, which is no mistake of ours."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    """A bug: Starlette logs it with its traceback after this answer."""
    return error_response(errors.server_error("the server made a mistake"))
