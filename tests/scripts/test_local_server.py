"""The server process is started, waited for and always stopped; connections fail with one line."""

import asyncio
import os
import signal
import sys
from hashlib import sha256

import pytest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from scripts.local_server import ServerError, connection, running_server, server_command, socket_url
from server.access import Access, ApiKeys
from server.settings import Settings
from tests.server.sockets import listening


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


LISTENING = (
    "import os, time; print('hello'); print(f'listening on http://pid:{os.getpid()}', flush=True);"
)


def pid_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_server_is_started_on_a_free_port() -> None:
    command = server_command(["--model", "m"])

    assert command[1:] == [
        "-P",
        "-m",
        "server",
        "--port",
        "0",
        "--log-level",
        "warning",
        "--no-store",
        "--model",
        "m",
    ]


@pytest.mark.slow
async def test_the_url_is_what_the_server_says_and_it_is_stopped_in_the_end() -> None:
    async with running_server(script(f"{LISTENING} time.sleep(60)")) as url:
        assert url.startswith("http://pid:")
        assert is_running(pid_of(url))

    assert not is_running(pid_of(url))


@pytest.mark.slow
async def test_a_server_that_does_not_listen_is_an_error() -> None:
    with pytest.raises(ServerError, match=r"did not start.*status 3"):
        async with running_server(script("print('no'); raise SystemExit(3)")):
            pytest.fail("there is no server")


@pytest.mark.slow
async def test_a_server_that_went_down_by_itself_needs_no_stopping() -> None:
    async with running_server(script(LISTENING)) as url:
        os.kill(pid_of(url), signal.SIGKILL)

    assert not is_running(pid_of(url))


@pytest.mark.slow
async def test_a_cancelled_client_stops_its_server() -> None:
    urls: list[str] = []
    is_up = asyncio.Event()

    async def client() -> None:
        async with running_server(script(f"{LISTENING} time.sleep(60)")) as url:
            urls.append(url)
            is_up.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(client())
        await is_up.wait()
        task.cancel()

    assert not is_running(pid_of(urls[0]))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/v1/responses?dialect=append"),
        ("http://[::1]:8000/", "ws://[::1]:8000/v1/responses?dialect=append"),
        ("https://host/base/v1", "wss://host/base/v1/responses?dialect=append"),
        ("ws://host/v1/responses", "ws://host/v1/responses?dialect=append"),
    ],
)
def test_the_socket_of_a_server_is_found_from_its_url(url: str, expected: str) -> None:
    assert socket_url(url) == expected


@pytest.mark.parametrize("url", ["", "8000", "127.0.0.1:8000", "ftp://x", "http://", "http://[::1"])
def test_what_is_no_url_is_an_error(url: str) -> None:
    with pytest.raises(ServerError, match="expected a URL like"):
        socket_url(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://127.0.0.1:x", "http://127.0.0.1:99999"]
)
async def test_a_server_that_cannot_be_reached_is_an_error_of_one_line(url: str) -> None:
    with pytest.raises(ServerError) as raised:
        async with connection(url):
            pytest.fail("there is no server")

    assert str(raised.value).startswith(("cannot connect to http", "expected a URL"))
    assert "\n" not in str(raised.value)


async def test_a_server_with_keys_lets_in_who_has_one() -> None:
    keys = ApiKeys([("alice", sha256(b"sk-right").hexdigest())])
    app = Access(Starlette(routes=[WebSocketRoute("/v1/responses", _accept)]), keys, Settings())

    async with listening(app) as port:
        url = f"http://127.0.0.1:{port}"
        async with connection(url, "sk-right"):
            pass
        with pytest.raises(ServerError, match="wants an API key: --api-key, or OPENAI_API_KEY"):
            async with connection(url):
                pytest.fail("it was let in")
        with pytest.raises(ServerError, match="does not know the API key"):
            async with connection(url, "sk-wrong"):
                pytest.fail("it was let in")


async def _accept(websocket: WebSocket) -> None:
    await websocket.accept()


async def _answer_404(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


async def test_another_kind_of_server_is_an_error() -> None:
    server = await asyncio.start_server(_answer_404, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async with server:
        with pytest.raises(ServerError, match="answered 404"):
            async with connection(f"http://127.0.0.1:{port}"):
                pytest.fail("it speaks no WebSocket")
