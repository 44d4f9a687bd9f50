"""The life of the process: it says where it listens, and goes down in named phases."""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from sampler.engine import Engine, EngineError
from server.draining import Draining
from server.settings import Settings

logger = logging.getLogger("server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Of an address that a name has, and this machine has not: ::1 where there is no IPv6."""


class ListenError(RuntimeError):
    """The server cannot listen where it is to; the message says why."""


@contextmanager
def bound_sockets(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Give a socket for each address of ``host``, bound to ``port`` there; 0 is a free one.

    They do not listen yet: who connects before the server can serve is to be refused. They are
    closed on the way out.

    Raises:
        ListenError: ``host`` has no address here, or the port is taken.
    """
    with ExitStack() as opened:
        try:
            sockets = _bound_sockets(host, port, opened)
        except (OSError, UnicodeError) as error:
            raise _listen_error(host, port, error) from error
        yield sockets


def _bound_sockets(host: str, port: int, opened: ExitStack) -> list[socket.socket]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets, failure = list[socket.socket](), OSError("it has no address")
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            bound = _bound_socket(family, kind, protocol, (address[0], port, *address[2:]))
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            failure = error
        else:
            sockets.append(opened.enter_context(bound))
            port = bound.getsockname()[1]  # where it was 0, the same for all
    if not sockets:
        raise failure
    return sockets


def _bound_socket(
    family: int, kind: int, protocol: int, address: tuple[str | int, ...]
) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it lets two processes have one port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _listen_error(host: str, port: int, error: OSError | UnicodeError) -> ListenError:
    is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    hint = "; --port takes another, 0 a free one" if is_taken else ""
    reason = ((error.strerror if isinstance(error, OSError) else "") or str(error)).lower()
    return ListenError(f"cannot listen on {host}, port {port}: {reason}{hint}")


def server_config(app: ASGIApp, settings: Settings, port: int) -> uvicorn.Config:
    """Return how uvicorn is to serve ``app``."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=port,
        log_config=None,
        access_log=False,
        ws=WebSocketProtocol,
        # Frames are measured by the application, which answers with an error; this one only bounds
        # memory, since going over it closes the socket.
        ws_max_size=2 * settings.max_frame_bytes,
        # Deltas are too short to be worth it, and each socket would hold two more windows.
        ws_per_message_deflate=False,
        # Idle sockets are pinged, or what lies between would forget them. Some clients answer no
        # pings while they run a tool, so no pong is waited for.
        ws_ping_interval=settings.ping_interval_seconds,
        ws_ping_timeout=None,
        timeout_graceful_shutdown=5,
    )


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol, which can be shut down while its client closes."""

    def shutdown(self) -> None:
        """Close; where a close frame has come already, none can be sent."""
        with suppress(InvalidState):
            super().shutdown()
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn, with our word when it can serve and a quiet end on SIGINT and SIGTERM."""

    def __init__(
        self,
        config: uvicorn.Config,
        draining: Draining,
        drain_seconds: float,
        engine: Engine | None = None,
    ) -> None:
        """Serve as ``config`` says.

        Args:
            config: what, and how.
            draining: what is still to end when the server is to.
            drain_seconds: how long that may take.
            engine: what has to be ready first.
        """
        super().__init__(config)
        self._engine = engine
        self._draining = draining
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See that there is something to serve, listen, then say where.

        Raises:
            ListenError: another process has begun to listen on the port of ``sockets``.
        """
        try:
            if self._engine is not None:
                await self._engine.start()
        except EngineError as error:
            logger.error("%s", error)
            self.should_exit = True
            return
        try:
            for bound in sockets or ():
                bound.listen(self.config.backlog)  # uvloop would not say that it failed
        except OSError as error:
            if self._engine is not None:
                await self._engine.stop()
            raise _listen_error(self.config.host, self.config.port, error) from error
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"listening on http://{shown}:{port}", flush=True)  # noqa: T201

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let what is being sampled end, close what is open, wait for it."""
        logger.info(
            "shutdown 1/4: closing the port; %d responses may go on for %g s",
            self._draining.num_in_progress,
            self._drain_seconds,
        )
        for server in self.servers:
            server.close()
        await self._draining.drain(self._drain_seconds)
        logger.info("shutdown 2/4: closing %d connections", len(self.server_state.connections))
        await super().shutdown()
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks)  # uvicorn cancelled them, and each ends its step in flight
        logger.info("shutdown 3/4: connections closed, their runs freed")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM as wishes to end well: uvicorn would raise them again at the
        end, and the process would die of them after all."""
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._end)
        yield

    def _end(self) -> None:
        self.should_exit = True
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # who asks twice does not want to wait
