"""The claims of the launch write-up, and whether they held here, by rules that stand in this file.

A claim is judged on differences only, as ``statistics`` has them: what is within the noise counts
as nothing.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scripts.comparison import measures
from scripts.comparison.results import Design
from scripts.comparison.statistics import (
    BASELINE,
    Cell,
    Comparison,
    Estimate,
    Measured,
    median_ratio,
)
from scripts.comparison.wording import count, listed, plural, share, time_beside

MANY_CALLS = 20
LESS_TIME = 0.40
FIRST_TOKEN_SAVED = 0.45
FIRST_TOKEN_ABOUT = 0.40
"""From where on the saved share counts as about ``FIRST_TOKEN_SAVED``."""
SLOW_PACE = (50.0, 80.0)
"""Tokens a second that count as 65."""
FAST_PACE = 1000.0
HIDDEN_SHARE = 0.10
DOMINATING_SHARE = 0.50

_NOT_JUDGED = (
    "It was measured, but not often enough to tell a difference from noise: that takes two rounds, "
    "and a design that is measured twice in each."
)

_FORGETFUL = (Design.STATELESS_CACHE, Design.STATELESS)


class Verdict(StrEnum):
    """What became of a claim."""

    HELD = "held"
    PARTLY = "partly"
    NOT_HELD = "not held"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Evidence:
    """One figure that a verdict rests on."""

    cell: str
    subject: str
    """Of which design, beside which."""
    figure: str
    remark: str


@dataclass(frozen=True)
class Claim:
    """A claim, and what was found."""

    says: str
    rule: str
    """How the verdict is come by."""
    verdict: Verdict
    found: str
    """One sentence."""
    evidence: tuple[Evidence, ...]


def claims(measured: Measured) -> list[Claim]:
    """Return the three claims, judged."""
    return [many_calls(measured), caching(measured), overhead(measured)]


# --- Many calls -----------------------------------------------------------------------------------


def many_calls(measured: Measured) -> Claim:
    """Judge that agent loops with many calls are up to 40 % faster."""
    found = [
        (cell, design, comparison)
        for cell in cells_with_many_calls(measured)
        for design in (Design.SUSPENDED, Design.CHAINED)
        if (comparison := measured.compare(cell, design, measures.end_to_end)) is not None
    ]
    return Claim(
        "Agent loops with 20 or more tool calls are up to 40 % faster end to end.",
        "Read as time: 40 % less of it (40 % more speed would be 29 % less time). Suspended and "
        f"chained, each beside {BASELINE}, without the time of the tools. Held: in the best cell "
        "with 20 or more calls the difference is called one and is 40 % or more. Partly: it is "
        "called one and is less. Not held: in no cell it is called one.",
        _verdict_of_best([comparison for *_, comparison in found]),
        _found_with_many_calls(found),
        tuple(
            Evidence(
                str(cell), f"{design} / {BASELINE}", time_beside(comparison), remark(comparison)
            )
            for cell, design, comparison in found
        ),
    )


def cells_with_many_calls(measured: Measured) -> list[Cell]:
    """Return the cells whose runs call tools 20 times or more often."""

    def num_calls(cell: Cell) -> float:
        found = measured.estimate(cell, BASELINE, measures.num_calls)
        return 0 if found is None else found.value

    return [cell for cell in measured.cells() if num_calls(cell) >= MANY_CALLS]


def _verdict_of_best(comparisons: Sequence[Comparison]) -> Verdict:
    if not any(each.is_judged for each in comparisons):
        return Verdict.NOT_MEASURED
    saved = max((each.saved for each in comparisons if each.is_less), default=None)
    if saved is None:
        return Verdict.NOT_HELD
    return Verdict.HELD if saved >= LESS_TIME else Verdict.PARTLY


def _found_with_many_calls(found: Sequence[tuple[Cell, Design, Comparison]]) -> str:
    if not found:
        return "No run with 20 or more tool calls was measured in both designs."
    if not any(comparison.is_judged for *_, comparison in found):
        return _NOT_JUDGED
    called = [each for each in found if each[2].is_less]
    of_all = f"of {plural(len(found), 'comparison')}"
    if not called:
        return f"None {of_all} shows less time by a difference that is more than noise."
    cell, design, best = max(called, key=lambda each: each[2].saved)
    least = min(comparison.saved for _, _, comparison in called)
    return (
        f"At most {time_beside(best)} ({design}, {cell}); {len(called)} {of_all} show a difference "
        f"in favour, the smallest {share(least)}."
    )


# --- Caching --------------------------------------------------------------------------------------


def caching(measured: Measured) -> Claim:
    """Judge that caching alone makes the first token come about 45 % sooner."""
    total = _first_tokens(measured, _with_caches)
    same_prefix = _first_tokens(measured, _with_caches_but_the_same_prefix)
    return Claim(
        "Caching alone, with requests as they were, makes the time to first token about 45 % "
        "better.",
        f"{BASELINE} beside {Design.STATELESS}, by the server's clock, median over the cells; what "
        "is not called a difference counts as nothing saved. Here the stateless design forgets "
        "the KV prefix as well, which the write-up's did not; so the saved share is also computed "
        "with the prefix kept in both: from the first token with caches, once with the "
        "pre-inference measured with caches and once with that without. Held: both are 40 % or "
        "more. Partly: one of them is. Not held: neither is.",
        _verdict_of_both(total, same_prefix),
        _found_of_caching(total, same_prefix),
        tuple(
            Evidence(str(cell), subject, time_beside(comparison), remark(comparison))
            for subject, group in (
                (f"{BASELINE} / {Design.STATELESS}", total),
                ("the same, prefix kept in both (computed)", same_prefix),
            )
            for cell, comparison in group
        ),
    )


def _first_tokens(
    measured: Measured, ratio_of: Callable[[Measured, Cell], Estimate | None]
) -> list[tuple[Cell, Comparison]]:
    return [
        (cell, Comparison(ratio, measured.noise(cell, measures.first_token)))
        for cell in measured.cells()
        # At an endpoint it is the endpoint that has the KV prefix, and no design forgets it.
        if not measured.is_at_endpoint(cell) and (ratio := ratio_of(measured, cell)) is not None
    ]


def _with_caches(measured: Measured, cell: Cell) -> Estimate | None:
    return median_ratio(
        measured.samples(cell, BASELINE, measures.first_token),
        measured.samples(cell, Design.STATELESS, measures.first_token),
    )


def _with_caches_but_the_same_prefix(measured: Measured, cell: Cell) -> Estimate | None:
    cached = measured.samples(cell, BASELINE, measures.first_token)
    fast = measured.samples(cell, BASELINE, measures.pre_inference)
    slow = measured.samples(cell, Design.STATELESS, measures.pre_inference)
    without = {
        number: cached[number] - fast[number] + slow[number]
        for number in cached.keys() & fast.keys() & slow.keys()
    }
    return median_ratio(cached, without)


def _verdict_of_both(
    total: Sequence[tuple[Cell, Comparison]], same_prefix: Sequence[tuple[Cell, Comparison]]
) -> Verdict:
    if not any(each.is_judged for _, each in total):
        return Verdict.NOT_MEASURED
    are_held = [_typical(group) >= FIRST_TOKEN_ABOUT for group in (total, same_prefix)]
    if all(are_held):
        return Verdict.HELD
    return Verdict.PARTLY if any(are_held) else Verdict.NOT_HELD


def _typical(group: Sequence[tuple[Cell, Comparison]]) -> float:
    """Return the median of what is saved; what is within the noise saves nothing."""
    return statistics.median(_saved(group)) if group else 0.0


def _saved(group: Iterable[tuple[Cell, Comparison]]) -> list[float]:
    return [each.saved if each.is_difference else 0.0 for _, each in group]


def _found_of_caching(
    total: Sequence[tuple[Cell, Comparison]], same_prefix: Sequence[tuple[Cell, Comparison]]
) -> str:
    if not total:
        return "The stateless design was not measured both with caches and without."
    if not any(each.is_judged for _, each in total):
        return _NOT_JUDGED
    saved = _saved(total)
    found = (
        f"Over {plural(len(total), 'cell')} the first token comes {share(_typical(total))} sooner "
        f"with caches (median; from {share(min(saved))} to {share(max(saved))})"
    )
    if not same_prefix:
        return f"{found}; what that is with the prefix kept in both is not known."
    return f"{found}, and {share(_typical(same_prefix))} sooner with the prefix kept in both."


# --- Overhead -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """The overhead of one design at one pace."""

    cell: Cell
    design: Design
    tokens_per_second: float
    share: Estimate

    @property
    def is_hidden(self) -> bool:
        """Whether it hides behind inference."""
        return self.share.high <= HIDDEN_SHARE

    @property
    def is_dominating(self) -> bool:
        """Whether it is more than inference."""
        return self.share.low >= DOMINATING_SHARE


def overhead(measured: Measured) -> Claim:
    """Judge that the API's overhead hides behind slow inference and dominates fast one."""
    shares = overhead_shares(measured, _FORGETFUL)
    slow = [each for each in shares if SLOW_PACE[0] <= each.tokens_per_second <= SLOW_PACE[1]]
    fast = [each for each in shares if each.tokens_per_second >= FAST_PACE]
    return Claim(
        "At 65 tokens a second the API's overhead hides behind inference; at 1,000, with peaks "
        "of 4,000, it dominates.",
        "Overhead is all of a turn but prefill and decode. It hides where it is at most 10 % of "
        "the turn, and dominates from 50 % on; the whole interval has to be on that side. Held: in "
        "each stateless design it hides at 65 and dominates at 1,000. Partly: one half of the "
        "claim holds in one of them, at 1,000 or faster. Not held: neither half does.",
        _verdict_of_paces(slow, fast),
        _found_of_paces(slow, fast),
        tuple(
            Evidence(str(each.cell), each.design, _share_with_interval(each), _remark_on(each))
            for each in shares
        ),
    )


def overhead_shares(measured: Measured, designs: Iterable[Design]) -> list[Share]:
    """Return the share of overhead by pace, over the cells of the experiment that varies it."""
    cells = sorted(measured.cells("pace"), key=measured.x)
    return [
        Share(cell, design, measured.x(cell), found)
        for design in designs
        for cell in cells
        if (found := measured.estimate(cell, design, measures.overhead_share)) is not None
    ]


def _verdict_of_paces(slow: Sequence[Share], fast: Sequence[Share]) -> Verdict:
    if not slow or not fast:
        return Verdict.NOT_MEASURED
    slowest = min(each.tokens_per_second for each in fast)
    at_thousand = [each for each in fast if each.tokens_per_second == slowest]
    if all(each.is_hidden for each in slow) and all(each.is_dominating for each in at_thousand):
        return Verdict.HELD
    if any(each.is_hidden for each in slow) or any(each.is_dominating for each in fast):
        return Verdict.PARTLY
    return Verdict.NOT_HELD


def _found_of_paces(slow: Sequence[Share], fast: Sequence[Share]) -> str:
    if not slow or not fast:
        return (
            "The overhead was not measured both at about 65 tokens a second and at 1,000 or more."
        )
    return f"Overhead is {listed([_at_pace(each) for each in (*slow, *fast)])}."


def _at_pace(each: Share) -> str:
    return (
        f"{share(each.share.value)} of a turn at {count(each.tokens_per_second)} tokens/s "
        f"({each.design})"
    )


def _share_with_interval(each: Share) -> str:
    ends = f" [{share(each.share.low)} – {share(each.share.high)}]"
    return share(each.share.value) + (ends if each.share.has_interval else "")


def _remark_on(each: Share) -> str:
    if each.is_dominating:
        return "dominates"
    return "hides" if each.is_hidden else "neither"


def remark(comparison: Comparison) -> str:
    """Say whether it is a difference."""
    if comparison.is_difference:
        return "a difference"
    if comparison.noise is None:
        return "not called one: no noise floor"
    return f"not called one: noise floor {share(comparison.noise)}"
