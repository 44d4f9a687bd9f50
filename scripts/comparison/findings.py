"""What the figures say, in sentences: each is made from the data, by a rule that stands here."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.comparison import measures
from scripts.comparison.agreement import REFERENCE, disagrees
from scripts.comparison.claims import MANY_CALLS, overhead_shares
from scripts.comparison.results import Agreement, Design
from scripts.comparison.statistics import BASELINE, Cell, Comparison, Measured
from scripts.comparison.wording import count, listed, plural, ratio, seconds, share, time_beside

SMALL = 0.05
"""A saved share of the time below which nobody would change a design for it."""


def is_simulated(engine: str) -> bool:
    """Say whether an engine has a pace in place of a model."""
    return engine.startswith("simulated")


def endpoint_tells_times(measured: Measured) -> bool:
    """Say whether each turn that an endpoint sampled came with the endpoint's own times."""
    return all(
        turn.endpoint is None or turn.endpoint.times is not None
        for cell in measured.cells()
        for trial in measured.all_trials(cell)
        for turn in measures.turns(trial)
    )


def headline(measured: Measured, engine: str) -> Cell | None:
    """Return the cell that stands for an engine: about 20 calls, measured in both main designs.

    Of those with 20 or more calls the one with the fewest, else the one with the most. The
    experiment on the number of calls comes first, then that on the pace, then any.
    """
    cells = [cell for cell in measured.cells(engine=engine) if _has_both(measured, cell)]
    if not cells:
        return next(iter(measured.cells(engine=engine)), None)
    first = min(_rank(cell) for cell in cells)
    return min(
        (cell for cell in cells if _rank(cell) == first),
        key=lambda cell: _distance_from_many(num_calls(measured, cell)),
    )


def _has_both(measured: Measured, cell: Cell) -> bool:
    return {BASELINE, Design.SUSPENDED} <= set(measured.designs(cell))


def _rank(cell: Cell) -> int:
    experiments = ("calls", "pace")
    return experiments.index(cell.experiment) if cell.experiment in experiments else 2


def _distance_from_many(calls: float) -> tuple[bool, float]:
    return calls < MANY_CALLS, abs(calls - MANY_CALLS)


def num_calls(measured: Measured, cell: Cell) -> float:
    """Return after how many turns of a run tools ran."""
    found = [measured.estimate(cell, name, measures.num_calls) for name in measured.designs(cell)]
    return max((each.value for each in found if each is not None), default=0)


# --- The answer -----------------------------------------------------------------------------------


def answer(measured: Measured) -> list[str]:
    """Return the answer in at most three sentences: how much, when, and when not."""
    said = (_how_much(measured), _how_it_depends(measured), _when_not(measured))
    return [sentence for sentence in said if sentence] or [
        f"Nothing was measured both in {Design.SUSPENDED} and in {BASELINE}, so there is no answer."
    ]


def _how_much(measured: Measured) -> str:
    engines = sorted(measured.engines(), key=is_simulated)
    for engine in engines:
        cell = headline(measured, engine)
        comparison = cell and measured.compare(cell, Design.SUSPENDED, measures.end_to_end)
        if cell and comparison:
            return (
                f"With {plural(round(num_calls(measured, cell)), 'tool call')} on {engine}, beside "
                "stateless requests with warm caches, an agent run that stays suspended takes "
                f"{_time(comparison)} end to end{_others(measured, cell)}."
            )
    return ""


def _time(comparison: Comparison) -> str:
    if comparison.is_difference:
        return time_beside(comparison)
    shown = ratio(comparison.ratio)
    if comparison.noise is None or not comparison.ratio.has_interval:
        return f"{time_beside(comparison)} (not to be told from noise yet)"
    return f"the same time within the noise ({shown}, noise floor {share(comparison.noise)})"


def _others(measured: Measured, cell: Cell) -> str:
    said = []
    caches = "caches but the endpoint's" if measured.is_at_endpoint(cell) else "any cache"
    for design, named in (
        (Design.CHAINED, "chained by previous_response_id over one WebSocket it takes"),
        (Design.STATELESS, f"stateless without {caches}"),
    ):
        comparison = measured.compare(cell, design, measures.end_to_end)
        if comparison is not None:
            said.append(f"{named} {_time(comparison)}")
    return f"; {listed(said)}" if said else ""


def _how_it_depends(measured: Measured) -> str:
    compared = [
        (measured.x(cell), comparison)
        for cell in sorted(measured.cells("pace"), key=measured.x)
        if (comparison := measured.compare(cell, Design.SUSPENDED, measures.end_to_end)) is not None
    ]
    if len(compared) < 2:
        return ""
    said = [f"{_saved(comparison)} at {count(pace)} tokens/s" for pace, comparison in compared]
    saved = [comparison.saved for _, comparison in compared]
    trend = ""
    if saved == sorted(saved) and compared[-1][1].is_less:
        trend = ": the faster the model, the more it matters how the run is held"
    return f"At a given pace of the model, it saves {listed(said)}{trend}."


def _saved(comparison: Comparison) -> str:
    if not comparison.is_difference:
        return "nothing that can be told from noise"
    return share(comparison.saved)


def _when_not(measured: Measured) -> str:
    compared = judged_cells(measured)
    indifferent = {each.cell for each in indifferences(measured)}
    if not compared:
        return ""
    by_engine = []
    for engine in dict.fromkeys(cell.engine for cell in compared):
        flags = [cell in indifferent for cell in compared if cell.engine == engine]
        if any(flags):
            by_engine.append(f"{sum(flags)} of {len(flags)} on {engine}")
    where = f" ({', '.join(by_engine)})" if by_engine else ""
    return (
        f"In {len(indifferent)} of {plural(len(compared), 'cell')} it does not matter: suspended "
        f"is not faster by more than the noise, or by less than {share(SMALL)} of the time with "
        f"tools{where}."
    )


# --- When it does not matter ----------------------------------------------------------------------


@dataclass(frozen=True)
class Indifference:
    """A cell in which a suspended run is not worth having, as far as time goes."""

    cell: Cell
    comparison: Comparison
    """Without the time of the tools."""
    with_tools: Comparison | None
    reason: str


def judged_cells(measured: Measured) -> list[Cell]:
    """Return the cells in which suspended and the cached baseline can be told apart, or not."""
    return [
        cell
        for cell in measured.cells()
        if (comparison := measured.compare(cell, Design.SUSPENDED, measures.end_to_end)) is not None
        and comparison.is_judged
    ]


def indifferences(measured: Measured) -> list[Indifference]:
    """Return the cells in which suspended is not faster than the cached baseline by 5 %."""
    found = []
    for cell in judged_cells(measured):
        comparison = measured.compare(cell, Design.SUSPENDED, measures.end_to_end)
        with_tools = measured.compare(cell, Design.SUSPENDED, measures.wall)
        assert comparison is not None
        reason = reason_not_to_care(comparison, with_tools)
        if reason:
            found.append(Indifference(cell, comparison, with_tools, reason))
    return found


def reason_not_to_care(comparison: Comparison, with_tools: Comparison | None) -> str:
    """Return why a cell's difference does not matter; empty where it does."""
    if comparison.is_more:
        return "suspended is slower"
    if not comparison.is_difference:
        return "within the noise"
    if comparison.saved < SMALL:
        return f"less than {share(SMALL)}"
    if with_tools is not None and with_tools.saved < SMALL:
        return f"less than {share(SMALL)} of the time with tools"
    return ""


def where_not(measured: Measured) -> list[str]:
    """Return where it does not matter: for each experiment and engine the stretch of workloads."""
    indifferent = {each.cell for each in indifferences(measured)}
    said = []
    for name, cells in _rows(measured):
        flags = [cell in indifferent for cell in cells]
        if any(flags):
            said.append(f"{name}: {_stretch([cell.workload for cell in cells], flags)}")
    return said


def _rows(measured: Measured) -> list[tuple[str, list[Cell]]]:
    """Return, by ``x``, the cells between which one thing is varied and all else is the same."""
    compared = judged_cells(measured)
    rows = []
    for experiment in dict.fromkeys(cell.experiment for cell in compared):
        cells = [cell for cell in compared if cell.experiment == experiment]
        engines = list(dict.fromkeys(cell.engine for cell in cells))
        if len(engines) == len(cells) == len({cell.workload for cell in cells}) > 1:
            # It is the engine that is varied.
            rows.append((experiment, sorted(cells, key=measured.x)))
            continue
        for engine in engines:
            of_engine = [cell for cell in cells if cell.engine == engine]
            rows.append((f"{experiment}, {engine}", of_engine))
    return rows


def _stretch(labels: Sequence[str], flags: Sequence[bool]) -> str:
    named = [label for label, flag in zip(labels, flags, strict=True) if flag]
    if len(named) == 1:
        return f"at {named[0]}"
    if all(flags):
        return f"in all {len(flags)}"
    if all(flags[: len(named)]):
        return f"up to {named[-1]}"
    if all(flags[-len(named) :]):
        return f"from {named[0]} on"
    return f"at {listed(named)}"


# --- Whether it is the same run -------------------------------------------------------------------


def disagreements(agreements: Sequence[Agreement]) -> list[str]:
    """Return which designs sampled other tokens than the suspended one, of those that must not."""
    return [
        f"{each.design} ({each.sampler}): {each.num_runs - each.equal_runs} of "
        f"{plural(each.num_runs, 'run')} sampled other tokens than {REFERENCE}, and "
        f"{each.drifted_turns} of {plural(each.num_turns, 'turn')} went on from other ones."
        for each in agreements
        if disagrees(each)
    ]


# --- What is left ---------------------------------------------------------------------------------


def what_is_left(measured: Measured) -> list[str]:
    """Return, for each engine, the largest part of a suspended turn's time, and of its overhead."""
    return [said for engine in measured.engines() if (said := _left_on(measured, engine))]


def _left_on(measured: Measured, engine: str) -> str:
    cell = headline(measured, engine)
    parts = {} if cell is None else parts_of(measured, cell, Design.SUSPENDED)
    total = sum(parts.values())
    if cell is None or total <= 0:
        return ""
    ranked = sorted(measures.PARTS, key=lambda part: parts[part.name], reverse=True)
    rest = next(part for part in ranked if not part.is_inference)
    largest = ranked[0]
    said = (
        f"{engine} ({cell.workload}): the largest share of a suspended turn of {seconds(total)} is "
        f"{largest.title}, {share(parts[largest.name] / total)}"
    )
    if rest is largest:
        return f"{said}."
    return (
        f"{said}; of what is not inference, {rest.title}, {seconds(parts[rest.name])} "
        f"({share(parts[rest.name] / total)})."
    )


def parts_of(measured: Measured, cell: Cell, design: str) -> dict[str, float]:
    """Return the mean seconds of each part of a turn; empty where the server does not tell."""
    found = {
        part.name: measured.estimate(cell, design, measures.mean_part(part.name))
        for part in measures.PARTS
    }
    return {name: each.value for name, each in found.items() if each is not None}


def dominates_from(measured: Measured, design: Design) -> str:
    """Say from which pace on overhead is more than inference in ``design``."""
    shares = overhead_shares(measured, [design])
    if not shares:
        return ""
    first = next((each for each in shares if each.is_dominating), None)
    if first is None:
        return "nowhere more than inference in what was measured"
    return f"more than inference from {count(first.tokens_per_second)} tokens/s on"
