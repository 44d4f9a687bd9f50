import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from weakref import ref

import pytest

from sampler.worker_thread import WorkerThread
from tests.sampler.runs import Gate, let_the_loop_turn


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def worker(gate: Gate) -> Iterator[WorkerThread]:
    with closing(WorkerThread("worker")) as worker:
        yield worker
        gate.open()  # so that a test that failed does not hang


async def test_run_returns_what_the_function_returns(worker: WorkerThread) -> None:
    assert await worker.run(divmod, 7, 2) == (3, 1)
    assert await worker.run(int, "ff", base=16) == 255


async def test_run_raises_what_the_function_raises(worker: WorkerThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await worker.run(divmod, 7, 0)

    assert await worker.run(divmod, 7, 2) == (3, 1)


async def test_it_is_idle_when_all_that_was_waited_for_is_done(
    worker: WorkerThread, gate: Gate
) -> None:
    was_idle = worker.is_idle
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run(gate.pass_through))
        cancelled = tasks.create_task(worker.run(int, "7"))
        await gate.wait_until_begun()
        cancelled.cancel()
        await let_the_loop_turn()
        is_idle = worker.is_idle
        gate.open()

    assert (was_idle, is_idle, worker.is_idle) == (True, False, True)


async def test_what_was_submitted_is_done_in_its_turn_and_not_dropped(gate: Gate) -> None:
    worker = WorkerThread("worker")
    done: list[int] = []
    worker.submit(gate.pass_through)
    for number in range(3):
        worker.submit(done.append, number)
    before = list(done)

    gate.open()
    worker.close(drops_work=False)

    assert (before, done) == ([], [0, 1, 2])


async def test_all_work_is_done_on_one_thread_with_the_name_given(worker: WorkerThread) -> None:
    threads = {await worker.run(threading.current_thread) for _ in range(3)}

    assert len(threads) == 1
    thread = threads.pop()
    assert thread is not threading.current_thread()
    assert thread.name.startswith("worker")


async def test_work_is_done_in_the_order_asked(worker: WorkerThread, gate: Gate) -> None:
    done: list[int] = []

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run(gate.pass_through))
        await gate.wait_until_begun()
        for number in range(5):
            tasks.create_task(worker.run(done.append, number))
        await let_the_loop_turn()
        assert done == []
        gate.open()

    assert done == [0, 1, 2, 3, 4]


async def test_the_loop_turns_while_the_thread_works(worker: WorkerThread, gate: Gate) -> None:
    work = asyncio.ensure_future(worker.run(gate.pass_through, "result"))
    await gate.wait_until_begun()

    await let_the_loop_turn()
    assert not work.done()
    gate.open()

    assert await work == "result"


async def test_a_cancelled_caller_waits_for_work_in_flight(
    worker: WorkerThread, gate: Gate
) -> None:
    work = asyncio.ensure_future(worker.run(gate.pass_through))
    await gate.wait_until_begun()

    work.cancel()
    await let_the_loop_turn()
    assert not work.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await work

    assert gate.is_over


async def test_a_second_cancellation_does_not_cut_the_waiting_short(
    worker: WorkerThread, gate: Gate
) -> None:
    work = asyncio.ensure_future(worker.run(gate.pass_through))
    await gate.wait_until_begun()

    for _ in range(3):
        work.cancel()
        await let_the_loop_turn()
        assert not work.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await work

    assert gate.is_over


async def test_cancellation_passes_through_code_that_awaits_the_work(
    worker: WorkerThread, gate: Gate
) -> None:
    seen: list[bool] = []

    async def step() -> None:
        try:
            await worker.run(gate.pass_through)
        finally:
            seen.append(gate.is_over)

    work = asyncio.ensure_future(step())
    await gate.wait_until_begun()
    work.cancel()
    await let_the_loop_turn()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await work

    assert seen == [True]


async def test_queued_work_of_a_cancelled_caller_is_dropped_at_once(
    worker: WorkerThread, gate: Gate
) -> None:
    done: list[str] = []
    in_flight = asyncio.ensure_future(worker.run(gate.pass_through))
    await gate.wait_until_begun()
    dropped = asyncio.ensure_future(worker.run(done.append, "dropped"))
    kept = asyncio.ensure_future(worker.run(done.append, "kept"))
    await let_the_loop_turn()

    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    assert not in_flight.done()
    gate.open()
    await asyncio.gather(in_flight, kept)

    assert done == ["kept"]


async def test_an_error_of_work_whose_caller_was_cancelled_is_not_reported_again(
    worker: WorkerThread, gate: Gate
) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    work = asyncio.ensure_future(worker.run(gate.pass_through, ValueError("lost")))
    await gate.wait_until_begun()

    work.cancel()
    await let_the_loop_turn()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await work
    del work
    gc.collect()
    await let_the_loop_turn()

    assert reports == []


class Resource:
    """Something whose end can be noticed."""

    def fail(self) -> None:
        raise ValueError("lost")


async def test_what_the_function_was_given_is_let_go_of_once_it_has_returned(
    worker: WorkerThread, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, resource, at_work = asyncio.get_running_loop(), Resource(), Gate()
    tell, held = loop.call_soon_threadsafe, ref(resource)

    def work(_: Resource) -> None:
        at_work.pass_through()

    def tell_and_wait(*args: Any, **kwargs: Any) -> object:
        return gate.pass_through(tell(*args, **kwargs))

    working = asyncio.ensure_future(worker.run(work, resource))
    await at_work.wait_until_begun()
    monkeypatch.setattr(loop, "call_soon_threadsafe", tell_and_wait)
    at_work.open()
    await working
    del resource
    is_held, is_done_with_it = held() is not None, gate.is_over
    monkeypatch.undo()
    gate.open()

    assert not is_done_with_it, "the thread has only just told the result"
    assert not is_held


async def test_what_the_function_was_given_is_let_go_of_with_the_error_it_raised(
    worker: WorkerThread,
) -> None:
    resource = Resource()
    held = ref(resource)

    async def fail(resource: Resource) -> None:
        with suppress(ValueError):
            await worker.run(resource.fail)

    gc.disable()  # which would hide that something leads to itself
    try:
        await asyncio.ensure_future(fail(resource))
        del resource
        worker.close()

        assert held() is None
    finally:
        gc.enable()


async def test_close_waits_for_work_in_flight_and_drops_the_rest(
    worker: WorkerThread, gate: Gate
) -> None:
    done: list[str] = []
    in_flight = asyncio.ensure_future(worker.run(gate.pass_through, "result"))
    await gate.wait_until_begun()
    queued = asyncio.ensure_future(worker.run(done.append, "queued"))
    await let_the_loop_turn()

    closed = asyncio.ensure_future(asyncio.to_thread(worker.close))
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert not closed.done()
    gate.open()
    await closed

    assert await in_flight == "result"
    assert done == []


async def test_a_closed_worker_takes_no_work(worker: WorkerThread) -> None:
    worker.close()

    with pytest.raises(RuntimeError):
        await worker.run(divmod, 7, 2)
