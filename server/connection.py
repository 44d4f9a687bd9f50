"""One WebSocket: takes frames, says which lane they are for, and sends what the lanes say.

A slow client slows its own runs: a sampling loop goes on when an event is sent. One that reads
nothing for too long is taken for gone.
"""

import asyncio
import logging
import time
from contextlib import suppress
from itertools import count
from traceback import clear_frames
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from protocol import errors
from protocol.client_events import parse_steer, parse_stream_id
from protocol.codec import decode_client_event, encode
from protocol.dialect import Dialect
from protocol.errors import ErrorEvent, ProtocolError
from protocol.server_events import ServerEvent, inject_failed, steer_failed
from protocol.validation import JsonObject
from sampler.engine import EngineError
from sampler.snapshot import Snapshot
from server.lane import Append, Create, Inject, Lane, Message, Steer, Steering
from server.past_response import PastResponse
from server.reading import read_inject
from server.services import Services
from server.work import Stage, Work

logger = logging.getLogger(__name__)

NORMAL_CLOSURE, ABNORMAL_CLOSURE, POLICY_VIOLATION, INTERNAL_ERROR = 1000, 1006, 1008, 1011
"""Close codes (RFC 6455, 7.4.1; IANA registry)."""

_MAX_REASON_BYTES = 123  # RFC 6455, 5.5.1: a control frame holds 125
_TIDY_SECONDS = 5.0


class ConnectionEndedError(Exception):
    """The connection is to end: nothing more can be said on it."""


class Connection:
    """Serves one client until it goes away."""

    def __init__(
        self,
        websocket: WebSocket,
        services: Services,
        dialect: Dialect,
        key_id: str,
        admission: Work,
        *,
        keeps_open: bool,
    ) -> None:
        """Serve ``websocket``.

        Args:
            websocket: not accepted yet.
            services: what all connections share.
            dialect: as negotiated.
            key_id: whose it is.
            admission: what it took to let it in.
            keeps_open: whether an append that has nowhere to go gets an error. If not, the
                connection is closed, which is what old Codex releases recover from.
        """
        self.dialect = dialect
        self.services = services
        self.memory = services.connection_memory(key_id)
        self.memory.on_forget = self._forgotten
        self.in_flight = asyncio.Semaphore(services.settings.max_in_flight)
        self.steerings: dict[str, list[Steering]] = {}
        self.untold = [admission]
        self._websocket = websocket
        self._keeps_open = keeps_open
        self._tasks = asyncio.TaskGroup()
        self._lanes: dict[str | None, Lane] = {}
        self._warm_ups: dict[str, asyncio.Task[None]] = {}
        self._numbers = count()
        self._num_sending = 0
        self._unread_since = 0.0
        """Since when the client has read nothing of what is being sent, in monotonic seconds."""

    async def serve(self) -> None:
        """Accept the connection and serve it. On return nothing of it is held any more."""
        await self._websocket.accept()
        try:
            await self._serve()
        except* (WebSocketDisconnect, ConnectionEndedError):
            pass  # it went away, perhaps while something was being sent
        except* Exception:
            logger.exception("a connection failed")
            await self._close(INTERNAL_ERROR)
        finally:
            self.memory.forget_all()

    async def _serve(self) -> None:
        try:
            async with self._tasks:
                self._tasks.create_task(self._expire())
                self._tasks.create_task(self._tidy())
                self._tasks.create_task(self._watch())
                await self._read()
                raise ConnectionEndedError
        except BaseExceptionGroup as group:
            # Up to Python 3.12 the frame that raises a group refers to it (CPython, TaskGroup). In
            # such a cycle all would live on that the tracebacks hold, whole caches among it.
            clear_frames(group.__traceback__)
            raise

    # --- Reading ----------------------------------------------------------------------------------

    async def _read(self) -> None:
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            try:
                await self._take_frame(self._text_of(message))
            except ProtocolError as error:
                await self.refuse(error, None)

    def _text_of(self, message: Any) -> str:
        if (text := message.get("text")) is None:
            raise errors.binary_frame()
        limit = self.services.settings.max_frame_bytes
        # Each character is one to four bytes, so most frames need not be encoded to be measured.
        if len(text) > limit or (4 * len(text) > limit and len(text.encode()) > limit):
            raise errors.payload_too_large(limit)
        return str(text)

    async def _take_frame(self, text: str) -> None:
        work = self.services.new_work()
        with work.stage(Stage.PARSE, runs=0, items=0):
            event = decode_client_event(text)
        match event:
            case "response.create", frame:
                await self._hand_over(Create(frame, work), parse_stream_id(frame))
            case "response.append", frame:
                await self._hand_over(Append(frame, work), parse_stream_id(frame))
            case "response.inject", frame:
                await self._take_inject(frame, work)
            case "response.steer", frame:
                await self._take_steer(frame, work)
            case "response.processed", _:
                pass  # an acknowledgement that some clients sent in 2026
            case event_type, frame:
                error = errors.unsupported_event_type(event_type)
                await self.refuse(error, parse_stream_id(frame))

    async def _take_inject(self, frame: JsonObject, work: Work) -> None:
        try:
            params = read_inject(frame, work)
        except ProtocolError as error:
            # Unlike a create, a malformed inject ends the connection (WebSocket events reference).
            await self.refuse(error, None)
            await self._close(POLICY_VIOLATION)
            raise ConnectionEndedError from error
        if (lane := self._lane_of(params.response_id)) is not None:
            lane.put(Inject(params, work))
            return
        unknown = errors.response_not_found(params.response_id)
        await self.send(
            inject_failed(unknown, params.raw_input, params.response_id, self.next_number()), None
        )

    async def _take_steer(self, frame: JsonObject, work: Work) -> None:
        target = _string(frame.get("previous_response_id")) or ""
        if (lane := self._lane_of(target)) is not None:
            lane.put(Steer(target, frame, work))
            return
        try:
            parse_steer(frame)
            error = errors.response_not_found(target)
        except ProtocolError as invalid:
            error = invalid
        await self.send(steer_failed(error, frame.get("input"), target, self.next_number()), None)

    def _lane_of(self, response_id: str) -> Lane | None:
        return next((lane for lane in self._lanes.values() if lane.knows(response_id)), None)

    async def _hand_over(self, message: Message, name: str | None) -> None:
        try:
            self._lane(name).put(message)
        except ProtocolError as error:
            await self.refuse(error, name)

    def _lane(self, name: str | None) -> Lane:
        """Return a lane, which begins when it is first named."""
        if name not in self._lanes:
            limit = self.services.settings.max_lanes
            if name is not None and len(self._lanes.keys() - {None}) >= limit:
                raise errors.websocket_stream_limit_reached(limit)
            self._lanes[name] = Lane(name, self)
            self._tasks.create_task(self._lanes[name].serve())
        return self._lanes[name]

    # --- Speaking ---------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return the sequence number of an event that belongs to no response."""
        return next(self._numbers)

    async def send(self, event: ServerEvent | ErrorEvent, lane: str | None) -> None:
        """Send an event of a lane; those of the default lane name none."""
        if lane is not None:
            event = msgspec.structs.replace(event, stream_id=lane)
        if not self._num_sending:
            self._unread_since = time.monotonic()
        self._num_sending += 1
        try:
            await self._websocket.send_text(encode(event).decode())
        except RuntimeError as error:
            # The server refused a frame of the client and closed, before we were told.
            raise WebSocketDisconnect(ABNORMAL_CLOSURE) from error
        finally:
            self._num_sending -= 1
            self._unread_since = time.monotonic()

    async def refuse(self, error: ProtocolError, lane: str | None) -> None:
        """Send an error of a lane."""
        await self.send(errors.error_event(error, self.next_number()), lane)

    async def refuse_append(self, error: ProtocolError, lane: str | None) -> None:
        """Let the client know that what it appended to is not there, or does not take it.

        Codex up to 0.98 ignores error frames and waits for minutes, and up to 0.107 a 400 ends its
        turn; all of them send everything again when the connection is closed.
        """
        if self._keeps_open:
            await self.refuse(error, lane)
            return
        await self._close(INTERNAL_ERROR, ": ".join(filter(None, (error.code, error.message))))
        raise ConnectionEndedError

    async def lose(self, reason: str) -> None:
        """Let the client know that its suspended response is gone: after ``response.done`` there is
        no event that could say so."""
        if self.dialect is Dialect.APPEND:
            await self._close(INTERNAL_ERROR, reason)
            raise ConnectionEndedError

    async def _close(self, code: int, reason: str = "") -> None:
        cut = reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
        with suppress(RuntimeError, WebSocketDisconnect):  # closed already
            async with asyncio.timeout(self.services.settings.send_timeout_seconds):
                await self._websocket.close(code, cut)

    # --- Time -------------------------------------------------------------------------------------

    async def _expire(self) -> None:
        """End the connection when it has lived long enough, between two responses if it can."""
        lifetime = self.services.settings.connection_lifetime_seconds
        await asyncio.sleep(lifetime)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.services.settings.drain_seconds):
                for _ in range(self.services.settings.max_in_flight):
                    await self.in_flight.acquire()  # with all of them nobody samples
        await self.refuse(errors.websocket_connection_limit_reached(lifetime / 60), None)
        await self._close(NORMAL_CLOSURE)
        raise ConnectionEndedError

    async def _watch(self) -> None:
        """End the connection when its client has read nothing for too long.

        A timer for each frame would cost more than to make the frame.
        """
        limit = self.services.settings.send_timeout_seconds
        while True:
            waited = time.monotonic() - self._unread_since if self._num_sending else 0.0
            if waited >= limit:
                logger.info("a client reads nothing any more; its connection ends")
                raise ConnectionEndedError
            await asyncio.sleep(limit - waited)

    async def _tidy(self) -> None:
        """Let go of caches that nobody came back for."""
        ttl = self.services.settings.suspend_ttl_seconds
        while True:
            await asyncio.sleep(min(ttl, _TIDY_SECONDS))
            self.memory.release_caches(time.monotonic() - ttl)

    def warm_up(self, response_id: str, snapshot: Snapshot) -> None:
        """Fill a cache while nobody else wants the model."""
        self._warm_ups[response_id] = self._tasks.create_task(self._fill(snapshot))

    async def _fill(self, snapshot: Snapshot) -> None:
        with suppress(EngineError):  # whoever follows prefills it again
            await self.services.engine.warm_up(snapshot, self.memory.sources)

    def stop_warming_up(self, response_id: str) -> None:
        """Leave a cache as far as it was filled."""
        if (task := self._warm_ups.pop(response_id, None)) is not None:
            task.cancel()

    def _forgotten(self, past: PastResponse) -> None:
        self.stop_warming_up(past.id)
        self.steerings.pop(past.id, None)


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None
