"""How work ends when the process is to end: by itself if there is time, otherwise told to."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from protocol import errors

ABORT_SECONDS = 2.0
"""How long work that was told to end may take to say goodbye."""


class Draining:
    """Knows what is in progress, and sees it through to its end."""

    def __init__(self) -> None:
        self._is_draining = False
        self._aborts: dict[object, Callable[[], None]] = {}
        self._nothing_left = asyncio.Event()
        self._nothing_left.set()

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is to begin."""
        return self._is_draining

    @property
    def num_in_progress(self) -> int:
        return len(self._aborts)

    def check(self) -> None:
        """Refuse what is about to begin, if nothing new is to.

        Raises:
            ProtocolError: the server ends.
        """
        if self._is_draining:
            raise errors.shutting_down()

    @contextmanager
    def track(self, abort: Callable[[], None]) -> Iterator[None]:
        """Count the block as work in progress. ``abort`` is called if it takes too long, and is to
        make the block end soon; it does not wait."""
        work = object()
        self._aborts[work] = abort
        self._nothing_left.clear()
        try:
            yield
        finally:
            del self._aborts[work]
            if not self._aborts:
                self._nothing_left.set()

    async def drain(self, timeout_seconds: float) -> None:
        """Let nothing new begin, and return when nothing is in progress.

        What still is after ``timeout_seconds`` is aborted and waited for briefly, not for ever.
        """
        self._is_draining = True
        await self._wait(timeout_seconds)
        for abort in tuple(self._aborts.values()):
            abort()
        await self._wait(ABORT_SECONDS)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._nothing_left.wait()
