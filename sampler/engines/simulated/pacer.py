"""How long the steps of a simulated accelerator take.

A sleep ends late, by some 60 microseconds where nothing else runs and by milliseconds where much
does. So each step is due at a time that follows from when the last one *was due*, not from when it
ended: what a sleep was late, the next ones are shorter, and the average is exact. What the host
does between two steps costs nothing as long as it fits into a step, as with an accelerator that is
given its next step while it works on the last; what it takes longer, the accelerator stands still.
Where nothing goes on from the last step, there was nothing to be given: it begins when it begins.
"""

import time
from collections.abc import Callable

_MOST_LATE_SECONDS = 0.05
"""What is made up for at most, where sleeps end very late."""


class Pacer:
    """Lets steps take the time that they would take at given rates."""

    def __init__(
        self,
        decode_rate: float | None,
        prefill_rate: float | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Pace steps.

        Args:
            decode_rate: steps a second, which is tokens a second of each sequence; None for as fast
                as can be.
            prefill_rate: tokens of prompts a second, of all sequences together; None likewise.
            clock: tells the time, in seconds.
            sleep: waits for that many seconds, or a little longer.
        """
        self._seconds_per_step = 1 / decode_rate if decode_rate else 0.0
        self._seconds_per_token = 1 / prefill_rate if prefill_rate else 0.0
        self._is_unlimited = not (decode_rate or prefill_rate)
        self._clock = clock
        self._sleep = sleep
        self._ended_at = self._begun_at = float("-inf")
        self._goes_on = False
        self._late = 0.0
        """By how much the last sleeps ended late, less what has been made up for."""

    def begin_step(self, *, goes_on: bool) -> None:
        """Take note that a step begins.

        Args:
            goes_on: whether some sequence goes on in it from the last step.
        """
        if not self._is_unlimited:
            self._begun_at = self._clock()
            self._goes_on = goes_on

    def end_step(self, num_prefilled: int) -> None:
        """Wait until the step that has begun is due.

        Args:
            num_prefilled: its tokens of prompts. Those that decode take no time of their own.
        """
        if self._is_unlimited:
            return
        if not self._goes_on:
            self._late = 0.0
        seconds = max(num_prefilled * self._seconds_per_token, self._seconds_per_step)
        due_at = self._begun_at - self._head_start() + seconds
        remaining = due_at - self._clock()
        if remaining > 0:
            self._sleep(remaining)
        self._ended_at = self._clock()
        overdue = self._ended_at - due_at
        self._late = min(overdue, _MOST_LATE_SECONDS if remaining > 0 else self._late)

    def _head_start(self) -> float:
        """Return how long the accelerator has worked on the step when it begins."""
        if not self._goes_on:
            return 0.0
        return self._late + min(self._begun_at - self._ended_at, self._seconds_per_step)
