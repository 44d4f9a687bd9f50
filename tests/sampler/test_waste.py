import math
from collections.abc import Callable

import pytest

from sampler.waste import (
    Disposition,
    Rates,
    Suspended,
    cheapest_eviction,
    discard_waste,
    oracle_waste,
    preserve_waste,
    regret,
    swap_waste,
    waste,
)

Eviction = Callable[[Suspended, Rates], float]

RATES = Rates(
    step_seconds=0.01,
    token_seconds=0.001,
    swap_out_seconds=0.0004,
    swap_in_seconds=0.0006,
    prefill_chunk=100,
)
BUSY = Suspended(num_tokens=210, num_blocks=14, num_running_tokens=1000)
IDLE = Suspended(num_tokens=210, num_blocks=14)


def test_a_prefill_takes_a_step_for_each_chunk_and_time_for_each_token() -> None:
    assert RATES.forward_seconds(210) == pytest.approx(3 * 0.01 + 0.21)
    assert RATES.forward_seconds(0) == 0.0


def test_to_preserve_wastes_the_cache_for_the_whole_call() -> None:
    assert preserve_waste(BUSY, 2.0) == 420.0


def test_to_swap_wastes_the_own_cache_and_those_of_all_others_while_blocks_are_copied() -> None:
    assert swap_waste(BUSY, RATES) == pytest.approx(14 * 0.001 * (210 + 1000))


def test_to_discard_wastes_half_the_own_cache_while_it_grows_and_the_time_of_the_others() -> None:
    assert discard_waste(BUSY, RATES) == pytest.approx(0.24 * 210 / 2 + 0.21 * 1000)
    assert discard_waste(IDLE, RATES) == pytest.approx(0.24 * 210 / 2)


@pytest.mark.parametrize("way_out", [swap_waste, discard_waste])
def test_who_gave_up_its_cache_also_pays_for_the_queue(way_out: Eviction) -> None:
    queued = Rates(0.01, 0.001, 0.0004, 0.0006, requeue_seconds=3.0, prefill_chunk=100)

    assert way_out(BUSY, queued) - way_out(BUSY, RATES) == pytest.approx(3.0 * 210)


def test_the_cheaper_eviction_is_taken() -> None:
    slow_disk = Rates(0.01, 0.001, 0.4, 0.6, prefill_chunk=100)

    assert cheapest_eviction(BUSY, RATES) == (Disposition.SWAP, swap_waste(BUSY, RATES))
    assert cheapest_eviction(BUSY, slow_disk) == (
        Disposition.DISCARD,
        discard_waste(BUSY, slow_disk),
    )


@pytest.mark.parametrize(
    ("disposition", "eviction"),
    [(Disposition.SWAP, swap_waste), (Disposition.DISCARD, discard_waste)],
)
def test_a_decision_costs_what_was_held_and_the_eviction_if_it_came_to_it(
    disposition: Disposition, eviction: Eviction
) -> None:
    at_once = waste(BUSY, RATES, disposition, tool_seconds=5.0)
    later = waste(BUSY, RATES, disposition, tool_seconds=5.0, held_seconds=2.0)
    in_time = waste(BUSY, RATES, disposition, tool_seconds=1.0, held_seconds=2.0)

    assert at_once == eviction(BUSY, RATES)
    assert later == 420.0 + eviction(BUSY, RATES)
    assert in_time == 210.0


def test_what_is_preserved_is_held_to_the_end() -> None:
    assert waste(BUSY, RATES, Disposition.PRESERVE, tool_seconds=9.0) == 9.0 * 210


@pytest.mark.parametrize("tool_seconds", [0.0, 0.01, 0.08, 0.09, 1.0, 60.0])
@pytest.mark.parametrize("held_seconds", [0.0, 0.05, 2.0, math.inf])
@pytest.mark.parametrize("disposition", Disposition)
def test_no_decision_wastes_less_than_the_oracle(
    disposition: Disposition, held_seconds: float, tool_seconds: float
) -> None:
    wasted = waste(BUSY, RATES, disposition, tool_seconds, held_seconds)

    assert wasted >= oracle_waste(BUSY, RATES, tool_seconds)


def test_regret_is_the_share_that_was_wasted_beyond_the_oracle() -> None:
    assert regret([(10.0, 10.0), (13.0, 10.0)]) == pytest.approx(0.15)
