"""Where the server comes from: a process of our own, or a URL; and the one connection to it."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

_READY = "listening on "
_STOP_SECONDS = 10
API_KEY_VARIABLE = "OPENAI_API_KEY"
"""Of the environment, where clients of the API look for their key."""


class ServerError(RuntimeError):
    """There is no server to talk to; the message says why."""


def server_command(options: Sequence[str]) -> list[str]:
    """Return the command that starts the server on a free port, and has it say no more."""
    quiet = ["--port", "0", "--log-level", "warning", "--no-store"]
    return [sys.executable, "-P", "-m", "server", *quiet, *options]


@asynccontextmanager
async def running_server(command: Sequence[str]) -> AsyncIterator[str]:
    """Run ``command`` and give the URL it listens on; stop it on every way out.

    Its standard error is ours, so its progress bar shows. It is in a process group of its own:
    Ctrl-C reaches us alone, and we stop it once the socket is closed.

    Raises:
        ServerError: it ended before it listened; it has said why on standard error.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    try:
        yield await _url(process)
    finally:
        await _stop(process)


async def _url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        text = line.decode(errors="replace").strip()
        if text.startswith(_READY):
            return text.removeprefix(_READY)
    status = await process.wait()
    raise ServerError(f"the server did not start (it ended with status {status})")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


@asynccontextmanager
async def given_server(url: str) -> AsyncIterator[str]:
    """Give the URL of a server that somebody else runs."""
    yield url


@asynccontextmanager
async def connection(url: str, api_key: str | None = None) -> AsyncIterator[Connection]:
    """Give a WebSocket to the server at ``url`` that speaks the append dialect.

    Args:
        url: of the server.
        api_key: by which it lets us in, if it wants one.

    Raises:
        ServerError: it cannot be opened, or it was closed while it was needed.
    """
    async with await _open(url, api_key) as socket:
        try:
            yield socket
        except ConnectionClosed as error:
            raise ServerError(f"the connection to {url} was lost: {error}") from error


async def _open(url: str, api_key: str | None) -> ClientConnection:
    target = socket_url(url)
    # What runs on this machine is not behind a proxy, whatever the environment says.
    proxy: Literal[True] | None = None if urlsplit(target).hostname in _LOOPBACK else True
    try:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        return await connect(target, proxy=proxy, max_size=None, additional_headers=headers)
    except InvalidStatus as error:
        raise ServerError(_refusal(url, error.response.status_code, api_key)) from error
    except (OSError, WebSocketException) as error:
        raise ServerError(f"cannot connect to {url}: {_reason(error)}") from error


def _refusal(url: str, status: int, api_key: str | None) -> str:
    if status != HTTPStatus.UNAUTHORIZED:
        return f"{url} answered {status}; is it a server of this project?"
    if api_key is None:
        return f"{url} wants an API key: --api-key, or {API_KEY_VARIABLE} in the environment"
    return f"{url} does not know the API key"


_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


def server_url(url: str) -> str:
    """Return where, by HTTP, the server itself is that a person means by ``url``.

    Raises:
        ServerError: ``url`` is not one.
    """
    parts = _split(url)
    if parts.scheme not in _SCHEMES or not parts.netloc:
        raise _no_url(url)
    path = parts.path.rstrip("/").removesuffix("/responses").removesuffix("/v1")
    return f"{_SCHEMES[parts.scheme]}://{parts.netloc}{path}"


def socket_url(url: str) -> str:
    """Return where the WebSocket of the server at ``url`` is.

    Raises:
        ServerError: ``url`` is not one.
    """
    return f"{server_url(url).replace('http', 'ws', 1)}/v1/responses?dialect=append"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # only now is it read
    except ValueError as error:
        raise _no_url(url) from error
    return parts


def _no_url(url: str) -> ServerError:
    return ServerError(f"expected a URL like http://127.0.0.1:8000, got {url!r}")


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return (str(error) or type(error).__name__).splitlines()[0]
