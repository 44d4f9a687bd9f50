"""The sockets that checks are played over: actions in, what came of them out."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, assert_never

import httpx2
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from protocol.conformance.actions import (
    Action,
    Answer,
    Close,
    Closed,
    Connect,
    Frame,
    Manner,
    Opened,
    Outcome,
    Receive,
    Request,
    Send,
    Sent,
    Silence,
    Unreachable,
)
from protocol.conformance.server_sent_events import EventReader
from scripts.conformance.address import Address
from scripts.conformance.overlap import Overlap

ABNORMAL = 1006
"""What RFC 6455, 7.4.1, calls the end of a connection without a close frame."""
_BREAKS = (
    httpx2.RemoteProtocolError,
    httpx2.DecodingError,
    httpx2.ReadError,
    httpx2.ReadTimeout,
)
"""How a body ends before its end."""
_MOMENT_SECONDS = 0.3
_CLOSE_SECONDS = 2.0


class Http:
    """What HTTP requests to a server go through, over connections that are used again.

    A server may close one that is idle at any time (RFC 9112, 9.5), so also while a request is on
    its way; and what it has said beyond the end of an answer stands at the beginning of the next.
    So a request that has no answer, over a connection that was used before, is made once more, over
    a new one: what breaks there is no earlier request's fault.
    """

    def __init__(self, used: httpx2.AsyncClient, new: httpx2.AsyncClient) -> None:
        """Send through ``used``, which keeps its connections, and again through ``new``, which
        keeps none."""
        self._used = used
        self._new = new

    def build_request(self, method: str, url: str, body: bytes | None = None) -> httpx2.Request:
        """Return a request, to be sent with what the client sends in any case."""
        return self._used.build_request(method, url, content=body)

    async def send(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer to ``request``, whose body is still to be read; close it.

        Raises:
            httpx2.RequestError: there is none.
        """
        connecting = _Connecting()
        request.extensions["trace"] = connecting
        try:
            return await self._used.send(request, stream=True)
        except (httpx2.ReadError, httpx2.RemoteProtocolError):
            if connecting.was_needed:
                raise
        return await self._new.send(request, stream=True)


class _Connecting:
    """Is told what becomes of a request, and notes whether a connection was opened for it."""

    def __init__(self) -> None:
        self.was_needed = False

    async def __call__(self, event: str, _: Mapping[str, Any]) -> None:
        self.was_needed |= event.endswith(".connect_tcp.started")  # of a server, or of a proxy


def http_client(
    address: Address, patience_seconds: float, *, num_kept: int | None = 0
) -> httpx2.AsyncClient:
    """Return a client that keeps so many idle connections; None is any number. Close it."""
    return httpx2.AsyncClient(
        headers=list(address.headers),
        timeout=patience_seconds,
        trust_env=bool(address.proxy),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=num_kept),
    )


@asynccontextmanager
async def http_to(address: Address, patience_seconds: float) -> AsyncIterator[Http]:
    """Open what the HTTP requests of all checks go through."""
    async with (
        http_client(address, patience_seconds, num_kept=None) as used,
        http_client(address, patience_seconds) as new,
    ):
        yield Http(used, new)


class Wires:
    """The connections of one check. Close them."""

    def __init__(
        self,
        address: Address,
        http: Http,
        patience_seconds: float,
        overlap: Overlap,
    ) -> None:
        """Connect to ``address``.

        Args:
            address: of the server.
            http: for requests; it stays open.
            patience_seconds: how long to wait for anything.
            overlap: is told of what comes.
        """
        self._address = address
        self._http = http
        self._patience_seconds = patience_seconds
        self._overlap = overlap
        self._sockets: dict[str, ClientConnection] = {}

    async def perform(self, action: Action) -> Outcome:
        """Do it, and return what comes of it."""
        match action:
            case Connect():
                return await self._connect(action)
            case Send(socket, data):
                return await self._send(socket, data)
            case Receive(socket, is_patient):
                seconds = self._patience_seconds if is_patient else _MOMENT_SECONDS
                return await self._receive(socket, seconds)
            case Close(socket, manner):
                return await self._end(socket, manner)
            case Request():
                return await self._request(action)
            case _:
                assert_never(action)

    async def close(self) -> None:
        """End what is open."""
        for socket in self._sockets.values():
            await socket.close()

    async def _connect(self, asked: Connect) -> Outcome:
        url = f"{self._address.socket_url}{asked.path}{asked.query}"
        try:
            self._sockets[asked.socket] = await connect(
                url,
                additional_headers=_sent([*self._address.headers, *asked.headers]),
                open_timeout=self._patience_seconds,
                close_timeout=_CLOSE_SECONDS,
                max_size=None,
                proxy=self._address.proxy,
            )
        except InvalidStatus as refusal:
            response = refusal.response
            headers = {name.lower(): value for name, value in response.headers.raw_items()}
            return Answer(response.status_code, headers, bytes(response.body or b""))
        except (OSError, WebSocketException) as error:
            return Unreachable(_reason(error))
        return Opened()

    async def _send(self, socket: str, data: str | bytes) -> Outcome:
        try:
            await self._sockets[socket].send(data)
        except ConnectionClosed:
            pass  # a client learns of it as it reads
        else:
            self._overlap.sent((id(self), socket), data)
        return Sent()

    async def _receive(self, socket: str, seconds: float) -> Outcome:
        try:
            async with asyncio.timeout(seconds):
                data = await self._sockets[socket].recv()
        except TimeoutError:
            return Silence(seconds)
        except ConnectionClosed as closed:
            return _closed(closed)
        self._overlap.received((id(self), socket), data)
        return Frame(data)

    async def _end(self, socket: str, manner: Manner) -> Outcome:
        ending = self._sockets.pop(socket)
        if manner is Manner.DROPPED:
            ending.transport.abort()
            await ending.wait_closed()
        else:
            await ending.close()
        return Sent()

    async def _request(self, asked: Request) -> Outcome:
        url = f"{self._address.url}{asked.path}"
        request = self._http.build_request(asked.method, url, asked.body)
        request.headers = httpx2.Headers(_sent([*request.headers.items(), *asked.headers.items()]))
        if (asked.method, asked.path) == ("POST", "/responses"):
            self._overlap.asked(request)
        try:
            async with aclosing(await self._http.send(request)) as response:
                body = await self._body(response, asked.max_events)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
            return Unreachable(_reason(error))
        except httpx2.TimeoutException:
            return Silence(self._patience_seconds)
        except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
            return Closed(ABNORMAL, _reason(error))
        self._overlap.answered(request, body)
        return Answer(response.status_code, dict(response.headers), body)

    async def _body(self, response: httpx2.Response, max_events: int | None) -> bytes:
        """Return the body as far as it is read, or comes."""
        reader = EventReader()
        body, num_events = bytearray(), 0
        try:
            async for piece in response.aiter_bytes():
                body += piece
                for event in reader.feed(piece):
                    self._overlap.received(response.request, event.data)
                    num_events += 1
                if max_events and num_events >= max_events:
                    break
        except _BREAKS:
            pass  # what came has to speak for itself
        return bytes(body)


def _sent(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return ``headers`` as they are sent: of a name the last counts, and one that is empty is
    left out."""
    last = {name.lower(): value for name, value in headers}
    return [(name, value) for name, value in last.items() if value]


def _closed(closed: ConnectionClosed) -> Closed:
    """Return how it ended. What has us close is a server's frame that no client can read."""
    if closed.rcvd is not None:
        return Closed(closed.rcvd.code, closed.rcvd.reason)
    ours = closed.sent
    return Closed(ABNORMAL, "" if ours is None else f"we closed: {ours.code} {ours.reason}")


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
