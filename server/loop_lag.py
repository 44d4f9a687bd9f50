"""How late the event loop is: what comes between a token and its client."""

import asyncio
from collections.abc import Callable

INTERVAL_SECONDS = 0.05


class LoopLag:
    """Looks from time to time by how much the loop is late, and tells it to ``observe``.

    A timer and no task, so it needs nobody to own it; ``close`` drops it.
    """

    def __init__(
        self, observe: Callable[[float], None], interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._observe = observe
        self._interval_seconds = interval_seconds
        self._loop = asyncio.get_running_loop()
        self._due_at = self._loop.time() + interval_seconds
        self._timer = self._loop.call_at(self._due_at, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        self._observe(now - self._due_at)
        self._due_at = now + self._interval_seconds
        self._timer = self._loop.call_at(self._due_at, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()
