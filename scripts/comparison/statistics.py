"""Medians with intervals, ratios by rounds, and what counts as a difference.

All designs of a cell are measured in turns, round by round, so that a slow minute of the machine
hits each of them. Hence a ratio is taken within each round, and its median over the rounds is what
is reported. The interval is a percentile bootstrap of the median, 95 %: the bias-corrected one
needs the jackknife, which says nothing about a median. With two or three rounds it is the range of
what was seen and no more than that; hence the second condition on a difference.

That is the noise floor. In each round some designs are measured twice; as nothing differs between
the two, what their ratio is off 1 is the error of such a ratio. The floor of a cell is what its own
pairs are off, or the median of that over the cells of the same engine, whichever is more: no cell
is thought quiet by luck. A difference is called one where the interval excludes 1 and the ratio is
farther from 1 than the floor.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy.stats import bootstrap

from scripts.comparison.measures import Measure, is_at_endpoint
from scripts.comparison.results import Design, Trial

CONFIDENCE = 0.95
_RESAMPLES = 2000
_SEED = 0
_ROUNDING = 1e-9
"""Of the arithmetic: a ratio is not off by more than the floor that was made of it."""

BASELINE = Design.STATELESS_CACHE
"""What the other designs are compared with."""

SAME_AGAIN = {
    Design.STATELESS_CACHE: Design.AGAIN,
    Design.SUSPENDED: Design.SUSPENDED_AGAIN,
}
"""What is measured twice in a round."""


@dataclass(frozen=True)
class Estimate:
    """A median and the ends of its interval."""

    value: float
    low: float
    high: float
    num_samples: int

    @property
    def has_interval(self) -> bool:
        """Whether there was more than one sample; else ``low`` and ``high`` are the value."""
        return self.num_samples > 1


def median(samples: Sequence[float]) -> Estimate:
    """Return the median of ``samples``, of which there is at least one."""
    assert samples, "an estimate has samples"
    return _median(tuple(samples))


def median_ratio(above: Mapping[int, float], below: Mapping[int, float]) -> Estimate | None:
    """Return the median of the ratios by round; None where no round has both.

    A figure that is not positive has no ratio.
    """
    ratios = [
        above[number] / below[number]
        for number in sorted(above.keys() & below.keys())
        if above[number] > 0 and below[number] > 0
    ]
    return median(ratios) if ratios else None


@lru_cache(maxsize=8192)
def _median(samples: tuple[float, ...]) -> Estimate:
    value = statistics.median(samples)
    if min(samples) == max(samples):
        return Estimate(value, value, value, len(samples))
    found = bootstrap(
        (np.array(samples),),
        np.median,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    # Of an even number, the two libraries' medians may differ in the last bit.
    low, high = map(float, found.confidence_interval)
    return Estimate(value, min(value, low), max(value, high), len(samples))


@dataclass(frozen=True)
class Comparison:
    """A design beside its baseline, in one cell and one measure."""

    ratio: Estimate
    """The design's figure over the baseline's: below 1 is less."""
    noise: float | None
    """How far from 1 a ratio of equals may be, such as 0.03; None where nothing was measured
    twice."""

    @property
    def is_judged(self) -> bool:
        """Whether there is an interval and a noise floor, without which nothing can be said."""
        return self.noise is not None and self.ratio.has_interval

    @property
    def is_difference(self) -> bool:
        """Whether the interval excludes 1 and the ratio is farther from it than the noise floor."""
        if self.noise is None or not self.ratio.has_interval:
            return False
        excludes_one = self.ratio.high < 1 or self.ratio.low > 1
        return excludes_one and _distance(self.ratio.value) > math.log1p(self.noise) + _ROUNDING

    @property
    def is_less(self) -> bool:
        """Whether the design has less than the baseline, by a difference."""
        return self.is_difference and self.ratio.value < 1

    @property
    def is_more(self) -> bool:
        """Whether the design has more than the baseline, by a difference."""
        return self.is_difference and self.ratio.value > 1

    @property
    def saved(self) -> float:
        """Which fraction of the baseline's figure the design does without."""
        return 1 - self.ratio.value


def _distance(ratio: float) -> float:
    """Return how far a ratio is from 1: the same for 2 and for a half."""
    return abs(math.log(ratio))


# --- Trials by cell -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What is measured in all designs alike."""

    experiment: str
    engine: str
    workload: str

    def __str__(self) -> str:
        return f"{self.experiment}: {self.workload}, {self.engine}"


class Measured:
    """Trials by cell, design and round."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._trials: dict[Cell, dict[str, dict[int, Trial]]] = {}
        self._noise: dict[tuple[str, Measure], list[float]] = {}
        for trial in trials:
            cell = Cell(trial.experiment, trial.engine, trial.workload)
            rounds = self._trials.setdefault(cell, {}).setdefault(trial.design, {})
            rounds[trial.round] = trial

    def cells(self, experiment: str | None = None, engine: str | None = None) -> list[Cell]:
        """Return the cells, of one experiment and engine where they are given, by ``x``."""
        found = [
            cell
            for cell in self._trials
            if experiment in (None, cell.experiment) and engine in (None, cell.engine)
        ]
        order = list(dict.fromkeys((cell.experiment, cell.engine) for cell in found))
        return sorted(found, key=lambda c: (order.index((c.experiment, c.engine)), self.x(c)))

    def engines(self, experiment: str | None = None) -> list[str]:
        """Return the engines in the order in which they were measured."""
        return list(dict.fromkeys(cell.engine for cell in self.cells(experiment)))

    def designs(self, cell: Cell) -> list[str]:
        """Return what was measured in ``cell``: ours in the order of ``Design``, then others."""
        names = [str(design) for design in ORDER]
        return sorted(
            self._trials.get(cell, {}),
            key=lambda name: names.index(name) if name in names else len(names),
        )

    def x(self, cell: Cell) -> float:
        """Return what the experiment varies."""
        return self.all_trials(cell)[0].x

    def trials(self, cell: Cell, design: str) -> list[Trial]:
        """Return the rounds of a design."""
        return list(self._trials.get(cell, {}).get(design, {}).values())

    def is_at_endpoint(self, cell: Cell) -> bool:
        """Tell whether an endpoint sampled what was measured in ``cell``."""
        return any(map(is_at_endpoint, self.all_trials(cell)))

    def all_trials(self, cell: Cell) -> list[Trial]:
        """Return the rounds of all designs."""
        return [trial for rounds in self._trials[cell].values() for trial in rounds.values()]

    def num_rounds(self, cell: Cell) -> int:
        """Return how many rounds there were of the design that had most."""
        return max(map(len, self._trials[cell].values()))

    def estimate(self, cell: Cell, design: str, measure: Measure) -> Estimate | None:
        """Return the median over the rounds; None where it was not measured."""
        samples = self.samples(cell, design, measure)
        return median(list(samples.values())) if samples else None

    def compare(
        self, cell: Cell, design: str, measure: Measure, baseline: str = BASELINE
    ) -> Comparison | None:
        """Return the design beside the baseline; None where no round has both."""
        ratio = median_ratio(
            self.samples(cell, design, measure), self.samples(cell, baseline, measure)
        )
        return None if ratio is None else Comparison(ratio, self.noise(cell, measure))

    def noise(self, cell: Cell, measure: Measure) -> float | None:
        """Return the noise floor of a cell: the fraction by which equals may differ."""
        of_engine = self._distances_of(cell.engine, measure)
        if not of_engine:
            return None
        own = self._own_distance(cell, measure)
        return math.expm1(max(statistics.median(of_engine), own or 0.0))

    def _distances_of(self, engine: str, measure: Measure) -> list[float]:
        key = (engine, measure)
        if key not in self._noise:
            distances = [self._own_distance(cell, measure) for cell in self.cells(engine=engine)]
            self._noise[key] = [distance for distance in distances if distance is not None]
        return self._noise[key]

    def _own_distance(self, cell: Cell, measure: Measure) -> float | None:
        ratios = [
            median_ratio(self.samples(cell, again, measure), self.samples(cell, once, measure))
            for once, again in SAME_AGAIN.items()
        ]
        return max((_distance(ratio.value) for ratio in ratios if ratio is not None), default=None)

    def samples(self, cell: Cell, design: str, measure: Measure) -> dict[int, float]:
        """Return what was measured, by round."""
        rounds = self._trials.get(cell, {}).get(design, {})
        measured = {number: measure(trial) for number, trial in rounds.items()}
        return {number: value for number, value in measured.items() if value is not None}


ORDER = (
    Design.STATELESS_CACHE,
    Design.AGAIN,
    Design.STATELESS_CACHE_RECONNECT,
    Design.CHAINED,
    Design.SUSPENDED,
    Design.SUSPENDED_AGAIN,
    Design.SUSPENDED_INJECT,
    Design.STATELESS,
    Design.STATELESS_RECONNECT,
)
"""The baseline first."""


# --- The event loop's lag -------------------------------------------------------------------------


def merged(histograms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of cumulative histograms, by upper bound."""
    total: dict[str, float] = {}
    for histogram in histograms:
        for bound, observations in histogram.items():
            total[bound] = total.get(bound, 0.0) + observations
    return total


def quantile_bounds(histogram: Mapping[str, float], quantile: float) -> tuple[float, float] | None:
    """Return the bounds of the bucket that holds the quantile; None where nothing was observed.

    Args:
        histogram: cumulative counts by upper bound, as Prometheus has them; ``+Inf`` may be one.
        quantile: from 0 to 1.
    """
    buckets = sorted((float(bound), observations) for bound, observations in histogram.items())
    if not buckets or buckets[-1][1] <= 0:
        return None
    wanted = quantile * buckets[-1][1]
    for (low, _), (high, observations) in pairwise([(0.0, 0.0), *buckets]):
        if observations >= wanted:
            return low, high
    raise AssertionError("the last bucket holds all observations")
