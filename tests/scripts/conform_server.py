"""The model server of the checks' tests, and ones that hardly are any, behind real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from protocol.conformance.actions import Answer, Closed, Connect, Frame, Receive, Request, Send
from tests.protocol.conformance.model_server import MODEL, ModelServer
from tests.server.sockets import listening

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_PAUSE_SECONDS = 0.001
"""After each event, for the client to say something in between."""


@asynccontextmanager
async def served(server: ModelServer, api_key: str | None = None) -> AsyncIterator[str]:
    """Serve ``server`` and give its URL. With a key, all others are wrong."""
    numbers = count()

    async def answer(request: HttpRequest) -> Response:
        path = f"{request.url.path}?{request.url.query}".removeprefix("/v1").removesuffix("?")
        headers = _headers(request.headers, api_key)
        found = server.answer(Request(request.method, path, await request.body(), headers))
        return Response(found.body, found.status, dict(found.headers))

    async def models(request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def connect(socket: WebSocket) -> None:
        name = str(next(numbers))
        headers = _headers(socket.headers, api_key)
        opened = server.perform(Connect(name, "", tuple(headers.items())))
        if isinstance(opened, Answer):
            await socket.send_denial_response(Response(opened.body, opened.status))
            return
        await socket.accept()
        with suppress(WebSocketDisconnect):
            await _talk(server, socket, name)

    http = [
        Route("/v1/models", models),
        Route("/v1/{path:path}", answer, methods=["GET", "POST", "DELETE"]),
    ]
    app = Starlette(routes=[WebSocketRoute("/v1/responses", connect), *http])
    async with listening(app) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def talking(talk: Talk) -> AsyncIterator[str]:
    """Answer one connection by ``talk``, which may break off, and give the host and port."""
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await talk(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await ended.wait()


def _headers(sent: Mapping[str, str], api_key: str | None) -> dict[str, str]:
    """Return headers as a scenario has them, which says nothing of the right key."""
    betas = {"OpenAI-Beta": sent.get("openai-beta", "")}
    authorization = sent.get("authorization", "")
    if api_key is None or authorization == f"Bearer {api_key}":
        return betas
    return betas | {"Authorization": authorization}


async def _talk(server: ModelServer, socket: WebSocket, name: str) -> None:
    """Say what there is to say, and read frames meanwhile, until one of both ends it."""
    receiving = asyncio.ensure_future(_received(socket))
    try:
        while True:
            said = server.perform(Receive(name))
            if isinstance(said, Closed):
                await socket.close(said.code, said.reason)
                return
            if not isinstance(said, Frame):
                await asyncio.wait([receiving])
            elif isinstance(said.data, str):
                await socket.send_text(said.data)
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                await socket.send_bytes(said.data)
            if receiving.done():
                server.perform(Send(name, receiving.result()))
                receiving = asyncio.ensure_future(_received(socket))
    finally:
        receiving.cancel()


async def _received(socket: WebSocket) -> str | bytes:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"])
    frame: str | bytes = message["bytes"] if message.get("text") is None else message["text"]
    return frame
