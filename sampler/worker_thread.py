"""One thread that does one kind of blocking work, in the order asked.

``loop.run_in_executor`` returns at once when the caller is cancelled, and leaves the work writing
behind its back. Here a cancelled caller waits for work that has begun, so what the work touches is
whole when the caller moves on; work that has not begun is dropped.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

from sampler.cancellation import ended

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """A named thread that asyncio code hands functions to."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._num_running = 0  # and waiting; of those that somebody awaits

    @property
    def is_idle(self) -> bool:
        """Whether nothing that ``run`` was given is still to be done. To the event loop this stays
        so for as long as it hands nothing over: what is short, it may do itself meanwhile."""
        return self._num_running == 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what ``function`` returns, or raise what it raises.

        Once it has returned, nothing here holds on to what the function was given.

        On cancellation: if the function has begun, it is waited for, and its result is lost.
        """
        work = self._executor.submit(_call, [partial(function, *args, **kwargs)])
        result = asyncio.wrap_future(work)
        self._num_running += 1
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if not work.cancel():
                await _wait_through_cancellation(result)
            raise
        finally:
            self._num_running -= 1
            del work, result  # they hold the error, whose traceback holds this frame

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have ``function`` called in its turn, whether or not anybody waits for it."""
        return self._executor.submit(function, *args, **kwargs)

    def close(self, *, drops_work: bool = True) -> None:
        """Drop what has not begun or else do it, wait for what has, and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=drops_work)


def _call(work: list[partial[T]]) -> T:
    """Take the only function out of ``work`` and call it: the executor holds the list for longer
    than the caller waits."""
    return work.pop()()


async def _wait_through_cancellation(result: "asyncio.Future[T]") -> None:
    with suppress(asyncio.CancelledError):  # the first one is raised once the work is over
        await ended(result)
    if not result.cancelled():
        result.exception()  # looked at, so that asyncio does not report it as never retrieved
