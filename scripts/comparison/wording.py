"""How figures are written for people: three digits, a unit, and the interval behind them."""

from collections.abc import Sequence

from scripts.benchmarks.figures import number
from scripts.comparison.statistics import Comparison, Estimate

NOTHING = "–"
"""Where there is no figure."""

_MANY_TIMES = 1.5
"""The ratio from which on "times" is easier to read than a percentage."""
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def seconds(value: float) -> str:
    """Return a time as s, ms or µs."""
    return _scaled(value, _SECONDS)


def size(value: float) -> str:
    """Return a number of bytes as B, kB, MB or GB."""
    return _scaled(value, _BYTES)


def share(value: float) -> str:
    """Return a fraction as a percentage."""
    shown = f"{100 * value:.{0 if abs(value) >= 0.0995 else 1}f}"
    return f"{shown.removesuffix('.0')} %"


def count(value: float) -> str:
    """Return how many there are of something."""
    return number(value)


def interval(estimate: Estimate) -> str:
    """Return the ends of its interval, or nothing where there was a single round."""
    return f"{number(estimate.low)}–{number(estimate.high)}" if estimate.has_interval else ""


def ratio(estimate: Estimate) -> str:
    """Return a ratio with its interval."""
    ends = f" [{interval(estimate)}]" if estimate.has_interval else ""
    return f"{number(estimate.value)}×{ends}"


def time_beside(comparison: Comparison) -> str:
    """Say how much time the design takes, beside its baseline, with the ratio."""
    shown = ratio(comparison.ratio)
    if comparison.ratio.value >= _MANY_TIMES:
        return f"{number(comparison.ratio.value)} times the time ({shown})"
    less_or_more = "less" if comparison.saved >= 0 else "more"
    return f"{share(abs(comparison.saved))} {less_or_more} time ({shown})"


def minutes(value: float) -> str:
    """Return a time that a person waits for: in seconds below two minutes, else in minutes."""
    return f"{value:.0f} seconds" if value < 120 else f"{value / 60:.0f} minutes"


def listed(words: Sequence[str], conjunction: str = "and") -> str:
    """Return the words as one enumeration."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def plural(how_many: int, noun: str) -> str:
    """Return the number and the noun, which forms its plural by an s."""
    return f"{how_many:,} {noun}{'' if how_many == 1 else 's'}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    for scale, unit in units:
        if abs(value) >= scale:
            return f"{number(value / scale)} {unit}"
    scale, unit = units[-1]
    return f"{number(value / scale)} {unit}"
