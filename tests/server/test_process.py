"""How uvicorn is run: idle sockets are pinged, and work ends before connections do."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from server.draining import Draining
from server.process import ListenError, Server, bound_sockets, server_config
from server.settings import Settings
from tests.server.sockets import DEADLINE_SECONDS, Door, listening

# --- Where it listens ----------------------------------------------------------------------------


def test_a_port_is_taken_before_anything_listens_there() -> None:
    with bound_sockets("127.0.0.1", 0) as (bound,):
        address = bound.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

        bound.listen()
        with pytest.raises(ListenError, match=f"port {address[1]}: address already in use"):
            bound_sockets(*address).__enter__()


def test_all_addresses_of_a_host_have_one_port_and_those_of_other_machines_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = ["192.0.2.1", "127.0.0.1", "127.0.0.2"]  # the first is kept for documentation
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    with bound_sockets("somewhere", 0) as sockets:
        (first, port), (second, same_port) = [bound.getsockname() for bound in sockets]

    assert (first, second) == ("127.0.0.1", "127.0.0.2")
    assert port == same_port != 0


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid", "a..b"])
def test_a_host_without_an_address_here_is_told(host: str) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {host}, port 0: "):
        bound_sockets(host, 0).__enter__()


def test_no_host_is_all_addresses() -> None:
    with bound_sockets("", 0) as sockets:
        assert "0.0.0.0" in [bound.getsockname()[0] for bound in sockets]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_port_that_was_taken_meanwhile_is_told(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def serve(sockets: list[socket.socket]) -> None:
        await ObservedServer(Story(), drain_seconds=0).serve(sockets)

    with (
        bound_sockets("127.0.0.1", 0) as sockets,
        bound_sockets(*sockets[0].getsockname()) as (other,),
        asyncio.Runner(loop_factory=new_loop) as runner,
    ):
        other.listen()

        with pytest.raises(ListenError, match="address already in use"):
            runner.run(serve(sockets))


# --- Pings ---------------------------------------------------------------------------------------


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    try:
        while True:
            await websocket.send_text(await websocket.receive_text())
    except WebSocketDisconnect:
        pass


async def test_an_idle_socket_is_pinged_and_no_pong_is_insisted_on() -> None:
    app = Starlette(routes=[WebSocketRoute("/", echo)])
    async with listening(app, Settings(ping_interval_seconds=0.01)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            writer.write(f"GET / HTTP/1.1\r\nHost: a\r\n{Door.UPGRADE.value}\r\n".encode())
            async with asyncio.timeout(DEADLINE_SECONDS):
                await reader.readuntil(b"\r\n\r\n")
                pings = [await reader.readexactly(6) for _ in range(5)]
                writer.write(b"\x81\x82\x00\x00\x00\x00hi")
                while (frame := await reader.readexactly(2)) == b"\x89\x04":
                    await reader.readexactly(4)
                text = await reader.readexactly(2)

    assert all(ping.startswith(b"\x89\x04") for ping in pings)
    assert len(set(pings)) > 1  # each has a payload of its own
    assert (frame, text) == (b"\x81\x02", b"hi")


async def test_no_compression_is_agreed_on() -> None:
    app = Starlette(routes=[WebSocketRoute("/", echo)])
    async with listening(app) as port, connect(f"ws://127.0.0.1:{port}/") as client:
        assert client.response is not None
        assert "sec-websocket-extensions" not in client.response.headers


# --- The end -------------------------------------------------------------------------------------


class ObservedDraining(Draining):
    """Tells when it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = asyncio.Event()

    async def drain(self, timeout_seconds: float) -> None:
        self.has_begun.set()
        await super().drain(timeout_seconds)


class Story:
    """An application that tells a story without end, over HTTP, until it is told to finish."""

    def __init__(self) -> None:
        self.draining = ObservedDraining()
        self._end = asyncio.Event()
        self._last_words = b""
        self.app = Starlette(routes=[Route("/", self._tell), WebSocketRoute("/", echo)])

    def finish(self, last_words: bytes = b"The end.") -> None:
        self._last_words = last_words
        self._end.set()

    async def _tell(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self._words())

    async def _words(self) -> AsyncIterator[bytes]:
        with self.draining.track(lambda: self.finish(b"Aborted.")):
            yield b"Once. "
            await self._end.wait()
            yield self._last_words


class ObservedServer(Server):
    """Tells when it listens."""

    def __init__(self, story: Story, drain_seconds: float) -> None:
        config = server_config(story.app, Settings(), port=0)
        super().__init__(config, story.draining, drain_seconds)
        self.is_listening = asyncio.Event()

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()


@asynccontextmanager
async def told_to_end(
    story: Story, drain_seconds: float
) -> AsyncIterator[tuple[ClientConnection, asyncio.StreamReader]]:
    """Serve ``story`` to a listener and have an idle socket; tell the server to end, and give both
    ends once it takes no more connections. On the way out the server has ended."""
    server = ObservedServer(story, drain_seconds)
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        await server.is_listening.wait()
        port = server.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await reader.readuntil(b"Once. \r\n")
            async with connect(f"ws://127.0.0.1:{port}/") as idle:
                server.should_exit = True  # as the first signal does
                await story.draining.has_begun.wait()
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", port)
                yield idle, reader


@pytest.mark.slow
async def test_work_ends_by_itself_and_then_idle_sockets_are_closed() -> None:
    story = Story()
    async with told_to_end(story, drain_seconds=1000) as (idle, reader):
        await idle.send("still there?")
        assert await idle.recv() == "still there?"
        story.finish()
        told = await reader.read()
        with pytest.raises(ConnectionClosed) as closed:
            await idle.recv()

    assert told.endswith(b"The end.\r\n0\r\n\r\n")
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == CloseCode.SERVICE_RESTART


@pytest.mark.slow
async def test_work_that_takes_too_long_is_aborted_and_says_goodbye() -> None:
    story = Story()
    async with told_to_end(story, drain_seconds=0.0) as (_, reader):
        told = await reader.read()

    assert told.endswith(b"Aborted.\r\n0\r\n\r\n")


async def test_a_socket_whose_client_is_about_to_close_can_be_shut_down() -> None:
    is_closing = asyncio.Event()

    async def send_much(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("a" * 20_000_000)  # more than all buffers between us hold
        await websocket.receive()
        is_closing.set()

    app = Starlette(routes=[WebSocketRoute("/", send_much)])
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(listening(app))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            writer.write(f"GET / HTTP/1.1\r\nHost: a\r\n{Door.UPGRADE.value}\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"\x88\x80\x00\x00\x00\x00")
            await is_closing.wait()

            await stack.aclose()  # shuts down all connections
