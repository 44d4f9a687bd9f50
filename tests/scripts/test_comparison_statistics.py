"""Medians, ratios by rounds, noise floors, and what counts as a difference."""

import math

import pytest

from scripts.comparison import measures
from scripts.comparison.results import Design
from scripts.comparison.statistics import (
    BASELINE,
    Cell,
    Comparison,
    Estimate,
    Measured,
    median,
    median_ratio,
    merged,
    quantile_bounds,
)
from tests.scripts.example_results import Times, paired, split, trial, turn

CELL = Cell("calls", "int4", "20 calls")
FOUR = {
    Design.STATELESS_CACHE: 2.0,
    Design.AGAIN: 2.0,
    Design.SUSPENDED: 1.0,
    Design.SUSPENDED_AGAIN: 1.0,
}


def compared(
    seconds: Times, *, num_rounds: int = 5, noise: float = 0.0, seed: int = 0
) -> Comparison:
    measured = Measured(paired(seconds, num_rounds=num_rounds, noise=noise, seed=seed))
    comparison = measured.compare(CELL, Design.SUSPENDED, measures.end_to_end)
    assert comparison is not None
    return comparison


# --- Estimates ------------------------------------------------------------------------------------


def test_an_estimate_is_the_median_within_an_interval_of_what_was_seen() -> None:
    samples = [1.0, 2.0, 3.0, 4.0, 100.0]

    found = median(samples)

    assert found.value == 3.0
    assert 1.0 <= found.low < 3.0 < found.high <= 100.0
    assert found.num_samples == 5


def test_a_single_sample_has_no_interval() -> None:
    assert median([7.0]) == Estimate(7.0, 7.0, 7.0, 1)
    assert not median([7.0]).has_interval


def test_equal_samples_have_an_interval_of_no_width() -> None:
    assert median([7.0, 7.0, 7.0]) == Estimate(7.0, 7.0, 7.0, 3)


def test_two_samples_have_their_range_as_interval() -> None:
    assert median([1.0, 3.0]) == Estimate(2.0, 1.0, 3.0, 2)


def test_an_interval_is_the_same_each_time() -> None:
    samples = [0.1 * number**2 for number in range(9)]

    first, second = median(samples), median([float(sample) for sample in samples])

    assert first == second


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    # The median of ten of a uniform distribution; a percentile bootstrap is a little too narrow.
    trials = paired({BASELINE: 1.0}, num_rounds=2000, noise=0.0, num_turns=1)
    seconds = [each.runs[0].seconds for each in trials]
    estimates = [median(seconds[start : start + 10]) for start in range(0, 2000, 10)]

    held = sum(each.low <= 1.05 <= each.high for each in estimates) / len(estimates)

    assert 0.87 <= held <= 0.99


# --- Ratios ---------------------------------------------------------------------------------------


def test_a_ratio_is_taken_round_by_round() -> None:
    # The machine was half as fast in the second round: that is no spread of the ratio.
    ratio = median_ratio({0: 1.0, 1: 2.0}, {0: 2.0, 1: 4.0})

    assert ratio == Estimate(0.5, 0.5, 0.5, 2)


def test_rounds_that_only_one_design_has_are_left_out() -> None:
    assert median_ratio({0: 1.0, 1: 9.0}, {0: 2.0, 2: 4.0}) == Estimate(0.5, 0.5, 0.5, 1)
    assert median_ratio({0: 1.0}, {1: 1.0}) is None


def test_nothing_has_no_ratio() -> None:
    assert median_ratio({0: 1.0, 1: 0.0}, {0: 0.0, 1: 1.0}) is None


# --- Differences ----------------------------------------------------------------------------------


def test_a_design_that_is_twice_as_fast_is_a_difference() -> None:
    comparison = compared(FOUR)

    assert comparison.ratio.value == pytest.approx(0.5)
    assert comparison.saved == pytest.approx(0.5)
    assert comparison.is_less
    assert not comparison.is_more


def test_a_design_that_is_twice_as_slow_is_a_difference() -> None:
    comparison = compared(FOUR | {Design.SUSPENDED: 4.0, Design.SUSPENDED_AGAIN: 4.0})

    assert comparison.is_more
    assert not comparison.is_less


@pytest.mark.parametrize("seed", range(8))
def test_equals_that_are_noisy_are_no_difference(seed: int) -> None:
    comparison = compared(dict.fromkeys(FOUR, 1.0), noise=0.05, seed=seed)

    assert not comparison.is_difference


@pytest.mark.parametrize("seed", range(8))
def test_a_design_and_the_same_again_are_no_difference(seed: int) -> None:
    measured = Measured(paired(FOUR, noise=0.05, num_rounds=3, seed=seed))

    again = measured.compare(CELL, Design.AGAIN, measures.end_to_end)

    assert again is not None
    assert not again.is_difference


def test_a_ratio_within_the_noise_floor_is_no_difference() -> None:
    # Each figure is exact, so the interval excludes 1; but equals differ by more.
    comparison = compared(FOUR | {Design.SUSPENDED: 1.9, Design.AGAIN: 2.2})

    assert comparison.noise == pytest.approx(0.9)  # suspended, again is off by more
    assert comparison.ratio.high < 1
    assert not comparison.is_difference


def test_the_noise_floor_is_the_same_for_a_half_and_for_two() -> None:
    slower = Comparison(Estimate(2.0, 1.9, 2.1, 5), noise=0.9)
    faster = Comparison(Estimate(0.5, 0.45, 0.55, 5), noise=0.9)

    assert slower.is_more
    assert faster.is_less


def test_nothing_is_called_a_difference_without_a_noise_floor() -> None:
    comparison = compared({Design.STATELESS_CACHE: 2.0, Design.SUSPENDED: 1.0})

    assert comparison.noise is None
    assert not comparison.is_judged
    assert not comparison.is_difference


def test_nothing_is_called_a_difference_after_a_single_round() -> None:
    comparison = compared(FOUR, num_rounds=1)

    assert comparison.ratio.value == pytest.approx(0.5)
    assert not comparison.is_difference


def test_a_cell_is_not_thought_quieter_than_half_of_its_engine() -> None:
    off = {Design.STATELESS_CACHE: 1.0, Design.AGAIN: 1.1}
    exact = {Design.STATELESS_CACHE: 1.0, Design.AGAIN: 1.0}
    trials = [
        *paired(off, workload="1 call", x=1),
        *paired(off, workload="5 calls", x=5),
        *paired(exact),
        *paired(exact, engine="simulated 1000"),
    ]

    measured = Measured(trials)

    assert measured.noise(CELL, measures.end_to_end) == pytest.approx(0.1)
    other = Cell("calls", "simulated 1000", "20 calls")
    assert measured.noise(other, measures.end_to_end) == pytest.approx(0.0)


# --- Trials by cell -------------------------------------------------------------------------------


def test_cells_are_ordered_by_what_is_varied() -> None:
    one = {BASELINE: 1.0}
    measured = Measured(
        [*paired(one, x=20), *paired(one, workload="5 calls", x=5), *paired(one, engine="other")]
    )

    assert [cell.workload for cell in measured.cells("calls", "int4")] == ["5 calls", "20 calls"]
    assert measured.engines() == ["int4", "other"]
    assert measured.num_rounds(CELL) == 5


def test_the_cached_baseline_comes_first_and_what_is_unknown_last() -> None:
    names = ["llama.cpp server", *FOUR, Design.STATELESS]
    measured = Measured(paired(dict.fromkeys(reversed(names), 1.0)))

    designs = measured.designs(CELL)

    assert designs[0] == Design.STATELESS_CACHE
    assert designs[-1] == "llama.cpp server"
    assert len(designs) == len(names)


def test_what_was_not_measured_has_no_estimate() -> None:
    measured = Measured(paired({BASELINE: 1.0}))

    assert measured.estimate(CELL, Design.CHAINED, measures.end_to_end) is None
    assert measured.estimate(CELL, BASELINE, measures.counted("unheard_of")) is None
    assert measured.compare(CELL, Design.CHAINED, measures.end_to_end) is None


# --- Measures -------------------------------------------------------------------------------------


def test_counts_are_those_of_one_agent_run() -> None:
    turns = [turn(split(decode=0.1), tokens_forwarded=30, bytes_sent=500)] * 4

    two = trial(BASELINE, turns, concurrency=2)

    assert measures.counted("tokens_forwarded")(two) == 120
    assert measures.bytes_sent(two) == 2000
    assert measures.items_classified(two) == 8
    assert measures.num_calls(two) == 3


def test_resume_leaves_out_the_first_turn() -> None:
    first, later = turn(split(prefill=5.0)), turn(split(prefill=1.0))

    assert measures.resume(trial(BASELINE, [first, later])) == pytest.approx(1.0)
    assert measures.resume(trial(BASELINE, [first])) is None


def test_overhead_is_all_but_prefill_and_decode() -> None:
    parts = split(network=0.1, pre_inference=0.3, prefill=0.2, decode=0.3, post_inference=0.1)

    share = measures.overhead_share(trial(BASELINE, [turn(parts)]))

    assert share == pytest.approx(0.5)


def test_the_parts_of_a_turn_are_the_turn() -> None:
    parts = split(network=-0.001, pre_inference=0.3, prefill=0.2, decode=0.3, post_inference=0.1)
    one = trial(BASELINE, [turn(parts)])

    means = [measures.mean_part(part.name)(one) for part in measures.PARTS]

    assert sum(mean or 0.0 for mean in means) == pytest.approx(one.runs[0].seconds)


# --- The event loop's lag -------------------------------------------------------------------------


def test_a_quantile_is_found_in_its_bucket() -> None:
    histogram = {"0.001": 90.0, "0.01": 98.0, "+Inf": 100.0}

    assert quantile_bounds(histogram, 0.5) == (0.0, 0.001)
    assert quantile_bounds(histogram, 0.95) == (0.001, 0.01)
    assert quantile_bounds(histogram, 0.99) == (0.01, math.inf)


def test_no_observations_have_no_quantile() -> None:
    assert quantile_bounds({}, 0.5) is None
    assert quantile_bounds({"0.001": 0.0, "+Inf": 0.0}, 0.5) is None


def test_histograms_are_added_bound_by_bound() -> None:
    both = merged([{"0.1": 1.0, "+Inf": 2.0}, {"0.1": 3.0, "+Inf": 3.0}, {}])

    assert both == {"0.1": 4.0, "+Inf": 5.0}
