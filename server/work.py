"""The work around inference, stage by stage: how often, on how much, and for how long.

A suspended run goes through each stage once, with what is new; a stateless one goes through all of
them, with everything, for each request. That difference is what the designs are compared by, so it
is counted where the work is done.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

from protocol.validation import JsonObject
from sampler.counters import TextWork


class Stage(StrEnum):
    """What is done with a request, in this order; inference comes before the last four."""

    PARSE = "parse"
    """Decode and validate; its items are those of the request."""
    AUTHENTICATE = "authenticate"
    """Once a connection, and once a request over HTTP."""
    RESOLVE = "resolve"
    """What the name of the model means."""
    CLASSIFY_INPUT = "classify_input"
    RENDER = "render"
    """Lay out as turns."""
    ENCODE = "encode"
    """Make token ids; its items are texts."""
    CLASSIFY_OUTPUT = "classify_output"
    LEDGER = "ledger"
    """Account for usage and cost; its items are segments."""
    STORE = "store"
    METRICS = "metrics"


@dataclass
class Tally:
    """How much was done in one stage."""

    runs: int = 0
    items: int = 0
    seconds: float = 0.0

    def add(self, runs: int, items: int, seconds: float) -> None:
        """Add what was done."""
        self.runs += runs
        self.items += items
        self.seconds += seconds


class Tallies:
    """What was done in each stage. Any thread may add to it."""

    def __init__(self) -> None:
        self._by_stage: defaultdict[Stage, Tally] = defaultdict(Tally)
        self._lock = Lock()

    def add(self, stage: Stage, runs: int, items: int, seconds: float) -> None:
        """Add what was done in a stage."""
        with self._lock:
            self._by_stage[stage].add(runs, items, seconds)

    def absorb(self, other: "Tallies") -> None:
        """Add all that ``other`` has, which nobody adds to any more."""
        for stage, tally in other._by_stage.items():
            self.add(stage, tally.runs, tally.items, tally.seconds)

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Add how long a stage goes on behind the back of those whom it was counted for."""
        began_at = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, 0, 0, time.perf_counter() - began_at)

    def __getitem__(self, stage: Stage) -> Tally:
        return self._by_stage.get(stage) or Tally()

    def __iter__(self) -> Iterator[tuple[Stage, Tally]]:
        return ((stage, self[stage]) for stage in Stage)

    def as_json(self) -> JsonObject:
        """Return what was done where anything was."""
        return {
            stage.value: {"runs": tally.runs, "items": tally.items, "seconds": tally.seconds}
            for stage, tally in self
            if tally.runs or tally.items
        }


class Work:
    """The work on one request, and on the run that it becomes."""

    def __init__(self, totals: Tallies) -> None:
        """Begin with a request that has just been received.

        Args:
            totals: of the whole server; everything is added there as well.
        """
        self.received_at = time.monotonic()
        """In monotonic seconds."""
        self.waited_seconds = 0.0
        """How long it waited behind others before anything was done about it."""
        self.requested_model: str | None = None
        """The model as the client named it."""
        self.tallies = Tallies()
        self._totals = totals
        self._queued_at: float | None = None

    def add(self, stage: Stage, seconds: float, *, runs: int = 1, items: int = 1) -> None:
        """Note that a stage was gone through ``runs`` times, with ``items`` in all."""
        self.tallies.add(stage, runs, items, seconds)
        self._totals.add(stage, runs, items, seconds)

    @contextmanager
    def stage(self, stage: Stage, *, runs: int = 1, items: int = 1) -> Iterator[Tally]:
        """Note a stage, and how long it takes. One that fails was gone through as well.

        What is given is what will be noted, for who learns only meanwhile how many items it has.
        """
        done, began_at = Tally(runs, items), time.perf_counter()
        try:
            yield done
        finally:
            seconds = time.perf_counter() - began_at
            self.add(stage, seconds, runs=done.runs, items=done.items)

    @contextmanager
    def text(self) -> Iterator[TextWork]:
        """Note what is rendered and encoded."""
        text = TextWork()
        try:
            yield text
        finally:
            self.add(Stage.RENDER, text.render_seconds, runs=text.renders, items=text.renders)
            self.add(Stage.ENCODE, text.encode_seconds, runs=text.encodes, items=text.encodes)

    def absorb(self, other: "Work") -> None:
        """Take over what was done for ``other``, which goes on as a part of this."""
        self.tallies.absorb(other.tallies)

    # --- Time -------------------------------------------------------------------------------------

    def queued(self) -> None:
        """From now on it waits until it is ``taken``."""
        self._queued_at = time.monotonic()

    def taken(self) -> None:
        """It waits no longer."""
        if self._queued_at is not None:
            self.waited_seconds += time.monotonic() - self._queued_at
            self._queued_at = None

    @property
    def seconds(self) -> float:
        """How long it has been worked on since it was received."""
        return time.monotonic() - self.received_at - self.waited_seconds
