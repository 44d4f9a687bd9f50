"""Which request is sent next, and when: the queue of all runs before an endpoint.

Requests go first come, first served, and a few rules keep an endpoint's rate limits:

* At most ``max_concurrent`` are in flight, up to the last byte of their answers.
* Of those, at most ``window`` have not been answered yet: nothing was said to them. It is what is
  sent into the dark.
* An answer of 429 closes the gate to all, until the time that it names, and halves the window. A
  good answer adds one to it. So what waits before a gate that opens does not rush through: some go,
  and each that gets through lets two more follow. Streams that are being answered do not count, so
  however long they are, there is always room for one that asks whether there is room.
* What was sent before the window was cut says nothing about it: fifty answers of 429 to fifty
  requests that were sent at once cut it once. (So do TCP's losses within a round trip, RFC 5681.)
* Whoever must ask again keeps its place, which is before all that came later.
"""

import asyncio
import time
from dataclasses import dataclass, field
from heapq import heappop, heappush

MAX_CLOSED_SECONDS = 300.0
"""How long the gate is closed at most before someone tries, whatever the endpoint says: a daily
limit may be raised before the day is over."""


class GateClosedError(Exception):
    """The gate opens later than somebody is willing to wait."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the gate is closed for {seconds:.0f} seconds")
        self.seconds = seconds
        """From now."""


@dataclass(eq=False)
class Ticket:
    """The place of a request in the queue, which it keeps when it is tried again."""

    number: int
    deadline: float | None = None
    """The loop's time after which it is not tried again; None before it was tried."""
    queued_seconds: float = 0.0
    """How long it has waited before the gate, in all."""
    num_admissions: int = 0
    admitted_at: float = 0.0
    """The last time: ``time.monotonic``, in seconds."""
    num_cuts: int = field(default=0, repr=False)
    """How often the window had been cut when it was admitted the last time."""
    is_answered: bool = field(default=False, repr=False)


class Gate:
    """Lets requests through. It belongs to one event loop."""

    def __init__(self, max_concurrent: int, patience_seconds: float) -> None:
        """Let requests through.

        Args:
            max_concurrent: how many may be in flight, at least one.
            patience_seconds: how long somebody who was not tried yet waits for the gate to open.
        """
        self.max_concurrent = max_concurrent
        self.window = max_concurrent
        """How many may be without an answer."""
        self.in_flight = 0
        self.unanswered = 0
        """Those of them without an answer."""
        self._patience_seconds = patience_seconds
        self._opens_at = float("-inf")
        self._num_cuts = 0
        self._num_tickets = 0
        self._waiting: list[tuple[int, Ticket, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted."""
        return sum(not entered.done() for _, _, entered in self._waiting)

    def ticket(self) -> Ticket:
        """Return the last place of the queue."""
        self._num_tickets += 1
        return Ticket(self._num_tickets)

    async def enter(self, ticket: Ticket) -> None:
        """Wait to be admitted; then ``leave`` has to be called, once. Cancelled, nobody entered.

        Raises:
            GateClosedError: it will be closed for longer than the ticket's owner waits. It is
                raised as soon as that is known.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._opens_at > self._waits_until(ticket):
            raise GateClosedError(self._opens_at - began)
        entered: asyncio.Future[None] = loop.create_future()
        heappush(self._waiting, (ticket.number, ticket, entered))
        self._admit()
        try:
            await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled() and entered.exception() is None:
                self.leave(ticket)  # admitted in the very moment
            raise
        finally:
            ticket.queued_seconds += loop.time() - began

    def answered(self, ticket: Ticket) -> None:
        """Take note that the request of ``ticket``, which has entered, is answered well."""
        ticket.is_answered = True
        self.unanswered -= 1
        if ticket.num_cuts == self._num_cuts:
            self.window = min(self.window + 1, self.max_concurrent)
        self._admit()

    def rate_limited(self, ticket: Ticket, seconds: float) -> None:
        """Take note that the answer was 429, to be asked again in so many seconds."""
        if ticket.num_cuts == self._num_cuts:
            self._num_cuts += 1
            self.window = max(min(self.window, self.unanswered) // 2, 1)
        self.close_for(seconds)

    def close_for(self, seconds: float) -> None:
        """Let nobody through for so many seconds, or for ``MAX_CLOSED_SECONDS``."""
        now = asyncio.get_running_loop().time()
        self._opens_at = max(self._opens_at, now + min(seconds, MAX_CLOSED_SECONDS))
        for _, ticket, entered in self._waiting:
            if not entered.done() and self._opens_at > self._waits_until(ticket):
                entered.set_exception(GateClosedError(self._opens_at - now))
        self._admit()

    def leave(self, ticket: Ticket) -> None:
        """Give back the place of the request of ``ticket``, which has entered."""
        self.in_flight -= 1
        self.unanswered -= not ticket.is_answered
        self._admit()

    def _waits_until(self, ticket: Ticket) -> float:
        if ticket.deadline is not None:
            return ticket.deadline
        return asyncio.get_running_loop().time() + self._patience_seconds

    def _admit(self) -> None:
        """Let through whoever may go."""
        while self._waiting and self._has_room():
            if self._is_closed():
                self._wake_when_open()
                return
            _, ticket, entered = heappop(self._waiting)
            if entered.done():
                continue  # it gave up
            ticket.num_admissions += 1
            ticket.admitted_at = time.monotonic()
            ticket.num_cuts = self._num_cuts
            ticket.is_answered = False
            self.in_flight += 1
            self.unanswered += 1
            entered.set_result(None)

    def _has_room(self) -> bool:
        return self.in_flight < self.max_concurrent and self.unanswered < self.window

    def _is_closed(self) -> bool:
        return asyncio.get_running_loop().time() < self._opens_at

    def _wake_when_open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._opens_at, self._admit)
