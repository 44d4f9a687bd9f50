"""Runs that outlive the request that asked for them.

A background response is sampled by a task of the server's own. What is said of it is noted in
memory, and whoever asks is told from there: a slow follower holds up nobody, and one that goes away
ends nothing.

The tasks are in a group, and a task group has to be left by the task that entered it. A request
cannot be that task, and a server without life-span events has no other, so the group lives in a
task of its own, which the first run starts.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import msgspec

from protocol.response import ResponseError, ResponseResource
from protocol.server_events import (
    LifecycleEvent,
    OutputItemDone,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    ServerEvent,
)
from server.response_store import STOPPED

logger = logging.getLogger(__name__)

TerminalEvent: TypeAlias = ResponseCompleted | ResponseIncomplete | ResponseFailed

MISTAKE = ResponseError("server_error", "the server made a mistake")


class LiveResponse:
    """A response that is being made, and what was said of it so far.

    Args:
        response: as it is before its first event.
        cancel: asks the run to end; called once at most.
    """

    def __init__(self, response: ResponseResource, cancel: Callable[[], None]) -> None:
        self._response = response
        self._cancel = cancel
        self._is_cancelled = False
        self._events: list[ServerEvent] = []
        self._news = asyncio.Event()  # of the next event alone: each has its own
        self._is_finished = False

    @property
    def response(self) -> ResponseResource:
        """The response as its latest lifecycle event shows it."""
        return self._response

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    async def follow(self) -> AsyncGenerator[ServerEvent, None]:
        """Give what was said so far, then what is being said, up to the terminal event."""
        position = 0
        while True:
            while position < len(self._events):
                yield self._events[position]
                position += 1
            if self._is_finished:
                return
            await self._news.wait()

    async def cancel(self) -> ResponseResource:
        """Ask the run to end, wait for its end, and return the response as it then is.

        On cancellation the run ends all the same.
        """
        if not self._is_finished and not self._is_cancelled:
            self._is_cancelled = True
            self._cancel()
        while not self._is_finished:
            await self._news.wait()
        return self._response

    def publish(self, event: ServerEvent) -> None:
        """Say ``event`` to all followers; after a terminal one there is nothing to say."""
        assert not self._is_finished
        if isinstance(event, LifecycleEvent):
            self._response = event.response
        self._events.append(event)
        self._is_finished = isinstance(event, TerminalEvent)
        self._news.set()
        self._news = asyncio.Event()

    def failure(self, error: ResponseError) -> ResponseFailed:
        """Return the event that ends the response here and now, with the items it has."""
        items = (event.item for event in self._events if isinstance(event, OutputItemDone))
        response = msgspec.structs.replace(
            self._response, status="failed", error=error, output=tuple(items)
        )
        return ResponseFailed(sequence_number=len(self._events), response=response)


class BackgroundRuns:
    """The background responses of one server. Leave it to end them all.

    Args:
        linger_seconds: for how long a finished response is still had from here. One whose run
            broke is had for good: no store has its end.
    """

    def __init__(self, linger_seconds: float = 60.0) -> None:
        self._linger_seconds = linger_seconds
        self._live: dict[tuple[str, str], LiveResponse] = {}
        self._to_begin: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        self._host: asyncio.Task[None] | None = None
        self._is_closed = False

    async def __aenter__(self) -> "BackgroundRuns":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def get(self, key: str, response_id: str) -> LiveResponse | None:
        """Return the response of that key, if it is being made or was just now."""
        return self._live.get((key, response_id))

    def start(
        self,
        key: str,
        response: ResponseResource,
        events: AsyncGenerator[ServerEvent, None],
        cancel: Callable[[], None],
    ) -> LiveResponse:
        """Begin a run and return its response, which ends on every path.

        Args:
            key: the id of the API key that the response belongs to.
            response: as it is before its first event.
            events: of the response, the terminal one last. It is always begun, and then exhausted
                or closed. If it raises, or gives no terminal event, the response fails. The
                terminal event is published when all is done: who learns of it finds the response
                stored, if ``events`` sees to that.
            cancel: asks the run to end, so that ``events`` comes to its end. Called once at most,
                maybe before the first event was asked for.
        """
        if self._is_closed:
            raise RuntimeError("the background runs are closed")
        live = LiveResponse(response, cancel)
        self._live[key, response.id] = live
        self._to_begin.put_nowait(partial(self._play, key, live, events))
        if self._host is None:
            # The one task that no group owns: it is what the group is in, and close() ends it.
            self._host = asyncio.create_task(self._host_runs(), name="background runs")
        return live

    def forget(self, key: str, response_id: str) -> None:
        """Drop a response; who follows it is told to the end."""
        self._live.pop((key, response_id), None)

    async def close(self) -> None:
        """End all runs and wait until they have ended; their responses fail."""
        self._is_closed = True
        # What has not begun cannot be closed, and would hold for ever what it was made with.
        await self._to_begin.join()
        if self._host is not None:
            self._host.cancel()
            await asyncio.wait([self._host])
        self._live.clear()

    async def _host_runs(self) -> None:
        async with asyncio.TaskGroup() as runs:
            while True:
                # In no variable: it would hold the run and its memory until the next one begins.
                runs.create_task((await self._to_begin.get())())

    async def _play(
        self, key: str, live: LiveResponse, events: AsyncGenerator[ServerEvent, None]
    ) -> None:
        self._to_begin.task_done()
        terminal: TerminalEvent | None = None
        error = STOPPED  # if it is cancelled: from here, or from within when the engine is closed
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, TerminalEvent):
                        terminal = event
                    else:
                        live.publish(event)
            error = MISTAKE  # if there was no terminal event
        except Exception:
            logger.exception("background response %s: the run failed", live.response.id)
            error = MISTAKE
        finally:
            live.publish(live.failure(error) if terminal is None else terminal)
            if terminal is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(self._linger_seconds, self.forget, key, live.response.id)
