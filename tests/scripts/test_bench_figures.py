"""Medians, spreads and ratios, and how they are shown."""

import pytest

from scripts.benchmarks.figures import Figure, figure, number, ratio
from scripts.benchmarks.section import Grid, Section


def test_a_figure_is_its_median_with_its_spread() -> None:
    times = figure([5.0, 1.0, 2.0, 4.0, 3.0], "ms")

    assert times.median == 3.0
    assert (times.low, times.high) == (1.0, 5.0)
    assert times.quartiles == (2.0, 4.0)
    assert times.as_json() == {
        "unit": "ms",
        "median": 3.0,
        "low": 1.0,
        "high": 5.0,
        "q1": 2.0,
        "q3": 4.0,
        "repeats": 5,
    }


def test_a_single_sample_has_no_spread() -> None:
    once = figure([7.0], "ms")

    assert once.quartiles == (7.0, 7.0)
    assert str(once) == "7"


def test_a_figure_shows_its_lowest_and_its_highest_sample() -> None:
    assert str(figure([110.4, 120.0, 90.0], "tokens/s")) == "110 (90..120)"


def test_a_ratio_is_taken_round_by_round() -> None:
    # The machine was half as fast in the second round: that is no spread of the ratio.
    ours, theirs = figure([100.0, 50.0], "tokens/s"), figure([50.0, 25.0], "tokens/s")

    assert ratio(ours, theirs) == Figure((2.0, 2.0), "x")


def test_a_ratio_of_different_rounds_is_that_of_the_medians() -> None:
    assert ratio(figure([6.0, 9.0, 8.0], "s"), figure([4.0], "s")) == Figure((2.0,), "x")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (12345.6, "12,346"),
        (110.4, "110"),
        (11.04, "11.0"),
        (1.104, "1.10"),
        (0.9998, "1.000"),
        (0.0123456, "0.0123"),
        (20.0, "20"),
        (0.0, "0"),
        (-0.51, "-0.510"),
    ],
)
def test_numbers_are_shown_with_about_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_grid_has_the_columns_of_all_its_rows() -> None:
    one = figure([1.0], "x")
    grid = Grid("g", {"a": {"first": one}, "b": {"first": one, "second": one}})

    assert grid.columns() == ["first", "second"]
    assert grid.table().row_count == 2
    assert grid.as_json()["a"] == {"first": one.as_json()}


def test_a_section_as_json_holds_grids_settings_and_notes() -> None:
    one = figure([1.0], "x")
    section = Section("s", "title", [Grid("g", {"a": {"b": one}})], {"threads": 2}, ["noisy"])

    assert section.as_json() == {
        "title": "title",
        "settings": {"threads": 2},
        "grids": {"g": {"a": {"b": one.as_json()}}},
        "notes": ["noisy"],
    }
