"""An application behind a real socket, and requests that are written out by hand.

Clients are too well-behaved to send what the server has to refuse.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from enum import Enum
from typing import Any

from starlette.types import ASGIApp
from uvicorn.server import ServerState

from server.process import server_config
from server.settings import Settings

DEADLINE_SECONDS = 20.0


@asynccontextmanager
async def listening(app: ASGIApp, settings: Settings | None = None) -> AsyncIterator[int]:
    """Serve ``app`` as the server would, and give the port."""
    config = server_config(app, settings or Settings(), port=0)
    config.load()
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=state, app_state={}
        ),
        "127.0.0.1",
        0,
    )
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.wait_for(asyncio.gather(*state.tasks), DEADLINE_SECONDS)


class Door(Enum):
    """The two ways in."""

    HTTP = ""
    UPGRADE = (
        "Upgrade: websocket\r\n"
        "Connection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    )


@dataclass(frozen=True)
class Answer:
    """What came back, without what follows an upgrade."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def knock(
    port: int,
    door: Door = Door.HTTP,
    path: str = "/v1/responses",
    *,
    method: str = "GET",
    host: str | None = "127.0.0.1",
    body: bytes = b"",
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send a request and return the answer; then the connection is closed."""
    lines = [f"{method} {path} HTTP/1.1", f"Content-Length: {len(body)}"]
    lines += [f"Host: {host}"] if host is not None else []
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            writer.write(("\r\n".join(lines) + f"\r\n{door.value}\r\n").encode() + body)
            status_line = await reader.readline()
            head = BytesHeaderParser().parsebytes(await reader.readuntil(b"\r\n\r\n"))
            content = await reader.readexactly(int(head.get("content-length", 0)))
    finally:
        writer.close()
    return Answer(int(status_line.split()[1]), head, content)
