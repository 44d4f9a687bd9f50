"""A measured figure: the median of its samples, how far they spread, and how many there are."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """Samples of one quantity, in the order in which they were taken."""

    samples: tuple[float, ...]
    """At least one."""
    unit: str

    def __post_init__(self) -> None:
        assert self.samples, "a figure has samples"

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        return min(self.samples)

    @property
    def high(self) -> float:
        return max(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; of a single sample, that."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    def as_json(self) -> dict[str, Any]:
        """Return what a program wants to know of it."""
        first, third = self.quartiles
        return {
            "unit": self.unit,
            "median": _rounded(self.median),
            "low": _rounded(self.low),
            "high": _rounded(self.high),
            "q1": _rounded(first),
            "q3": _rounded(third),
            "repeats": len(self.samples),
        }

    def __str__(self) -> str:
        if len(self.samples) == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)}..{number(self.high)})"


def figure(samples: Sequence[float], unit: str) -> Figure:
    """Return the figure of ``samples``."""
    return Figure(tuple(samples), unit)


def ratio(figure_above: Figure, figure_below: Figure) -> Figure:
    """Return the first over the second, round by round: both were measured in turns, so what a
    round had in common, like a slow moment of the machine, falls out.

    Where one of them was measured more often, its median takes the place of its samples.
    """
    above, below = figure_above.samples, figure_below.samples
    if len(above) != len(below):
        above, below = (figure_above.median,), (figure_below.median,)
    return Figure(tuple(a / b for a, b in zip(above, below, strict=True)), "x")


def number(value: float) -> str:
    """Return ``value`` to three digits, or as a whole number where there are more."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.1 else f"{value:.3g}"


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
