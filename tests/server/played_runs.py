"""Runs without a model, for what is done with a response besides sampling it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from protocol.codec import encode
from protocol.response import ResponseResource
from protocol.response_stream import ResponseStream
from protocol.server_events import ServerEvent
from server.response_store import ResponseStore, StoredResponse
from tests.protocol.streams import USAGE, counted_ids, new_response

DEADLINE_SECONDS = 10.0


class PlayedRun:
    """A run that says what a test has it say, and ends when it is asked to.

    With a store it is stored twice: when it is queued, and before its terminal event is given.
    """

    def __init__(
        self, response_id: str = "resp_1", *, store: ResponseStore | None = None, key: str = ""
    ) -> None:
        response = msgspec.structs.replace(new_response(), id=response_id, background=True)
        self.stream = ResponseStream(response, counted_ids())
        self.said: list[ServerEvent] = []
        """All events that were given so far."""
        self.num_cancels = 0
        self.has_begun = False
        self.is_over = False
        self._store = store
        self._key = key
        self._orders: asyncio.Queue[Callable[[], Sequence[ServerEvent] | None]] = asyncio.Queue()

    @property
    def response(self) -> ResponseResource:
        return self.stream.response

    # --- What it is to do -------------------------------------------------------------------------

    def start(self) -> None:
        """Have it announce that its turn has come."""
        self._orders.put_nowait(self.stream.start)

    def say(self, *texts: str) -> None:
        """Have it write ``texts``."""
        for text in texts:
            self._orders.put_nowait(partial(self.stream.text_delta, text))

    def call(self, call_id: str, name: str) -> None:
        """Have it begin a call."""
        self._orders.put_nowait(partial(self.stream.call_started, call_id, name))

    def complete(self) -> None:
        """Have it come to its end."""
        self._orders.put_nowait(lambda: self.stream.complete(USAGE, None, 9))

    def fail(self, message: str) -> None:
        """Have it say that it failed."""
        self._orders.put_nowait(lambda: self.stream.fail("server_error", message))

    def break_off(self, error: BaseException) -> None:
        """Have it raise ``error``."""

        def raise_it() -> Sequence[ServerEvent]:
            raise error

        self._orders.put_nowait(raise_it)

    def stop_short(self) -> None:
        """Have it end without a word."""
        self._orders.put_nowait(lambda: None)

    def cancel(self) -> None:
        """Ask it to end, as its client does."""
        self.num_cancels += 1
        if not self.stream.is_finished:
            self._orders.put_nowait(self._cancelled)

    def _cancelled(self) -> Sequence[ServerEvent]:
        return () if self.stream.is_finished else self.stream.cancel(USAGE)

    # --- What it gives ----------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[ServerEvent, None]:
        """Give the events, the terminal one last."""
        self.has_begun = True
        try:
            for event in self.stream.queue():
                yield self._noted(event)
            await self._put()
            while not self.stream.is_finished:
                if (events := (await self._orders.get())()) is None:
                    return
                for event in events:
                    if event is events[-1] and self.stream.is_finished:
                        await self._put(event)
                    yield self._noted(event)
        finally:
            self.is_over = True

    def _noted(self, event: ServerEvent) -> ServerEvent:
        self.said.append(event)
        return event

    async def _put(self, *last: ServerEvent) -> None:
        if self._store is not None:
            await self._store.put(stored(self.response, [*self.said, *last], key=self._key))


def stored(
    response: ResponseResource, events: Sequence[ServerEvent] = (), key: str = "", **changes: Any
) -> StoredResponse:
    """Return ``response`` as it is stored."""
    members: dict[str, Any] = {
        "id": response.id,
        "key": key,
        "model": response.model,
        "created_at": response.created_at,
        "response": encode(response),
        "input_items": [message("msg_in_1", "What is the weather in Oslo?")],
        "conversation": b"\x00conversation",
        "events": [encode(event) for event in events],
        "item_ids": tuple(item.id for item in response.output),
    }
    return StoredResponse(**(members | changes))


def message(item_id: str, text: str) -> dict[str, Any]:
    """Return a user message as it stands on the wire."""
    return {
        "id": item_id,
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": text}],
    }
