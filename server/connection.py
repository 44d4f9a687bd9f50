"""One WebSocket.

Two tasks: the reader takes frames, checks them and answers mistakes; the speaker samples one run
after the other and sends its events. They meet in the lane's state, in the queue of prepared runs,
and in the future on which a suspended run's sampling loop waits. The reader never touches a run
that is being sampled.

A slow client slows its own run: the sampling loop goes on when an event is sent.
"""

import asyncio
import logging
import time
from contextlib import aclosing, suppress
from itertools import count
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from protocol import errors
from protocol.client_events import parse_append, resolve_append
from protocol.codec import decode_client_event, encode
from protocol.dialect import Dialect
from protocol.errors import ProtocolError
from protocol.lane import Lane, LaneEvent, LaneState
from protocol.tools import ToolChoice
from sampler.engine import Resumption
from sampler.run import RunEvent
from sampler.suspension import Suspension
from server.pre_inference import PreparedRun, constraint_after_calls, refused
from server.services import Services

logger = logging.getLogger(__name__)

ABNORMAL_CLOSURE, INTERNAL_ERROR = 1006, 1011
"""Close codes (RFC 6455, 7.4.1)."""


class Connection:
    """Serves one client until it goes away."""

    def __init__(self, websocket: WebSocket, services: Services, dialect: Dialect) -> None:
        self._websocket = websocket
        self._services = services
        self._dialect = dialect
        self._lane = Lane()
        self._queue: asyncio.Queue[PreparedRun] = asyncio.Queue(
            services.settings.max_queued_creates
        )
        self._speaking_for: PreparedRun | None = None
        self._resumption: asyncio.Future[Resumption | None] | None = None
        self._sampled_call_ids: set[str] = set()
        self._next_choice: ToolChoice | None = None
        self._error_numbers = count()

    async def serve(self) -> None:
        """Accept the connection and serve it. On return nothing of it is held any more."""
        await self._websocket.accept()
        try:
            async with asyncio.TaskGroup() as tasks:
                speaker = tasks.create_task(self._speak())
                await self._read()
                speaker.cancel()
        except* WebSocketDisconnect:
            pass  # it went away while something was being sent
        except* Exception:
            logger.exception("a connection failed")
            await self._close_after_failure()
        finally:
            self._drop_queued()

    def _drop_queued(self) -> None:
        while not self._queue.empty():
            run = self._queue.get_nowait().run
            run.apply(RunEvent.CANCEL)
            self._services.post_inference.finish(run)

    async def _close_after_failure(self) -> None:
        with suppress(RuntimeError, WebSocketDisconnect):  # closed already
            await self._websocket.close(INTERNAL_ERROR)

    async def _read(self) -> None:
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            try:
                await self._take_frame(self._text_of(message))
            except ProtocolError as error:
                await self._send(errors.error_event(error, next(self._error_numbers)))

    def _text_of(self, message: Any) -> str:
        if (text := message.get("text")) is None:
            raise errors.binary_frame()
        limit = self._services.settings.max_frame_bytes
        # Each character is one to four bytes, so most frames need not be encoded to be measured.
        if len(text) > limit or (4 * len(text) > limit and len(text.encode()) > limit):
            raise errors.payload_too_large(limit)
        return str(text)

    async def _take_frame(self, text: str) -> None:
        received_at = time.monotonic()
        match decode_client_event(text):
            case "response.create", frame:
                await self._create(frame)
            case "response.append", frame:
                await self._append(frame, received_at)
            case "response.processed", _:
                pass  # an acknowledgement that some clients sent in 2026
            case event_type, _:
                raise errors.unsupported_event_type(event_type)

    async def _create(self, frame: dict[str, Any]) -> None:
        """Prepare a run and have it sampled after those before it.

        A create that is in order abandons a run that is suspended here, or will be before its turn.
        """
        if self._queue.full():
            raise errors.too_many_queued(self._queue.maxsize)
        prepared = await self._services.pre_inference.prepare(frame, "websocket")
        if self._lane.state is LaneState.SUSPENDED:
            self._resume(LaneEvent.ABANDON, None)
        self._queue.put_nowait(prepared)

    async def _append(self, frame: dict[str, Any], received_at: float) -> None:
        """Give a suspended run the outputs it waits for; an error changes nothing."""
        prepared, suspension = self._suspended()
        append = parse_append(frame, prepared.params.tools)
        added = resolve_append(
            append.input, suspension.awaited, suspension.outputs, self._sampled_call_ids
        )
        if not added.outputs and not added.messages:
            raise errors.invalid_value("input", "expected outputs of the calls, or messages")
        suspension = suspension.answer(added.outputs, added.messages)
        # Encoded even if more outputs are to come: what is held must leave room for them.
        complete = suspension.answer(dict.fromkeys(suspension.awaited, ""))
        with refused("input"):
            suffix_ids = await self._services.engine.encode_suffix(prepared.run, complete)
        self._next_choice = append.tool_choice or self._next_choice
        if suspension.awaited:
            self._lane.apply(LaneEvent.HOLD)
            prepared.run.suspension = suspension
            return
        constraint = constraint_after_calls(prepared.params, self._next_choice)
        self._resume(LaneEvent.APPEND, Resumption(suffix_ids, received_at, constraint))

    def _suspended(self) -> tuple[PreparedRun, Suspension]:
        match self._lane.state:
            case LaneState.IDLE:
                raise errors.no_suspended_run()
            case LaneState.SAMPLING:
                raise errors.response_in_progress()
            case LaneState.SUSPENDED:
                assert self._speaking_for is not None
                assert self._speaking_for.run.suspension is not None
                return self._speaking_for, self._speaking_for.run.suspension

    def _resume(self, event: LaneEvent, resumption: Resumption | None) -> None:
        assert self._resumption is not None, "a suspended run waits for something"
        self._lane.apply(event)
        self._resumption.set_result(resumption)

    async def _speak(self) -> None:
        while True:
            self._speaking_for = await self._queue.get()
            self._lane.apply(LaneEvent.CREATE)
            self._sampled_call_ids = set()
            responder = self._services.responder(self._speaking_for, self._dialect)
            async with aclosing(responder.events(self._call_tools)) as events:
                async for event in events:
                    await self._send(event)
            if self._lane.state is LaneState.SAMPLING:
                self._lane.apply(LaneEvent.FINISH)

    def _call_tools(self, suspension: Suspension) -> "asyncio.Future[Resumption | None]":
        """Have the client make the calls: what it appends is what the run waits for."""
        self._sampled_call_ids.update(call.call_id for call in suspension.calls)
        self._resumption = asyncio.get_running_loop().create_future()
        self._next_choice = None
        self._lane.apply(LaneEvent.SUSPEND)
        if not self._queue.empty():
            # A create that came during sampling abandons the run as well: it waits for its turn,
            # and its client for the answer.
            self._resume(LaneEvent.ABANDON, None)
        return self._resumption

    async def _send(self, event: Any) -> None:
        try:
            await self._websocket.send_text(encode(event).decode())
        except RuntimeError as error:
            # The server refused a frame of the client and closed, before we were told.
            raise WebSocketDisconnect(ABNORMAL_CLOSURE) from error
