"""How much longer a tool takes, from how long it took before.

For each set of tools that were called together there is a histogram over the logarithm of the
seconds, recent calls counting more. So two habits of one tool stay two: a hit and a miss, a test
suite that passes and one that does not start.

What is left of a call that has taken a while already is what the histogram has beyond that. One
imagined call is mixed in, of which nothing is known but ``P(T > x) = s / (s + x)`` with a small
``s``. It matters where there is little else: a call of a tool never seen, or one longer than any
before, is as likely as not to take as long again as it has, which is what InferCept assumes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Tools = tuple[str, ...]
"""Names of tools called together, sorted."""


@dataclass(frozen=True)
class RemainingTime:
    """How much longer a call takes: some values it may have, each with a weight, and a tail.

    The tail has ``P(T > x) = scale / (scale + x)``: half of it is over after ``scale`` seconds, and
    its mean is infinite, which no question here asks for.
    """

    values: tuple[tuple[float, float], ...]
    """Seconds and weight, ascending."""
    tail_weight: float
    tail_scale: float

    def exceeds(self, seconds: float) -> float:
        """Return the probability that it takes longer than ``seconds``."""
        longer = sum(weight for value, weight in self.values if value > seconds)
        return (longer + self._tail_beyond(seconds)) / self._weight

    def expected(self, limit: float) -> float:
        """Return the mean of the seconds that it takes, none counted beyond ``limit``."""
        counted = sum(weight * min(value, limit) for value, weight in self.values)
        return (counted + self._tail_up_to(limit)) / self._weight

    def at_values(self) -> Iterator[tuple[float, float, float]]:
        """Yield each value with what `expected` and `exceeds` are there, in one pass."""
        total = self._weight
        shorter, longer = 0.0, total - self.tail_weight
        for value, weight in self.values:
            shorter += weight * value
            longer -= weight
            expected = shorter + longer * value + self._tail_up_to(value)
            yield value, expected / total, (longer + self._tail_beyond(value)) / total

    def _tail_up_to(self, seconds: float) -> float:
        return self.tail_weight * self.tail_scale * math.log1p(seconds / self.tail_scale)

    def _tail_beyond(self, seconds: float) -> float:
        return self.tail_weight * self.tail_scale / (self.tail_scale + seconds)

    @property
    def _weight(self) -> float:
        return self.tail_weight + sum(weight for _, weight in self.values)


class ToolTimes:
    """How long the calls of each tool took, and how long the next may take."""

    _BINS_PER_DOUBLING = 4  # a call is remembered as up to 19 % longer than it was, never shorter:
    # a time to live that ends just before the outputs come would be the worst of all
    _IMAGINED_SECONDS = 0.1  # half of the imagined call is over by then
    _SHORTEST = 1e-3
    _DECAY = 0.95  # of the weight of older calls at each new one: about the last twenty count
    _NEGLIGIBLE = 0.01
    _MOST = 1000  # sets of tools remembered: clients make up the names

    def __init__(self) -> None:
        self._histograms: dict[Tools, dict[int, float]] = {}

    def observe(self, tools: Iterable[str], seconds: float) -> None:
        """Learn that a call of ``tools``, all at once, was answered after ``seconds``."""
        histogram = self._histograms.pop(_as_key(tools), {})
        kept = {b: w * self._DECAY for b, w in histogram.items() if w > self._NEGLIGIBLE}
        index = self._bin(seconds)
        kept[index] = kept.get(index, 0.0) + 1.0
        self._histograms[_as_key(tools)] = dict(sorted(kept.items()))
        if len(self._histograms) > self._MOST:
            del self._histograms[next(iter(self._histograms))]  # the one longest not called

    def remaining(self, tools: Iterable[str], elapsed: float) -> RemainingTime:
        """Return how much longer a call of ``tools`` takes that has taken ``elapsed`` seconds."""
        values = tuple(
            (seconds - elapsed, weight)
            for seconds, weight in self._known(_as_key(tools))
            if seconds > elapsed
        )
        # The imagined call has the same law for what remains, on a scale that grows as it lasts.
        scale = self._IMAGINED_SECONDS + elapsed
        return RemainingTime(values, self._IMAGINED_SECONDS / scale, scale)

    def _known(self, tools: Tools) -> Iterator[tuple[float, float]]:
        """Yield seconds and weights of past calls; where these tools were never called together,
        of the one among them that takes longest."""
        histogram = self._histograms.get(tools)
        if histogram is None:
            alone = [self._histograms[(t,)] for t in tools if (t,) in self._histograms]
            histogram = max(alone, key=self._mean, default={})
        return ((self._seconds(index), weight) for index, weight in histogram.items())

    def _mean(self, histogram: dict[int, float]) -> float:
        total = sum(weight * self._seconds(index) for index, weight in histogram.items())
        return total / sum(histogram.values())

    def _bin(self, seconds: float) -> int:
        octaves = math.log2(max(seconds, self._SHORTEST) / self._SHORTEST)
        return math.ceil(octaves * self._BINS_PER_DOUBLING)

    def _seconds(self, index: int) -> float:
        return self._SHORTEST * math.exp2(index / self._BINS_PER_DOUBLING)


def _as_key(tools: Iterable[str]) -> Tools:
    return tuple(sorted(set(tools)))
