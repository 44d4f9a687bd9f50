"""How long the steps of a simulated accelerator take.

A sleep ends late, by some 60 microseconds where nothing else runs and by milliseconds where much
does. So each step is due at a time that follows from when the last one *was due*, not from when it
ended: what a sleep was late, the next ones are shorter, and the average is exact. For the same
reason what the host does between two steps costs nothing as long as it fits into a step, as with an
accelerator that is given its next step while it works on the last.
"""

import time
from collections.abc import Callable

_IDLE_SECONDS = 0.01
"""After a pause of that length there was nothing to do, and nothing is to be made up for."""

_MOST_BEHIND_SECONDS = 0.05
"""What is made up for at most, where the host is too slow for a while."""


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
        self._due_at = self._ended_at = -_IDLE_SECONDS
        self._begun_at = 0.0

    def begin_step(self) -> None:
        """Take note that a step begins."""
        if not self._is_unlimited:
            self._begun_at = self._clock()

    def end_step(self, num_prefilled: int) -> None:
        """Wait until the step that has begun is due.

        Args:
            num_prefilled: its tokens of prompts. Those that decode take no time of their own.
        """
        if self._is_unlimited:
            return
        seconds = max(num_prefilled * self._seconds_per_token, self._seconds_per_step)
        self._due_at = self._follows() + seconds
        remaining = self._due_at - self._clock()
        if remaining > 0:
            self._sleep(remaining)
        self._ended_at = self._clock()

    def _follows(self) -> float:
        """Return when the step began, as far as the accelerator is concerned."""
        if self._begun_at - self._ended_at > _IDLE_SECONDS:
            return self._begun_at
        return max(self._due_at, self._begun_at - _MOST_BEHIND_SECONDS)
