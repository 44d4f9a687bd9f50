"""What a run leaves for others to start from, and what is filled ahead of them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig

from sampler.cache_pool import BlockPool
from sampler.engine import EngineError
from sampler.kv_cache import GenericCache
from sampler.local_engine import LocalEngine
from sampler.outputs import SegmentEnded, SegmentStarted, TextDelta
from sampler.params import Constraint, SamplingParams
from sampler.run import Run, RunState
from sampler.snapshot import Snapshot, Sources, num_common
from tests.sampler.families import DIMENSIONS
from tests.sampler.runs import (
    CALL_OSLO,
    Client,
    Gate,
    flat,
    let_the_loop_turn,
    open_run,
    runner_of,
    sample,
    steer,
    steered_engine,
    until_suspended,
)
from tests.tiny_model import IM_END

GREEDY = SamplingParams(temperature=0, max_output_tokens=8)
SEEDED = SamplingParams(temperature=1, seed=7, max_output_tokens=8)
PROMPT = tuple(range(10, 30))

# --- How much is shared --------------------------------------------------------------------------

_ids = st.lists(st.integers(0, 1), max_size=12).map(tuple)


def common_by_looking(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


@given(_ids, _ids)
def test_the_common_prefix_is_as_long_as_a_look_at_each_id_says(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    assert num_common(first, second) == common_by_looking(first, second)


@given(_ids, _ids, _ids)
def test_a_common_prefix_is_found_whatever_follows_it(
    prefix: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    shared = num_common(prefix + first, prefix + second)

    assert shared == len(prefix) + common_by_looking(first, second)


def cache_of(num_tokens: int, *, has_window: bool = False) -> GenericCache:
    config = MistralConfig(**DIMENSIONS) if has_window else LlamaConfig(**DIMENSIONS)
    cache = GenericCache(config, BlockPool(8))
    cache.grow(num_tokens)
    cache.advance(num_tokens)
    return cache


@given(_ids, _ids, st.integers(0, 15))
def test_what_is_shared_is_in_the_cache_and_common_to_both(
    held: tuple[int, ...], wanted: tuple[int, ...], num_cached: int
) -> None:
    snapshot = Snapshot(held, cache_of(num_cached))

    assert snapshot.num_shared(wanted) == min(common_by_looking(held, wanted), num_cached)


@pytest.mark.parametrize(("wanted", "shared"), [((1, 2, 3, 4), 3), ((1, 2, 3), 3), ((1, 2), 0)])
def test_what_cannot_be_cut_back_is_shared_as_a_whole_or_not_at_all(
    wanted: tuple[int, ...], shared: int
) -> None:
    snapshot = Snapshot((1, 2, 3, 9), cache_of(3, has_window=True))

    assert snapshot.num_shared(wanted) == shared


def test_a_broken_cache_shares_nothing() -> None:
    cache = cache_of(3)
    cache.is_broken = True

    assert Snapshot((1, 2, 3), cache).num_shared((1, 2, 3)) == 0


# --- Starting from one ---------------------------------------------------------------------------


async def sampled(
    engine: LocalEngine,
    prompt_ids: Sequence[int],
    params: SamplingParams = GREEDY,
    snapshots: Iterable[Snapshot] = (),
) -> Run:
    run = engine.open_run("run", prompt_ids, params, Constraint(), Sources(tuple(snapshots)))
    await sample(engine, run)
    return run


async def left_behind(
    engine: LocalEngine, prompt_ids: Sequence[int] = PROMPT, params: SamplingParams = GREEDY
) -> Snapshot:
    """Return what a run on ``prompt_ids`` has left."""
    run = engine.open_run("earlier", prompt_ids, params, Constraint())
    async with aclosing(engine.sample(run)) as outputs:
        return [engine.snapshot(run) async for o in outputs if isinstance(o, SegmentEnded)][-1]


def assert_starts_at(engine: LocalEngine, run: Run, num_inherited: int) -> None:
    """Assert that ``run``, which was sampled last, forwarded what follows and nothing else."""
    num_forwarded = len(run.tokens) - 1 - num_inherited
    inputs = flat(runner_of(engine.model).inputs)
    assert inputs[-num_forwarded:] == list(run.tokens.ids[num_inherited:-1])
    assert run.segments[0].cached_tokens == run.num_inherited == num_inherited
    assert run.num_forwarded == len(run.tokens) - 1
    assert run.tokens_reforwarded == engine.counters.tokens_reforwarded == 0


Ids = tuple[int, ...]
PROMPTS: dict[str, tuple[Callable[[Ids], Ids], int]] = {
    "goes on": (lambda log: (*log, 40, 41, 42), 27),
    "is the whole log": (lambda log: log, 27),
    "is what was forwarded": (lambda log: log[:-1], 26),
    "is shorter": (lambda log: log[:10], 9),
    "diverges in the prompt": (lambda log: (*log[:12], 40, 41, 42), 12),
    "diverges in what was sampled": (lambda log: (*log[:24], 40, 41, 42), 24),
    "has nothing in common": (lambda log: (40, *log[1:]), 0),
}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("prompt", "num_inherited"), PROMPTS.values(), ids=PROMPTS.keys())
async def test_a_run_from_a_snapshot_samples_what_a_fresh_one_does_and_forwards_the_rest(
    prompt: Callable[[Ids], Ids], num_inherited: int, params: SamplingParams
) -> None:
    with steered_engine() as engine:
        snapshot = await left_behind(engine, params=params)
        prompt_ids = prompt(tuple(snapshot.token_ids))
        fresh = await sampled(engine, prompt_ids, params)
        forwarded_before = engine.counters.tokens_forwarded

        run = await sampled(engine, prompt_ids, params, [snapshot])

        assert run.tokens.ids == fresh.tokens.ids
        assert_starts_at(engine, run, num_inherited)
        forwarded = engine.counters.tokens_forwarded - forwarded_before
        assert forwarded == len(run.tokens) - 1 - num_inherited


@pytest.mark.parametrize("at_once", [False, True], ids=["before", "at the same time"])
async def test_a_run_can_start_from_a_suspended_one_that_has_gone_on(at_once: bool) -> None:
    """What was its pending token is in the cache once it has."""
    with steered_engine() as engine:
        first = await open_run(engine, params=SEEDED)
        prompt_length = len(first.tokens)
        steer(engine, prompt_length, [range(70, 90), range(70, 90), [CALL_OSLO], [IM_END]])
        async with aclosing(engine.sample(first, Client(engine, first))) as outputs:
            await until_suspended(outputs)
            snapshot = engine.snapshot(first)
            prompt_ids = (*snapshot.token_ids, *range(40, 50))

            async def go_on() -> None:
                assert isinstance([output async for output in outputs][-1], SegmentEnded)

            if not at_once:
                await go_on()
            run = engine.open_run("run", prompt_ids, SEEDED, Constraint(), Sources([snapshot]))
            await asyncio.gather(sample(engine, run), *([go_on()] if at_once else []))
            fresh = await sampled(engine, prompt_ids, SEEDED)

        num_pending = 1 if at_once else 0
        assert len(snapshot.token_ids) == prompt_length + 4
        assert run.num_inherited == prompt_length + 4 - num_pending
        assert run.tokens.ids == fresh.tokens.ids


async def test_the_run_that_left_a_snapshot_does_not_notice_those_that_start_from_it() -> None:
    with steered_engine() as engine:
        alone = await open_run(engine, params=SEEDED)
        steer(engine, len(alone.tokens), [range(70, 90), [CALL_OSLO], [IM_END]])
        await sample(engine, alone, Client(engine, alone))
        first = await open_run(engine, params=SEEDED)
        async with aclosing(engine.sample(first, Client(engine, first))) as outputs:
            await until_suspended(outputs)
            snapshot = engine.snapshot(first)

            for prompt_ids in ((*snapshot.token_ids, 40), snapshot.token_ids[:9]):
                await sampled(engine, prompt_ids, SEEDED, [snapshot])
            async for _ in outputs:
                pass

        assert len(first.segments) == 2
        assert first.tokens.ids == alone.tokens.ids


async def test_of_several_snapshots_the_one_that_shares_most_is_started_from() -> None:
    with steered_engine() as engine:
        prompts = [PROMPT[:5] + (50,) * 9, PROMPT[:15] + (50,) * 9, PROMPT[:9] + (50,) * 9]
        snapshots = [await left_behind(engine, prompt) for prompt in prompts]

        runs = [
            await sampled(engine, PROMPT, snapshots=order)
            for order in (snapshots, snapshots[::-1], snapshots[:1])
        ]

        assert [run.num_inherited for run in runs] == [15, 15, 5]


async def test_a_list_of_ids_shares_as_much_as_a_tuple() -> None:
    with steered_engine() as engine:
        snapshots = [await left_behind(engine, ids) for ids in ((40, 41, 42), PROMPT)]

        run = await sampled(engine, list(PROMPT), snapshots=snapshots)

        assert run.num_inherited == len(PROMPT) - 1


async def test_what_a_prompt_can_start_from_is_found_out_anew_when_the_run_begins() -> None:
    with steered_engine() as engine:
        snapshot = engine.new_snapshot(PROMPT)
        run = engine.open_run("run", PROMPT, GREEDY, Constraint(), Sources([snapshot]))

        await engine.warm_up(snapshot)
        await sample(engine, run)

        assert run.num_inherited == len(PROMPT) - 1


async def test_a_snapshot_whose_run_has_failed_midway_is_not_started_from() -> None:
    with steered_engine([CALL_OSLO], ["Sunny."]) as engine:
        first = await open_run(engine)
        layer = runner_of(engine.model).layers[1]

        def fail(*_: object) -> None:
            raise MemoryError("no memory left")

        async with aclosing(engine.sample(first, Client(engine, first))) as outputs:
            await until_suspended(outputs)
            snapshot = engine.snapshot(first)
            hook = layer.register_forward_pre_hook(fail)
            with pytest.raises(EngineError):
                await anext(output async for output in outputs if isinstance(output, TextDelta))
            hook.remove()
        runner_of(engine.model).turns = []
        fresh = await sampled(engine, snapshot.token_ids)

        run = await sampled(engine, snapshot.token_ids, snapshots=[snapshot])

        assert run.num_inherited == 0
        assert run.tokens.ids == fresh.tokens.ids


# --- Who holds it --------------------------------------------------------------------------------


async def test_a_snapshot_holds_its_cache_when_its_run_is_over() -> None:
    with steered_engine() as engine:
        snapshot = await left_behind(engine)
        held = engine.kv_tokens
        del snapshot

        assert engine.runs == ()
        assert held == len(PROMPT) + 8 - 1
        assert engine.kv_tokens == 0


async def test_a_queued_run_holds_the_snapshot_until_it_begins() -> None:
    with steered_engine() as engine:
        snapshot = await left_behind(engine)
        cache = ref(snapshot.cache)
        run = engine.open_run("run", PROMPT, GREEDY, Constraint(), Sources([snapshot]))
        del snapshot
        was_held = cache() is not None
        async with aclosing(engine.sample(run)) as outputs:
            async for output in outputs:
                if isinstance(output, TextDelta):
                    break
            is_held = cache() is not None

        assert was_held
        assert not is_held
        assert engine.kv_tokens == 0


async def test_a_queued_run_that_is_dropped_lets_go_of_the_snapshot() -> None:
    with steered_engine() as engine:
        snapshot = await left_behind(engine)
        run = engine.open_run("run", PROMPT, GREEDY, Constraint(), Sources([snapshot]))
        del snapshot
        held = engine.kv_tokens
        del run

        assert held > 0
        assert engine.kv_tokens == 0


async def test_a_run_that_is_closed_before_it_begins_lets_go_of_the_snapshot() -> None:
    with steered_engine() as engine:
        snapshot = await left_behind(engine)
        run = engine.open_run("run", PROMPT, GREEDY, Constraint(), Sources([snapshot]))
        del snapshot
        async with aclosing(engine.sample(run)) as outputs:
            await anext(outputs)

        assert run.state is RunState.CANCELLED
        assert engine.kv_tokens == 0


async def test_what_several_caches_share_counts_for_each() -> None:
    with steered_engine() as engine:
        first = await left_behind(engine)
        run = engine.open_run("run", first.token_ids, GREEDY, Constraint(), Sources([first]))
        async with aclosing(engine.sample(run)) as outputs:
            ended = [engine.snapshot(run) async for o in outputs if isinstance(o, SegmentEnded)]

        assert engine.kv_tokens == first.cache.num_tokens + ended[0].cache.num_tokens


# --- Warm-ups ------------------------------------------------------------------------------------

LONG = tuple(range(10, 210)) * 2  # six chunks and a rest
WARMED, RUN = "warmed", "run"


def held_at(engine: LocalEngine, num_passes: int) -> Gate:
    """Hold the model thread before the pass that comes after ``num_passes``."""
    gate, runner = Gate(), runner_of(engine.model)
    runner.before_pass = lambda *_: (
        gate.pass_through() if len(runner.passes) == num_passes else None
    )
    return gate


def passes(engine: LocalEngine) -> list[str]:
    """Return what the passes were for, in order: parts of ``LONG``, or a run."""
    inputs = runner_of(engine.model).inputs
    return [WARMED if set(ids) <= set(LONG) and len(ids) > 1 else RUN for ids in inputs]


async def short_run(engine: LocalEngine) -> Run:
    """Return a run of which no pass could be one of a warm-up."""
    params = SamplingParams(temperature=0, max_output_tokens=5)
    return engine.open_run("run", [5] * 4, params, Constraint())


async def test_a_warm_up_fills_the_cache_chunk_by_chunk_and_a_run_starts_from_it() -> None:
    with steered_engine() as engine:
        snapshot = engine.new_snapshot(LONG)

        await engine.warm_up(snapshot)

        assert [len(ids) for ids in runner_of(engine.model).inputs] == [64] * 6 + [16]
        assert snapshot.cache.num_tokens == engine.kv_tokens == len(LONG)
        run = await sampled(engine, (*LONG, 40, 41), snapshots=[snapshot])
        assert_starts_at(engine, run, len(LONG))
        assert run.tokens.ids == (await sampled(engine, (*LONG, 40, 41))).tokens.ids


async def test_a_warm_up_takes_no_longer_chunks_than_a_prefill() -> None:
    with steered_engine(prefill_chunk=16) as engine:
        await engine.warm_up(engine.new_snapshot(LONG[:40]))

        assert [len(ids) for ids in runner_of(engine.model).inputs] == [16, 16, 8]


async def test_what_is_warm_already_is_left_as_it_is() -> None:
    with steered_engine() as engine:
        snapshot = engine.new_snapshot(LONG)
        await engine.warm_up(snapshot)
        passes_before = len(runner_of(engine.model).passes)

        await engine.warm_up(snapshot)
        await engine.warm_up(engine.new_snapshot(()))

        assert len(runner_of(engine.model).passes) == passes_before


async def test_a_warm_up_waits_while_a_run_wants_the_model() -> None:
    with steered_engine() as engine:
        gate = held_at(engine, 0)
        sampling = asyncio.ensure_future(sample(engine, await short_run(engine)))
        await gate.wait_until_begun()
        warming = asyncio.ensure_future(engine.warm_up(engine.new_snapshot(LONG)))
        await let_the_loop_turn()
        gate.open()
        await asyncio.gather(sampling, warming)

        assert passes(engine) == [RUN] * 5 + [WARMED] * 7


async def test_a_run_that_follows_another_at_once_comes_before_a_warm_up() -> None:
    with steered_engine() as engine:
        gate = held_at(engine, 0)

        async def sample_two() -> None:
            for _ in range(2):
                await sample(engine, await short_run(engine))

        sampling = asyncio.ensure_future(sample_two())
        await gate.wait_until_begun()
        warming = asyncio.ensure_future(engine.warm_up(engine.new_snapshot(LONG)))
        await let_the_loop_turn()
        gate.open()
        await asyncio.gather(sampling, warming)

        assert passes(engine) == [RUN] * 10 + [WARMED] * 7


@pytest.mark.parametrize("num_warm_ups", [1, 3])
async def test_a_run_that_comes_in_between_waits_for_one_chunk(num_warm_ups: int) -> None:
    with steered_engine() as engine:
        gate = held_at(engine, 2)
        warming = [
            asyncio.ensure_future(engine.warm_up(engine.new_snapshot(LONG)))
            for _ in range(num_warm_ups)
        ]
        await gate.wait_until_begun()
        sampling = asyncio.ensure_future(sample(engine, await short_run(engine)))
        await let_the_loop_turn()
        gate.open()
        await asyncio.gather(sampling, *warming)

        assert passes(engine) == [WARMED] * 3 + [RUN] * 5 + [WARMED] * (7 * num_warm_ups - 3)


async def test_a_run_that_starts_from_a_snapshot_waits_for_one_chunk_too() -> None:
    with steered_engine() as engine:
        earlier = await left_behind(engine, [5] * 4)
        num_passes = len(runner_of(engine.model).passes)
        gate = held_at(engine, num_passes)
        warming = asyncio.ensure_future(engine.warm_up(engine.new_snapshot(LONG)))
        await gate.wait_until_begun()
        params = SamplingParams(temperature=0, max_output_tokens=5)
        run = engine.open_run("run", [5] * 4, params, Constraint(), Sources([earlier]))
        sampling = asyncio.ensure_future(sample(engine, run))
        await let_the_loop_turn()
        gate.open()
        await asyncio.gather(sampling, warming)

        assert passes(engine)[num_passes:] == [WARMED] + [RUN] * 5 + [WARMED] * 6


async def test_runs_that_are_queued_or_suspended_do_not_hold_a_warm_up_back() -> None:
    with steered_engine([CALL_OSLO], ["Sunny."]) as engine:
        queued, suspended = await open_run(engine), await open_run(engine)
        snapshot = engine.new_snapshot(LONG)
        async with aclosing(engine.sample(suspended, Client(engine, suspended))) as outputs:
            await until_suspended(outputs)

            await engine.warm_up(snapshot)

            assert engine.runs != ()
        assert snapshot.cache.num_tokens == len(LONG)
        assert queued.state is RunState.QUEUED


@pytest.mark.parametrize("num_taken", [2, 4])
async def test_a_run_whose_consumer_is_slow_does_not_hold_a_warm_up_back(
    num_taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler.local_engine.PATIENCE_SECONDS", 0)
    with steered_engine([CALL_OSLO]) as engine:
        run, snapshot = await open_run(engine), engine.new_snapshot(LONG)
        async with aclosing(engine.sample(run)) as outputs:
            for _ in range(num_taken):
                await anext(outputs)

            await engine.warm_up(snapshot)

            assert run.state is RunState.DECODING
            assert [o async for o in outputs if isinstance(o, SegmentEnded)]
        assert snapshot.cache.num_tokens == len(LONG)


async def test_a_warm_up_waits_while_a_quick_consumer_takes_an_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sampler.local_engine.PATIENCE_SECONDS", 60)
    with steered_engine() as engine:
        async with aclosing(engine.sample(await short_run(engine))) as outputs:
            assert isinstance(await anext(outputs), SegmentStarted)
            await anext(outputs)
            warming = asyncio.ensure_future(engine.warm_up(engine.new_snapshot(LONG)))
            await let_the_loop_turn()
            async for _ in outputs:
                await let_the_loop_turn()
        await warming

        assert passes(engine) == [RUN] * 5 + [WARMED] * 7


async def test_a_cancelled_warm_up_keeps_what_it_has_filled() -> None:
    with steered_engine() as engine:
        gate = held_at(engine, 1)
        snapshot = engine.new_snapshot(LONG)
        warming = asyncio.ensure_future(engine.warm_up(snapshot))
        await gate.wait_until_begun()

        warming.cancel()
        await let_the_loop_turn()
        was_in_flight = not warming.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await warming

        assert was_in_flight
        assert snapshot.cache.num_tokens == 2 * 64
        run = await sampled(engine, LONG, snapshots=[snapshot])
        assert_starts_at(engine, run, 2 * 64)


async def test_a_cancelled_warm_up_can_be_taken_up_again() -> None:
    with steered_engine() as engine:
        gate = held_at(engine, 1)
        snapshot = engine.new_snapshot(LONG)
        warming = asyncio.ensure_future(engine.warm_up(snapshot))
        await gate.wait_until_begun()
        warming.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await warming

        await engine.warm_up(snapshot)

        assert flat(runner_of(engine.model).inputs) == list(LONG)


async def test_a_warm_up_can_be_taken_up_while_the_chunk_of_a_cancelled_one_is_in_flight() -> None:
    with steered_engine() as engine:
        gate = held_at(engine, 6)
        snapshot = engine.new_snapshot(LONG)
        cancelled = asyncio.ensure_future(engine.warm_up(snapshot))
        await gate.wait_until_begun()
        cancelled.cancel()
        taken_up = [asyncio.ensure_future(engine.warm_up(snapshot)) for _ in range(2)]
        await let_the_loop_turn()
        gate.open()
        await asyncio.gather(*taken_up)

        assert cancelled.cancelled()
        assert flat(runner_of(engine.model).inputs) == list(LONG)


@pytest.mark.parametrize("num_tokens", [0, 100, 300, 400])
async def test_a_warm_up_takes_from_others_what_they_hold_of_it(num_tokens: int) -> None:
    with steered_engine() as engine:
        other = engine.new_snapshot((*LONG[:num_tokens], 220, 221))
        nearer = await left_behind(engine, (*LONG[:64], 220, 221))
        await engine.warm_up(other)
        snapshot = engine.new_snapshot(LONG)
        forwarded_before = engine.counters.tokens_forwarded

        await engine.warm_up(snapshot, Sources([nearer, other]))

        forwarded = engine.counters.tokens_forwarded - forwarded_before
        assert forwarded == len(LONG) - max(64, num_tokens)
        run = await sampled(engine, (*LONG, 40), snapshots=[snapshot])
        assert run.num_inherited == len(LONG)
        assert run.tokens.ids == (await sampled(engine, (*LONG, 40))).tokens.ids
        from_other = await sampled(engine, (*other.token_ids, 40), snapshots=[other])
        assert from_other.num_inherited == len(other.token_ids)


async def test_a_warm_up_that_holds_more_than_others_takes_nothing_from_them() -> None:
    with steered_engine() as engine:
        snapshot, other = engine.new_snapshot(LONG), engine.new_snapshot(LONG[:100])
        await engine.warm_up(snapshot)
        await engine.warm_up(other, Sources([snapshot]))
        forwarded_before = engine.counters.tokens_forwarded

        await engine.warm_up(snapshot, Sources([other, snapshot]))

        assert engine.counters.tokens_forwarded == forwarded_before == len(LONG)
        assert snapshot.cache.num_tokens == len(LONG)


async def test_a_warm_up_that_is_cancelled_while_it_waits_leaves_the_turn_to_the_next() -> None:
    with steered_engine() as engine:
        gate = held_at(engine, 0)
        sampling = asyncio.ensure_future(sample(engine, await short_run(engine)))
        await gate.wait_until_begun()
        cancelled, other = [
            asyncio.ensure_future(engine.warm_up(engine.new_snapshot(LONG))) for _ in range(2)
        ]
        await let_the_loop_turn()

        cancelled.cancel()
        await let_the_loop_turn()
        was_dropped_at_once = cancelled.done()
        gate.open()
        await asyncio.gather(sampling, other)

        assert was_dropped_at_once
        assert passes(engine) == [RUN] * 5 + [WARMED] * 7


async def test_a_warm_up_whose_step_fails_raises_and_hurts_no_one() -> None:
    with steered_engine() as engine:
        runner = runner_of(engine.model)

        def fail(*_: object) -> None:
            raise MemoryError("no memory left")

        hook = runner.layers[1].register_forward_pre_hook(fail)
        snapshot = engine.new_snapshot(LONG)
        with pytest.raises(EngineError) as failure:
            await engine.warm_up(snapshot)
        hook.remove()

        assert isinstance(failure.value.__cause__, MemoryError)
        run = await sampled(engine, LONG, snapshots=[snapshot])
        assert run.num_inherited == 0
        other = engine.new_snapshot(LONG)
        await engine.warm_up(other)
        assert other.cache.num_tokens == len(LONG)


async def test_a_warm_up_that_nobody_waits_for_any_more_holds_nothing() -> None:
    with steered_engine() as engine:
        snapshot = engine.new_snapshot(LONG)
        await engine.warm_up(snapshot)
        del snapshot

        assert engine.kv_tokens == 0
