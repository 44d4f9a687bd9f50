import math

import pytest

from sampler.tool_times import RemainingTime, ToolTimes

PRECISION = 2**0.25
"""By so much a call may be remembered as longer than it was."""


# ------------------------------------------------------------------------------ remaining time


def test_probability_and_mean_of_a_mixture_are_those_of_its_parts() -> None:
    remaining = RemainingTime(((1.0, 2.0), (4.0, 1.0)), tail_weight=1.0, tail_scale=2.0)

    assert remaining.exceeds(0.0) == 1.0
    assert remaining.exceeds(2.0) == pytest.approx((1 + 0.5) / 4)
    assert remaining.expected(2.0) == pytest.approx((2 * 1 + 1 * 2 + 2 * math.log(2)) / 4)


def test_one_pass_over_the_values_gives_what_each_question_alone_gives() -> None:
    remaining = RemainingTime(((0.5, 2.0), (1.0, 0.3), (9.0, 1.0)), 0.7, 0.2)

    for value, expected, exceeds in remaining.at_values():
        assert expected == pytest.approx(remaining.expected(value))
        assert exceeds == pytest.approx(remaining.exceeds(value))


def test_the_mean_up_to_a_limit_is_the_area_under_the_probability_to_exceed() -> None:
    remaining = RemainingTime(((0.5, 2.0), (1.7, 1.0)), 1.0, 0.3)
    steps = 20_000

    area = sum(remaining.exceeds(3.0 * (i + 0.5) / steps) for i in range(steps)) * 3.0 / steps

    assert remaining.expected(3.0) == pytest.approx(area, rel=1e-3)


# ---------------------------------------------------------------------------------- tool times


@pytest.mark.parametrize("elapsed", [1.0, 10.0, 100.0])
def test_a_call_of_an_unknown_tool_is_as_likely_as_not_to_take_as_long_again(
    elapsed: float,
) -> None:
    remaining = ToolTimes().remaining(["unknown"], elapsed)

    assert remaining.exceeds(elapsed) == pytest.approx(0.5, abs=0.05)


def test_a_tool_is_expected_to_take_what_it_took() -> None:
    times = ToolTimes()
    for _ in range(20):
        times.observe(["search"], 2.0)

    remaining = times.remaining(["search"], 0.0)

    assert remaining.exceeds(1.9) > 0.9
    assert remaining.exceeds(2.0 * PRECISION) < 0.1


def test_what_a_call_has_taken_already_is_not_expected_again() -> None:
    times = ToolTimes()
    for _ in range(20):
        times.observe(["search"], 2.0)

    assert times.remaining(["search"], 1.5).expected(60.0) < 1.0


@pytest.mark.parametrize("seconds", [0.0, 0.0013, 0.2, 1.0, 7.3, 4000.0])
def test_a_call_is_never_remembered_as_shorter_than_it_was(seconds: float) -> None:
    times = ToolTimes()
    times.observe(["search"], seconds)

    ((remembered, _),) = times.remaining(["search"], -1e-9).values

    assert seconds <= remembered <= max(seconds, 1e-3) * PRECISION * (1 + 1e-6)


def test_two_habits_of_a_tool_stay_two() -> None:
    times = ToolTimes()
    for seconds in [0.1, 0.1, 0.1, 60.0] * 10:
        times.observe(["search"], seconds)

    remaining = times.remaining(["search"], 0.0)

    assert remaining.exceeds(0.2) == pytest.approx(remaining.exceeds(59.0), abs=0.05)
    assert remaining.exceeds(1.0) == pytest.approx(0.25, abs=0.08)


def test_a_call_longer_than_any_before_is_like_one_of_an_unknown_tool() -> None:
    times = ToolTimes()
    for _ in range(50):
        times.observe(["search"], 0.5)

    assert times.remaining(["search"], 8.0).exceeds(8.0) == pytest.approx(0.5, abs=0.05)


def test_recent_calls_count_more() -> None:
    times = ToolTimes()
    for seconds in [0.1] * 100 + [30.0] * 40:
        times.observe(["search"], seconds)

    assert times.remaining(["search"], 0.0).exceeds(20.0) > 0.8


def test_tools_called_together_are_learned_together_in_whatever_order() -> None:
    times = ToolTimes()
    times.observe(["build", "search", "search"], 9.0)

    remaining = times.remaining(["search", "build"], 0.0)

    assert remaining.values
    assert not times.remaining(["search"], 0.0).values


def test_tools_never_called_together_take_as_long_as_the_slowest_of_them() -> None:
    times = ToolTimes()
    times.observe(["search"], 0.1)
    times.observe(["build"], 30.0)

    together = times.remaining(["search", "unknown", "build"], 0.0)

    assert together == times.remaining(["build"], 0.0)


def test_the_tools_longest_not_called_are_forgotten_where_clients_name_too_many() -> None:
    times = ToolTimes()
    times.observe(["first"], 1.0)
    times.observe(["used"], 1.0)
    for index in range(999):
        times.observe([f"tool {index}"], 1.0)
        times.observe(["used"], 1.0)

    assert not times.remaining(["first"], 0.0).values
    assert times.remaining(["used"], 0.0).values
