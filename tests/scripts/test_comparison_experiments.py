"""The tables of experiments: what is in them fits together, and into the time there is."""

from pathlib import Path

import pytest

from sampler.chat_template import ChatMLFormat
from sampler.traces import Trace
from scripts.comparison.comparison import USUAL, Choices, Comparison
from scripts.comparison.engines import ENGINES
from scripts.comparison.experiments import (
    EXPERIMENTS,
    Experiment,
    Part,
    at_endpoint,
    experiments,
    outside,
)
from scripts.comparison.make_traces import Figures, figures_of
from scripts.comparison.results import Design
from scripts.comparison.trials import Cell
from tests.sampler.smollm2 import smollm2_tokenizer

ALL = [
    pytest.param(each, id=f"{'quick' if is_quick else 'full'} {each.name}")
    for is_quick in (True, False)
    for each in experiments(is_quick=is_quick)
]
PARTS = [
    pytest.param(part, id=f"{'quick' if is_quick else 'full'} {each.name} {number}")
    for is_quick in (True, False)
    for each in (*experiments(is_quick=is_quick), at_endpoint("endpoint", is_quick=is_quick))
    for number, part in enumerate(each.parts)
]


@pytest.mark.parametrize("is_quick", [True, False])
def test_all_experiments_are_made_in_order(is_quick: bool) -> None:
    names = [each.name for each in experiments(is_quick=is_quick)]

    assert tuple(names) == EXPERIMENTS


@pytest.mark.parametrize("experiment", ALL)
def test_each_engine_is_known(experiment: Experiment) -> None:
    assert set(experiment.engines) <= set(ENGINES)


@pytest.mark.parametrize("experiment", ALL)
def test_a_label_means_one_workload(experiment: Experiment) -> None:
    points = [point for part in experiment.parts for point in part.points]

    assert len({(p.x, p.workload.label) for p in points}) == len({p.x for p in points})
    for point in points:
        same = [p.workload for p in points if p.workload.label == point.workload.label]
        assert all(workload == point.workload for workload in same)


@pytest.mark.parametrize("is_quick", [True, False])
def test_traces_of_one_name_are_one(is_quick: bool) -> None:
    traces: dict[str, Trace] = {}
    for experiment in experiments(is_quick=is_quick):
        for trace in experiment.traces():
            assert traces.setdefault(trace.name, trace) == trace


@pytest.mark.parametrize("part", PARTS)
def test_the_baseline_and_suspended_are_measured_twice_in_each_part(part: Part) -> None:
    assert {
        *(Design.STATELESS_CACHE, Design.AGAIN),
        *(Design.SUSPENDED, Design.SUSPENDED_AGAIN),
    } <= set(part.designs)


@pytest.mark.parametrize("experiment", ALL)
def test_workloads_are_ordered_by_what_is_varied(experiment: Experiment) -> None:
    for part in experiment.parts:
        xs = [point.x for point in part.points]
        assert xs == sorted(xs)


# --- Time ----------------------------------------------------------------------------------------

REAL_RATES = 200.0, 1200.0
"""Tokens that the real model samples and reads in a second on two cores, at the least."""
REST_SECONDS = 0.1
"""That the server and the client rest around a trial."""


_figures: dict[str, Figures] = {}
"""By the name of a trace, as far as they were asked for."""


def figures(trace: Trace) -> Figures:
    """Return how many tokens there are, which is the same for all traces of a name."""
    if trace.name not in _figures:
        tokenizer = smollm2_tokenizer()
        _figures[trace.name] = figures_of(trace, tokenizer, ChatMLFormat(tokenizer))
    return _figures[trace.name]


def rates(engine: str) -> tuple[float, float]:
    """Return how many tokens an engine samples and reads in a second."""
    options = dict(zip(ENGINES[engine][::2], ENGINES[engine][1::2], strict=True))
    if "--simulate" not in options:
        return REAL_RATES
    return float(options["--simulate"]), float(options["--simulate-prefill"])


def least_seconds(cell: Cell) -> float:
    """Return what a trial takes if there is nothing but inference and tools."""
    found = figures(cell.workload.trace)
    sampled, read = rates(cell.engine)
    forgets = cell.design in (Design.STATELESS, Design.STATELESS_RECONNECT)
    num_read = found.input_tokens - (0 if forgets else found.reread_tokens)
    busy = found.output_tokens / sampled + num_read / read
    # An accelerator has room for all agents at once; two cores do not.
    at_once = 1 if "simulated" in cell.engine else cell.workload.concurrency
    return at_once * busy + tool_seconds(cell.workload.trace) + REST_SECONDS


def tool_seconds(trace: Trace) -> float:
    """Return how long the tools run, those of a turn side by side."""
    return sum(max((call.seconds for call in turn.calls), default=0.0) for turn in trace.turns)


@pytest.mark.slow
@pytest.mark.parametrize("is_quick", [True, False])
def test_a_warm_up_and_two_rounds_fit_into_a_budget(is_quick: bool) -> None:
    for experiment in experiments(is_quick=is_quick):
        warm_up = experiment.warm_up_cells(list(Design), is_quick=is_quick)
        rounds = [cell for number in range(2) for cell in experiment.cells(list(Design), number)]

        needed = sum(map(least_seconds, [*warm_up, *rounds]))

        assert needed <= experiment.budget_seconds, experiment.name


@pytest.mark.parametrize(("is_quick", "minutes"), [(True, 5), (False, 75)])
def test_all_that_is_usual_is_made_in_the_time_that_is_told(
    is_quick: bool, minutes: int, tmp_path: Path
) -> None:
    comparison = Comparison(Choices(is_quick=is_quick), "", tmp_path, Unseen())

    assert comparison.names == list(USUAL)
    assert sum(map(comparison.budget_seconds, USUAL)) <= 60 * minutes


class Unseen:
    """Observes nothing."""

    def began(self, name: str, doing: str) -> None:
        pass

    def doing(self, what: str, done: int, total: int) -> None:
        pass

    def ended(self, name: str, what: str) -> None:
        pass


# --- Cells ---------------------------------------------------------------------------------------


def test_designs_of_a_workload_lie_side_by_side() -> None:
    context = experiments(is_quick=True)[1]

    cells = context.cells([Design.SUSPENDED, Design.STATELESS], 1)

    assert [(cell.workload.label, cell.design) for cell in cells] == [
        ("256 tokens", Design.STATELESS),
        ("256 tokens", Design.SUSPENDED),
        ("3000 tokens", Design.STATELESS),
        ("3000 tokens", Design.SUSPENDED),
    ]


def test_the_order_rotates() -> None:
    context = experiments(is_quick=True)[1]

    def first(round_number: int) -> Cell:
        return context.cells([Design.SUSPENDED, Design.STATELESS], round_number)[0]

    assert first(0).design is Design.SUSPENDED
    assert first(1).design is Design.STATELESS


def test_designs_that_are_not_wanted_are_left_out() -> None:
    connections = experiments(is_quick=True)[6]

    assert connections.cells([], 0) == []
    assert {cell.design for cell in connections.cells([Design.CHAINED], 0)} == {Design.CHAINED}


def test_a_quick_warm_up_is_small_and_a_full_one_large() -> None:
    calls = experiments(is_quick=False)[0]

    quick = calls.warm_up_cells([Design.SUSPENDED], is_quick=True)
    full = calls.warm_up_cells([Design.SUSPENDED], is_quick=False)

    assert {len(cell.workload.trace.turns) for cell in quick} == {2}
    assert max(len(cell.workload.trace.turns) for cell in full) == 44


@pytest.mark.parametrize("is_quick", [True, False])
def test_outside_servers_are_given_calls_too(is_quick: bool) -> None:
    point = outside(is_quick=is_quick)

    assert len(point.workload.trace.turns) == point.x + 1
