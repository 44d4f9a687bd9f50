"""The tables of experiments: what is in them fits together, and into the time there is."""

import pytest

from sampler.traces import Trace
from scripts.comparison.engines import ENGINES
from scripts.comparison.experiments import EXPERIMENTS, Experiment, experiments, outside
from scripts.comparison.results import Design
from scripts.comparison.trials import Cell

ALL = [
    pytest.param(each, id=f"{'quick' if is_quick else 'full'} {each.name}")
    for is_quick in (True, False)
    for each in experiments(is_quick=is_quick)
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


@pytest.mark.parametrize("experiment", ALL)
def test_the_baseline_is_always_there(experiment: Experiment) -> None:
    for part in experiment.parts:
        assert {Design.STATELESS_CACHE, Design.SUSPENDED} <= set(part.designs)


@pytest.mark.parametrize("experiment", ALL)
def test_noise_is_measured_in_each_experiment(experiment: Experiment) -> None:
    designs = {design for part in experiment.parts for design in part.designs}

    assert {Design.AGAIN, Design.SUSPENDED_AGAIN} <= designs


@pytest.mark.parametrize("experiment", ALL)
def test_workloads_are_ordered_by_what_is_varied(experiment: Experiment) -> None:
    for part in experiment.parts:
        xs = [point.x for point in part.points]
        assert xs == sorted(xs)


def test_there_is_time_for_all() -> None:
    quick = sum(each.budget_seconds for each in experiments(is_quick=True))
    full = sum(each.budget_seconds for each in experiments(is_quick=False))

    assert quick <= 200
    assert 40 * 60 <= full <= 55 * 60


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
