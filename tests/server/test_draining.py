"""What is in progress ends by itself if there is time, and otherwise when it is told to."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from protocol.errors import ProtocolError
from server import draining as draining_module
from server.draining import Draining


class Work:
    """Something in progress that ends when it is finished, or aborted unless it is ``stuck``."""

    def __init__(self, is_stuck: bool = False) -> None:
        self.is_aborted = False
        self._is_stuck = is_stuck
        self._end = asyncio.Event()

    def finish(self) -> None:
        self._end.set()

    def abort(self) -> None:
        self.is_aborted = True
        if not self._is_stuck:
            self._end.set()

    async def run(self, draining: Draining) -> None:
        with draining.track(self.abort):
            await self._end.wait()


@pytest.fixture
def draining() -> Draining:
    return Draining()


@contextmanager
def never_called() -> Iterator[Callable[[], None]]:
    calls: list[None] = []
    yield lambda: calls.append(None)
    assert not calls


async def started(tasks: asyncio.TaskGroup, draining: Draining, *works: Work) -> None:
    """Start all works, and return when they are in progress."""
    for work in works:
        tasks.create_task(work.run(draining))
    await asyncio.sleep(0)
    assert draining.num_in_progress == len(works)


async def test_with_nothing_in_progress_it_is_over_at_once(draining: Draining) -> None:
    async with asyncio.timeout(0):
        await draining.drain(1000)


async def test_what_ended_before_is_not_waited_for(draining: Draining) -> None:
    with never_called() as abort:
        with draining.track(abort), pytest.raises(ZeroDivisionError), draining.track(abort):
            raise ZeroDivisionError
        async with asyncio.timeout(0):
            await draining.drain(1000)


async def test_all_work_in_progress_is_waited_for_and_not_aborted(draining: Draining) -> None:
    first, second = Work(), Work()
    async with asyncio.TaskGroup() as tasks:
        await started(tasks, draining, first, second)
        drain = tasks.create_task(draining.drain(1000))
        for work in (second, first):
            await asyncio.sleep(0)
            assert not drain.done()
            work.finish()

    assert not first.is_aborted
    assert not second.is_aborted


async def test_work_that_takes_too_long_is_aborted_and_waited_for(draining: Draining) -> None:
    slow, fast = Work(), Work()
    async with asyncio.TaskGroup() as tasks:
        await started(tasks, draining, slow, fast)
        fast.finish()
        await draining.drain(0)

        assert draining.num_in_progress == 0

    assert slow.is_aborted
    assert not fast.is_aborted


async def test_work_that_is_stuck_is_left_to_itself(
    draining: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining_module, "ABORT_SECONDS", 0.0)
    stuck, other = Work(is_stuck=True), Work()
    async with asyncio.TaskGroup() as tasks:
        await started(tasks, draining, stuck, other)
        await draining.drain(0)

        assert stuck.is_aborted
        assert other.is_aborted
        stuck.finish()


async def test_nothing_new_may_begin_once_it_drains(draining: Draining) -> None:
    draining.check()
    assert not draining.is_draining
    work = Work()
    async with asyncio.TaskGroup() as tasks:
        await started(tasks, draining, work)
        tasks.create_task(draining.drain(1000))
        await asyncio.sleep(0)

        assert draining.is_draining
        with pytest.raises(ProtocolError) as refused:
            draining.check()
        work.finish()

    assert (refused.value.status, refused.value.code) == (503, "server_error")
    assert refused.value.error_type == "server_error"  # what clients read before they try again


async def test_what_begins_all_the_same_is_waited_for(draining: Draining) -> None:
    first, late = Work(), Work()
    async with asyncio.TaskGroup() as tasks:
        await started(tasks, draining, first)
        drain = tasks.create_task(draining.drain(1000))
        tasks.create_task(late.run(draining))
        await asyncio.sleep(0)
        first.finish()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not drain.done()
        late.finish()
