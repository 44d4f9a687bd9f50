"""The queue before an endpoint: first come, first served, and no faster than it allows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sampler.engines.endpoint.gate import MAX_CLOSED_SECONDS, Gate, GateClosedError, Ticket


class Queue:
    """Requests before a gate; each stays until it is told to leave."""

    def __init__(self, gate: Gate, group: asyncio.TaskGroup) -> None:
        self.gate = gate
        self.admitted: list[Ticket] = []
        self._group = group

    def come(self, ticket: Ticket) -> asyncio.Task[None]:
        """Let the request of ``ticket`` queue."""
        return self._group.create_task(self._enter(ticket))

    def come_all(self, *tickets: Ticket) -> None:
        """Let requests queue, one after the other."""
        for ticket in tickets:
            self._group.create_task(self._enter(ticket))

    async def _enter(self, ticket: Ticket) -> None:
        await self.gate.enter(ticket)
        self.admitted.append(ticket)


@asynccontextmanager
async def queue(max_concurrent: int, patience_seconds: float = 60.0) -> AsyncIterator[Queue]:
    """Open a gate, at which nobody may be left in the end."""
    async with asyncio.TaskGroup() as group:
        yield Queue(Gate(max_concurrent, patience_seconds), group)


async def settle() -> None:
    """Let all go that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_no_more_are_in_flight_than_allowed_and_all_go_in_order() -> None:
    async with queue(2) as at:
        tickets = [at.gate.ticket() for _ in range(6)]
        at.come_all(*tickets)

        for number, ticket in enumerate(tickets):
            await settle()
            assert at.admitted == tickets[: number + 2]
            assert at.gate.in_flight == min(2, 6 - number)
            at.gate.answered(ticket)
            at.gate.leave(ticket)

    assert (at.gate.in_flight, at.gate.unanswered, at.gate.num_waiting) == (0, 0, 0)


async def test_who_is_tried_again_is_before_all_that_came_later() -> None:
    async with queue(1) as at:
        first, second, third = (at.gate.ticket() for _ in range(3))
        await at.come(first)
        at.come_all(second, third)
        await settle()

        at.gate.rate_limited(first, 0.02)
        at.gate.leave(first)
        again = at.come(first)
        await settle()
        assert at.admitted == [first], "the gate is closed"
        await again
        at.gate.leave(first)
        await settle()
        at.gate.leave(second)

    assert at.admitted == [first, first, second, third]
    assert first.num_admissions == 2
    assert first.queued_seconds > 0


async def test_a_burst_that_is_refused_halves_the_window_once() -> None:
    async with queue(64) as at:
        tickets = [at.gate.ticket() for _ in range(10)]
        at.come_all(*tickets)
        await settle()

        for ticket in tickets:
            at.gate.rate_limited(ticket, 0.0)
            at.gate.leave(ticket)

    assert at.gate.window == 5


async def test_each_good_answer_widens_the_window_by_one_up_to_all() -> None:
    async with queue(4) as at:
        ticket = at.gate.ticket()
        windows = []
        await at.come(ticket)
        at.gate.rate_limited(ticket, 0.0)
        at.gate.leave(ticket)
        for _ in range(5):
            windows.append(at.gate.window)
            await at.come(ticket)
            at.gate.answered(ticket)
            at.gate.leave(ticket)

    assert windows == [1, 2, 3, 4, 4]


async def test_what_was_sent_before_the_cut_does_not_widen_the_window() -> None:
    async with queue(8) as at:
        refused, good = at.gate.ticket(), at.gate.ticket()
        await at.come(refused)
        await at.come(good)

        at.gate.rate_limited(refused, 0.0)
        at.gate.leave(refused)
        at.gate.answered(good)
        at.gate.leave(good)

    assert at.gate.window == 1


async def test_long_streams_leave_room_for_one_that_asks() -> None:
    async with queue(8) as at:
        streams = [at.gate.ticket() for _ in range(4)]
        for ticket in streams:
            await at.come(ticket)
            at.gate.answered(ticket)
        other = at.gate.ticket()
        await at.come(other)
        for _ in range(3):
            at.gate.rate_limited(other, 0.0)
            at.gate.leave(other)
            await asyncio.wait_for(at.come(other), 5)

    assert at.gate.in_flight == 5


async def test_who_would_wait_for_too_long_is_told_at_once() -> None:
    async with queue(1, patience_seconds=10) as at:
        tried, waiting, later = (at.gate.ticket() for _ in range(3))
        await at.come(tried)
        waits = asyncio.ensure_future(at.gate.enter(waiting))
        await settle()

        at.gate.close_for(11)
        with pytest.raises(GateClosedError) as told:
            await waits
        with pytest.raises(GateClosedError):
            await at.gate.enter(later)

    assert told.value.seconds == pytest.approx(11, abs=1)
    assert at.gate.num_waiting == 0


async def test_the_gate_is_not_closed_for_days() -> None:
    async with queue(1) as at:
        at.gate.close_for(86400)
        with pytest.raises(GateClosedError) as told:
            await at.gate.enter(at.gate.ticket())

    assert told.value.seconds <= MAX_CLOSED_SECONDS


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_cancelled_while_it_waits_it_leaves_nothing(is_admitted: bool) -> None:
    async with queue(1) as at:
        first, cancelled, third = (at.gate.ticket() for _ in range(3))
        await at.come(first)
        waits = at.come(cancelled)
        at.come_all(third)
        await settle()

        if is_admitted:
            at.gate.leave(first)  # which admits it, before it runs
            waits.cancel()
        else:
            waits.cancel()
            await settle()
            at.gate.leave(first)
        await settle()

    assert at.admitted == [first, third]
    assert at.gate.in_flight == 1
