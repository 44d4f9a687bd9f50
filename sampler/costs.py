"""What work takes on this machine with this model, measured as it happens."""

import statistics
from dataclasses import dataclass, field

from sampler.waste import Rates

_MEMORY = 10
"""Values that an average is taken of, more or less."""


@dataclass
class Average:
    """A mean that follows: of the first ten values, and then each new one counts for a tenth.

    The first one is often the worst: memory that nobody has touched, code that nobody has run. It
    is to count for no more than the others.
    """

    value: float
    """The guess before there is a value."""
    num_values: int = 0

    def observe(self, value: float) -> None:
        """Take ``value`` in."""
        self.num_values += 1
        self.value += (value - self.value) / min(self.num_values, _MEMORY)


@dataclass
class _StepsOfOneSize:
    num_tokens: Average = field(default_factory=lambda: Average(0.0))
    seconds: Average = field(default_factory=lambda: Average(0.0))

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens.observe(num_tokens)
        self.seconds.observe(seconds)


class Costs:
    """What forwarding and swapping take, measured as they happen.

    Steps are averaged by size, one average for each power of two of tokens, and a line is laid
    through the averages: thousands of decode steps then do not wash out the few prefills.
    """

    def __init__(self, prefill_chunk: int = 256) -> None:
        self._prefill_chunk = prefill_chunk
        self._steps: dict[int, _StepsOfOneSize] = {}
        # Guesses on the low side: what looks cheap is tried, and then measured.
        self._swap_out = Average(0.5e-3)
        self._swap_in = Average(0.5e-3)
        self._requeue = Average(0.0)

    def observe_forward(self, num_tokens: int, seconds: float) -> None:
        """Learn that one forward pass over ``num_tokens``, all rows together, took ``seconds``."""
        self._steps.setdefault(num_tokens.bit_length(), _StepsOfOneSize()).observe(
            num_tokens, seconds
        )

    def observe_swap(self, num_blocks: int, seconds: float, *, is_in: bool) -> None:
        """Learn that it took ``seconds`` to read (``is_in``) or to write ``num_blocks``."""
        if num_blocks:
            (self._swap_in if is_in else self._swap_out).observe(seconds / num_blocks)

    def observe_requeue(self, seconds: float) -> None:
        """Learn that a run without its cache, all outputs there, waited so long to be served: from
        when the model thread had it back to when there was room for it.

        For a step in flight, before that, it would have waited with its cache too.
        """
        self._requeue.observe(seconds)

    @property
    def rates(self) -> Rates:
        """What is known now."""
        token_seconds, step_seconds = self._line()
        return Rates(
            step_seconds=step_seconds,
            token_seconds=token_seconds,
            swap_out_seconds=self._swap_out.value,
            swap_in_seconds=self._swap_in.value,
            requeue_seconds=self._requeue.value,
            prefill_chunk=self._prefill_chunk,
        )

    def _line(self) -> tuple[float, float]:
        """Return slope and intercept of seconds over tokens, neither negative."""
        if not self._steps:
            return 1e-3, 0.0
        sizes = [step.num_tokens.value for step in self._steps.values()]
        seconds = [step.seconds.value for step in self._steps.values()]
        if len(sizes) > 1:
            line = statistics.linear_regression(sizes, seconds)
            if line.slope >= 0.0 and line.intercept >= 0.0:
                return line.slope, line.intercept
        return sum(seconds) / sum(sizes), 0.0
