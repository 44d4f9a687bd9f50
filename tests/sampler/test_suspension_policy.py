import math
import random
from collections.abc import Callable, Hashable
from dataclasses import replace

import pytest

from sampler.suspension_policy import (
    TIME_LIMIT_SECONDS,
    Kind,
    Mode,
    Parked,
    SuspensionPolicy,
)
from sampler.waste import Disposition, Suspended, cheapest_eviction, oracle_waste, regret, waste


def suspended(key: str, tool: str = "search", num_tokens: int = 1600, since: float = 0.0) -> Parked:
    num_blocks = math.ceil(num_tokens / 16)
    return Parked(key, Kind.SUSPENDED, num_tokens, num_blocks, since, (tool,))


def kept(key: str, since: float) -> Parked:
    return Parked(key, Kind.KEPT, 160, 10, since)


def make_policy(
    mode: Mode = Mode.AUTO, *, block_seconds: float = 0.005, **seconds_of: float
) -> SuspensionPolicy:
    """A policy that has seen 20 calls of each tool in ``seconds_of``, on a known machine."""
    policy = SuspensionPolicy(mode)
    for num_tokens in (1, 8, 64, 256):
        policy.costs.observe_forward(num_tokens, 0.01 + 0.001 * num_tokens)
    for is_in in (False, True):
        policy.costs.observe_swap(100, 100 * block_seconds, is_in=is_in)
    for tool, seconds in seconds_of.items():
        for _ in range(20):
            policy.tool_times.observe([tool], seconds)
    return policy


def order(policy: SuspensionPolicy, *parked: Parked, now: float = 0.0) -> list[object]:
    return [eviction.key for eviction in policy.eviction_order(parked, now)]


# ------------------------------------------------------------------------------- time to live


def test_a_cache_outlives_the_usual_call_of_its_tool_but_not_by_much() -> None:
    policy = make_policy(short=0.3)

    assert 0.3 <= policy.time_to_live(suspended("a", "short"), now=0.0) <= 1.0


def test_a_cache_whose_tool_takes_long_is_not_kept_at_all() -> None:
    policy = make_policy(long=60.0)

    assert policy.time_to_live(suspended("a", "long"), now=0.0) == 0.0


def test_the_time_to_live_is_over_when_a_call_outlives_the_usual_and_the_break_even() -> None:
    policy = make_policy(short=0.3)
    cache = suspended("a", "short")

    assert policy.time_to_live(cache, now=0.2) > 0.0
    assert policy.time_to_live(cache, now=20.0) == 0.0


def test_a_call_of_an_unknown_tool_is_waited_for_until_that_costs_what_eviction_costs() -> None:
    policy = make_policy()
    cache = suspended("a", "unknown")
    facts = Suspended(cache.num_tokens, cache.num_blocks, num_running_tokens=2000)
    _, eviction_waste = cheapest_eviction(facts, policy.costs.rates)
    break_even = eviction_waste / cache.num_tokens

    lives = [
        now + policy.time_to_live(cache, now, num_running_tokens=2000)
        for now in (0.0, break_even / 2, break_even, 2 * break_even)
    ]

    assert lives[:2] == pytest.approx([break_even] * 2, abs=0.11)
    assert lives[2:] == [break_even, 2 * break_even]


def test_a_cache_that_is_dear_to_evict_lives_longer_and_never_beyond_the_time_limit() -> None:
    dear = make_policy(block_seconds=1e6, long=60.0)
    for _ in range(20):
        dear.costs.observe_forward(200, 1e6)

    assert dear.time_to_live(suspended("a", "long"), now=0.0) == TIME_LIMIT_SECONDS


# --------------------------------------------------------------------------------------- order

ENDED_SINCE = ("second", 8.0), ("first", 7.0)


def test_nothing_is_decided_at_a_suspension_unless_the_mode_says_so() -> None:
    assert {mode: SuspensionPolicy(mode).on_suspend() for mode in Mode} == {
        Mode.AUTO: Disposition.PRESERVE,
        Mode.PRESERVE: Disposition.PRESERVE,
        Mode.SWAP: Disposition.SWAP,
        Mode.DISCARD: Disposition.DISCARD,
    }


@pytest.mark.parametrize("mode", Mode)
def test_kept_caches_go_first_the_least_recently_used_first(mode: Mode) -> None:
    policy = make_policy(mode)

    assert order(policy, suspended("run"), kept("b", 8.0), kept("a", 7.0)) == ["a", "b", "run"]


@pytest.mark.parametrize("mode", Mode)
def test_who_has_just_ended_a_turn_goes_last_and_is_to_be_waited_for(mode: Mode) -> None:
    policy = make_policy(mode, search=60.0)
    ended = [replace(suspended(key, since=since), kind=Kind.ENDED) for key, since in ENDED_SINCE]

    evictions = policy.eviction_order([*ended, suspended("run", since=8.9), kept("a", 8.9)], 9.0)

    assert [(e.key, e.is_premature) for e in evictions] == [
        ("a", False),
        ("run", False),
        ("first", True),
        ("second", True),
    ]


@pytest.mark.parametrize("mode", Mode)
def test_every_parked_cache_that_holds_blocks_can_go_in_every_mode(mode: Mode) -> None:
    swapped = Parked("swapped", Kind.SUSPENDED, 160, 0, 0.0, ("search",))

    evictions = make_policy(mode).eviction_order([suspended("a"), swapped, kept("b", 0.0)], 1.0)

    assert {(eviction.key, eviction.num_blocks) for eviction in evictions} == {
        ("a", 100),
        ("b", 10),
    }


def test_who_waits_for_a_slow_tool_goes_before_who_waits_for_a_fast_one() -> None:
    policy = make_policy(slow=60.0, fast=0.1)

    assert order(policy, suspended("fast", "fast"), suspended("slow", "slow")) == ["slow", "fast"]


def test_of_those_whose_time_is_over_the_longest_wait_goes_first() -> None:
    policy = make_policy(minutes=300.0, seconds=30.0)

    parked = suspended("seconds", "seconds"), suspended("minutes", "minutes")

    assert order(policy, *parked) == ["minutes", "seconds"]


def test_of_two_calls_of_one_fast_tool_the_one_that_is_overdue_goes_first() -> None:
    policy = make_policy(fast=0.3)

    overdue, fresh = suspended("overdue", "fast", since=0.0), suspended("new", "fast", since=19.9)

    assert order(policy, fresh, overdue, now=20.0) == ["overdue", "new"]


def test_a_long_context_that_is_dear_to_compute_again_goes_after_a_short_one() -> None:
    policy = make_policy(block_seconds=10.0, fast=0.1)

    short, long = suspended("short", "fast", 320), suspended("long", "fast", 6400)

    assert order(policy, long, short) == ["short", "long"]


def forked(key: str, num_own_tokens: int, num_shared_blocks: int = 90) -> Parked:
    cache = suspended(key, num_tokens=num_own_tokens)
    num_blocks = cache.num_blocks + num_shared_blocks
    return replace(cache, num_blocks=num_blocks, num_shared_blocks=num_shared_blocks)


def test_a_cache_is_judged_by_the_blocks_that_it_frees() -> None:
    """All have outlived their time, so that none costs anything by being evicted."""
    policy = make_policy(search=0.1)
    parked = forked("shares all", 0), forked("shares most", 48), suspended("lone", since=1.0)

    evictions = policy.eviction_order(parked, 1000.0)

    assert [eviction.key for eviction in evictions] == ["shares most", "lone", "shares all"]
    assert [eviction.num_blocks for eviction in evictions] == [93, 100, 90]


def test_what_is_shared_is_written_to_be_swapped_out_and_found_again_after_a_discard() -> None:
    policy = make_policy(block_seconds=1e-3)

    lone, fork = (
        Suspended(cache.num_tokens, cache.num_blocks)
        for cache in (suspended("lone"), forked("fork", 160))
    )

    assert policy.way_out(lone) is Disposition.SWAP
    assert policy.way_out(fork) is Disposition.DISCARD


def test_of_kept_caches_those_that_free_something_by_themselves_go_first() -> None:
    shared = replace(kept("shared", 1.0), num_shared_blocks=10)

    assert order(make_policy(), shared, kept("lone", 2.0), suspended("run")) == [
        "lone",
        "shared",
        "run",
    ]


@pytest.mark.parametrize(
    ("block_seconds", "cheaper"), [(1e-4, Disposition.SWAP), (10.0, Disposition.DISCARD)]
)
@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.PRESERVE])
def test_who_is_not_told_otherwise_takes_the_cheaper_way_out(
    mode: Mode, block_seconds: float, cheaper: Disposition
) -> None:
    policy = make_policy(mode, block_seconds=block_seconds)

    assert policy.way_out(Suspended(num_tokens=1600, num_blocks=100)) is cheaper


@pytest.mark.parametrize(
    ("mode", "disposition"),
    [(Mode.SWAP, Disposition.SWAP), (Mode.DISCARD, Disposition.DISCARD)],
)
def test_a_forced_mode_has_one_way_out_and_takes_the_longest_parked_first(
    mode: Mode, disposition: Disposition
) -> None:
    policy = make_policy(mode, slow=60.0, fast=0.1)

    parked = suspended("new", "slow", since=5.0), suspended("old", "fast", since=4.0)

    assert order(policy, *parked, now=6.0) == ["old", "new"]
    assert {policy.way_out(Suspended(tokens, 100)) for tokens in (1, 1600)} == {disposition}


# ------------------------------------------------------------------------------- against others

Tool = Callable[[random.Random], float]


def short(rng: random.Random) -> float:
    return rng.lognormvariate(math.log(0.2), 0.5)


def medium(rng: random.Random) -> float:
    return rng.lognormvariate(math.log(1.0), 1.0)


def long(rng: random.Random) -> float:
    return rng.lognormvariate(math.log(40.0), 0.7)


def bimodal(rng: random.Random) -> float:
    """Mostly a hit in a cache, sometimes a minute of work."""
    return rng.lognormvariate(math.log(0.1), 0.3) if rng.random() < 0.85 else long(rng)


def live_under_pressure(
    tool: Tool, block_seconds: float, num_calls: int = 300
) -> tuple[dict[str, float], float]:
    """Suspend runs one after the other, for a tool that is unknown at first, while somebody always
    wants memory: ``auto`` keeps each cache for its time to live.

    Returns:
        Token-seconds by mode, and the regret of ``auto`` against an oracle.
    """
    rng = random.Random(block_seconds)
    policy = make_policy(block_seconds=block_seconds)
    rates = policy.costs.rates
    totals = dict.fromkeys(("auto", "preserve", "swap", "discard"), 0.0)
    decisions: list[tuple[float, float]] = []
    for _ in range(num_calls):
        cache = suspended("run", num_tokens=rng.randint(300, 4000))
        facts = Suspended(cache.num_tokens, cache.num_blocks, rng.randint(0, 6000))
        seconds = tool(rng)
        held = held_seconds(policy, cache, facts, seconds)
        way_out, _ = cheapest_eviction(facts, rates)
        wasted = waste(facts, rates, way_out, seconds, held)
        decisions.append((wasted, oracle_waste(facts, rates, seconds)))
        totals["auto"] += wasted
        for disposition in Disposition:
            totals[disposition.name.lower()] += waste(facts, rates, disposition, seconds)
        policy.tool_times.observe(cache.tools, seconds)
    return totals, regret(decisions)


def held_seconds(
    policy: SuspensionPolicy, cache: Parked, facts: Suspended, tool_seconds: float
) -> float:
    """Return how long the cache is kept, if the policy is asked again when a time is over."""
    held = 0.0
    while held < tool_seconds:
        more = policy.time_to_live(cache, held, facts.num_running_tokens)
        if not more:
            break
        held += max(more, 0.01)
    return held


@pytest.mark.parametrize("block_seconds", [0.0005, 0.005, 0.1])
@pytest.mark.parametrize("tool", [short, medium, long])
def test_auto_wastes_little_more_than_the_policy_that_suits_the_tool(
    tool: Tool, block_seconds: float, record_property: Callable[[str, object], None]
) -> None:
    """With what it loses while it learns; which policy that is, it is not told."""
    totals, auto_regret = live_under_pressure(tool, block_seconds)

    auto = totals.pop("auto")
    record_property("regret", round(auto_regret, 3))
    assert auto <= 1.03 * min(totals.values())


@pytest.mark.parametrize("block_seconds", [0.0005, 0.005, 0.1])
def test_auto_wastes_far_less_than_any_fixed_policy_on_a_tool_with_two_habits(
    block_seconds: float, record_property: Callable[[str, object], None]
) -> None:
    totals, auto_regret = live_under_pressure(bimodal, block_seconds)

    auto = totals.pop("auto")
    record_property("regret", round(auto_regret, 3))
    assert auto <= 0.7 * min(totals.values())


def test_half_the_caches_evicted_in_order_waste_less_than_by_age() -> None:
    """Age is not a bad guess: who has waited long is often in for a long wait."""
    rng = random.Random(4)
    policy = make_policy(block_seconds=0.0005)
    tools: dict[str, Tool] = {"short": short, "medium": medium, "long": long, "bimodal": bimodal}
    for name, tool in tools.items():
        for _ in range(50):
            policy.tool_times.observe([name], tool(rng))
    in_order, by_age = 0.0, 0.0

    for _ in range(100):
        calls = dict(under_way(name, tool, rng) for name, tool in 5 * list(tools.items()))
        first = [eviction.key for eviction in policy.eviction_order(calls, 0.0, 4000)]
        oldest = [cache.key for cache in sorted(calls, key=lambda cache: cache.since)]
        in_order += waste_of_evicting(first[:10], calls, policy)
        by_age += waste_of_evicting(oldest[:10], calls, policy)

    assert in_order < 0.8 * by_age


def under_way(name: str, tool: Tool, rng: random.Random) -> tuple[Parked, float]:
    """A call that is looked at, at time 0, somewhere in its course, and how long it still takes."""
    seconds = tool(rng)
    elapsed = seconds * rng.random()
    cache = suspended(f"{name} {elapsed}", name, rng.randint(300, 4000), since=-elapsed)
    return cache, seconds - elapsed


def waste_of_evicting(
    keys: list[Hashable], calls: dict[Parked, float], policy: SuspensionPolicy
) -> float:
    rates = policy.costs.rates
    total = 0.0
    for cache, remaining in calls.items():
        facts = Suspended(cache.num_tokens, cache.num_blocks, num_running_tokens=4000)
        way_out, _ = cheapest_eviction(facts, rates)
        chosen = way_out if cache.key in keys else Disposition.PRESERVE
        total += waste(facts, rates, chosen, remaining)
    return total
