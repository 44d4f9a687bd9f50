"""The work after inference: what was used is accounted for, once, however the run ended.

A client waits for as little of it as can be. What may not be lost when the process dies is written
down (``journal``) before the client is told; all else is done by threads of their own, in order,
while the client goes on.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sampler.run import Run, Segment
from server.ledger import Ledger, RunOpened, SegmentUsage
from server.telemetry import Telemetry
from server.work import Stage, Work

logger = logging.getLogger(__name__)


class PostInference:
    """Accounts for runs that are over."""

    def __init__(self, telemetry: Telemetry, ledger: Ledger | None) -> None:
        self._telemetry = telemetry
        self._ledger = ledger

    def open(self, run: RunOpened, work: Work) -> "Account":
        """Return the account of a response that is about to begin."""
        return Account(run, work, self._telemetry, self._ledger)


class Account:
    """What one response used, as it comes. Its runs are one in the books."""

    def __init__(
        self, run: RunOpened, work: Work, telemetry: Telemetry, ledger: Ledger | None
    ) -> None:
        self._run = run
        self._work = work
        self._telemetry = telemetry
        self._ledger = ledger
        self._entered: list[Segment] = []
        self._is_closed = False

    @contextmanager
    def delaying(self, segment: Segment) -> Iterator[None]:
        """Note that what is done keeps the client of ``segment`` waiting."""
        is_sampling, began_at = segment.ended_at is None, time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began_at
            segment.post_inference_seconds += seconds
            segment.interrupted_seconds += seconds if is_sampling else 0.0

    def end_segment(self, segment: Segment, *, is_resumed: bool) -> None:
        """Enter a segment, before the client is told of its end."""
        with self._work.stage(Stage.METRICS, runs=0):
            self._telemetry.observe_segment(segment, is_resumed=is_resumed)
        self._enter(segment)

    def _enter(self, segment: Segment) -> None:
        if self._ledger is not None:
            with self._work.stage(Stage.LEDGER, runs=0):
                self._ledger.segment(self._run, self._usage(segment))
        self._entered.append(segment)

    def _usage(self, segment: Segment) -> SegmentUsage:
        ended_at = segment.ended_at or time.monotonic()
        return SegmentUsage(
            index=len(self._entered),
            input_tokens=segment.input_tokens,
            cached_tokens=segment.cached_tokens,
            output_tokens=segment.output_tokens,
            reasoning_tokens=segment.reasoning_tokens,
            seconds=ended_at - segment.requested_at,
        )

    def close(self, runs: Sequence[Run], status: str) -> None:
        """Account for ``runs``, which are over, unless that was done.

        Args:
            runs: none where nothing was to be sampled.
            status: of the response that they are.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for segment in (segment for run in runs for segment in run.segments):
            is_entered = any(segment is entered for entered in self._entered)
            if segment.started_at is not None and not is_entered:
                self._enter(segment)  # it was cut short
        if self._ledger is not None:
            with self._work.stage(Stage.LEDGER, items=0):
                self._ledger.finish(self._run, status)
        with self._work.stage(Stage.METRICS, items=0):
            for run in runs:
                self._telemetry.post_inference.inc()
                _log(run)


def _log(run: Run) -> None:
    logger.info(
        "run %s: %s after %d segments, %d tokens, %d sampled, %d forwarded again",
        run.id,
        run.state.value,
        len(run.segments),
        len(run.tokens),
        sum(segment.output_tokens for segment in run.segments),
        run.tokens_reforwarded,
    )
