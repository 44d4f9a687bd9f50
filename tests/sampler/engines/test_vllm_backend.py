"""vLLM behind the sampling loop, over its fake: a suspended run says what it would have said."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from sampler.engine_error import EngineError
from sampler.engines.vllm.backend import VllmBackend, vllm_engine
from sampler.engines.vllm.processor import SegmentProcessor
from sampler.outputs import Output, SegmentEnded, TextDelta
from sampler.params import Constraint, SamplingParams
from sampler.run import Run, RunState, StopReason
from sampler.snapshot import Sources
from sampler.suspension import Suspension
from tests.sampler.engines.vllm_runs import (
    DEADLINE_SECONDS,
    FORCED,
    FREE,
    GREEDY,
    Vllm,
    language,
    library,
    play,
    resumption,
    running,
    sampled_in,
    tokenizer,
)
from tests.sampler.runs import CALL_OSLO, VOCAB_SIZE, let_the_loop_turn
from tests.tiny_model import IM_END

PROMPT = tuple(range(40, 85))
SUFFIX = (31, 32, 33, 34)
CALLS = (CALL_OSLO, IM_END)
SEEDED = SamplingParams(temperature=1.0, seed=7)
PENALISED = SamplingParams(
    temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.4, frequency_penalty=1.1
)


@pytest.fixture
async def vllm() -> AsyncIterator[Vllm]:
    async with running() as vllm:
        yield vllm


def ended(outputs: Sequence[Output]) -> list[StopReason]:
    """Return why each segment ended."""
    return [output.reason for output in outputs if isinstance(output, SegmentEnded)]


async def read(outputs: AsyncGenerator[Output, None]) -> None:
    """Read all there is."""
    async with aclosing(outputs):
        async for _ in outputs:
            pass


def backend_of(vllm: Vllm) -> VllmBackend:
    backend = vllm.engine._backend
    assert isinstance(backend, VllmBackend)
    return backend


class Suspended:
    """A run that is being sampled, and waits where it is suspended until it is told to go on."""

    def __init__(self, vllm: Vllm, run: Run, suffix: Sequence[int] = SUFFIX) -> None:
        self.run = run
        self.is_suspended = asyncio.Event()
        self._may_go_on = asyncio.Event()
        self._task = asyncio.create_task(play(vllm, run, [suffix], self._wait))

    async def _wait(self, suspension: Suspension) -> None:
        self.is_suspended.set()
        await self._may_go_on.wait()

    async def until_suspended(self) -> "Suspended":
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.is_suspended.wait()
        return self

    async def go_on(self) -> list[Output]:
        """Have it go on, and return all that it has said."""
        self._may_go_on.set()
        return await self._task

    async def cancel(self) -> None:
        """Give it up."""
        self._task.cancel()
        await asyncio.wait([self._task])


async def suspended(vllm: Vllm, first: int, num_tokens: int = 40, **others: Any) -> Suspended:
    """Return a run that is suspended, whose prompt is so many tokens."""
    vllm.llm.core.turns.append(CALLS)
    return await Suspended(vllm, vllm.open([first] * num_tokens), **others).until_suspended()


# --- What is said --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALISED])
async def test_a_suspended_run_says_what_it_says_from_its_whole_history(
    vllm: Vllm, params: SamplingParams
) -> None:
    runs = [vllm.open([first, *PROMPT], params) for first in range(90, 96)]

    await asyncio.gather(*(play(vllm, run, [SUFFIX] * 4) for run in runs))

    assert sum(len(run.segments) for run in runs) > 12
    for run in runs:
        vllm.check(run)


@pytest.mark.slow
async def test_a_turn_is_forced_to_call_and_the_next_one_is_free(vllm: Vllm) -> None:
    bounds = [FORCED, FREE, FORCED]
    run = vllm.open(PROMPT, SEEDED, FORCED)

    outputs = await play(vllm, run, [SUFFIX] * 2, constraints=bounds[1:])

    assert ended(outputs)[0] is StopReason.TOOL_CALLS
    vllm.check(run, *bounds[: len(run.segments)])


async def test_a_turn_that_is_known_beforehand_is_said(vllm: Vllm) -> None:
    run = vllm.open(PROMPT, GREEDY, Constraint(forced_ids=(70, 1, 71, IM_END)))

    await play(vllm, run)

    assert run.tokens.since(len(PROMPT)) == [70, 1, 71, IM_END]


@pytest.mark.slow
async def test_log_probabilities_are_those_of_the_model_in_every_turn(vllm: Vllm) -> None:
    run = vllm.open(PROMPT, SamplingParams(temperature=1.0, seed=3, top_logprobs=2), FORCED)

    outputs = await play(vllm, run, [SUFFIX], constraints=[Constraint()])

    vllm.check(run, FORCED, Constraint())
    told = [one for out in outputs if isinstance(out, TextDelta) for one in out.logprobs]
    said = [t for t in sampled_in(run.segments[1], run) if t != IM_END]
    assert [one.token for one in told] == [tokenizer().token_text(token_id) for token_id in said]
    logprobs = vllm.model(run.tokens.ids[: run.segments[1].input_tokens]).log_softmax(-1)
    assert told[0].logprob == pytest.approx(float(logprobs[said[0]]))
    top = [tokenizer().token_text(token_id) for token_id in logprobs.topk(2).indices.tolist()]
    assert [one.token for one in told[0].top_logprobs] == top


# --- What ends a turn ----------------------------------------------------------------------------


async def test_only_what_ends_a_turn_here_ends_it_there(vllm: Vllm) -> None:
    vllm.llm.core.eos_id = 71
    vllm.llm.core.turns.append([70, 71, 72, IM_END])
    run = vllm.open(PROMPT, GREEDY, Constraint())

    await play(vllm, run)

    assert run.tokens.since(len(PROMPT)) == [70, 71, 72, IM_END]


async def test_a_turn_ends_where_the_request_has_it_end(vllm: Vllm) -> None:
    vllm.llm.core.turns.append([70] * 9)
    run = vllm.open(PROMPT, SamplingParams(temperature=0, max_output_tokens=5), Constraint())

    outputs = await play(vllm, run)

    assert ended(outputs) == [StopReason.MAX_OUTPUT_TOKENS]
    assert run.tokens.since(len(PROMPT)) == [70] * 5


async def test_a_turn_ends_with_the_context() -> None:
    async with running(max_model_len=64) as vllm:
        vllm.llm.core.turns.append([70] * 40)
        run = vllm.open(PROMPT, GREEDY, Constraint())

        outputs = await play(vllm, run)

        assert ended(outputs) == [StopReason.CONTEXT_LENGTH]
        assert len(run.tokens) == vllm.engine.max_context == 64


async def test_a_chunk_that_would_kill_vllm_fails_its_run_only() -> None:
    async with running(max_model_len=64) as vllm:
        vllm.llm.core.turns.append(CALLS)
        run, other = vllm.open(PROMPT), vllm.open([7, 8])

        async def too_much(suspension: Suspension) -> Any:
            return resumption(run, [9] * 30, FREE)

        with pytest.raises(EngineError, match="context is full"):
            await read(vllm.engine.sample(run, too_much))

        await play(vllm, other)
        vllm.check(other)


async def test_a_run_that_is_cancelled_holds_nothing_and_others_find_what_it_read(
    vllm: Vllm,
) -> None:
    vllm.llm.core.turns.append([70] * 100)
    run = vllm.open(PROMPT, GREEDY, Constraint())

    async with aclosing(vllm.engine.sample(run)) as outputs:
        async for _ in outputs:
            if len(run.tokens) > len(PROMPT) + 3:
                break

    assert run.state is RunState.CANCELLED
    assert vllm.engine.kv_tokens == 0
    assert run.num_forwarded >= len(run.tokens) - 1
    again = vllm.open(PROMPT, GREEDY, Constraint())
    await play(vllm, again)
    assert again.segments[0].cached_tokens == 32


# --- What it takes -------------------------------------------------------------------------------


async def test_to_resume_forwards_the_pending_token_and_the_suffix(vllm: Vllm) -> None:
    vllm.llm.core.turns.extend([(70, *CALLS), (71, IM_END)])
    run = vllm.open(PROMPT)

    await play(vllm, run, [SUFFIX])

    assert vllm.prefilled() == [[len(PROMPT), 1 + len(SUFFIX)]]
    first, second = run.segments
    assert second.cached_tokens == second.input_tokens - 1 - len(SUFFIX)
    assert first.tokens_forwarded == len(PROMPT) + 2
    assert second.tokens_forwarded == 1 + len(SUFFIX) + 1
    assert vllm.engine.counters.tokens_forwarded == len(run.tokens) - 1
    assert vllm.engine.counters.tokens_reforwarded == 0


async def test_a_run_whose_time_is_over_comes_back_from_its_tokens() -> None:
    async with running(suspend_ttl_seconds=0.01) as vllm:
        vllm.llm.core.turns.append(CALLS)
        run = vllm.open(PROMPT)

        async def wait(suspension: Suspension) -> None:
            while vllm.engine.counters.discards == 0:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
            assert vllm.engine.kv_tokens == 0

        await play(vllm, run, [SUFFIX], wait)

        vllm.check(run, num_told=1)
        # Blocks of 16 are found again; the rest is read again, but for the pending token.
        known = (len(PROMPT) + 1) // 16 * 16
        assert run.segments[1].cached_tokens == known
        assert vllm.prefilled()[1] == [run.segments[1].input_tokens - known]
        assert vllm.engine.counters.tokens_reforwarded == len(PROMPT) + 1 - known


async def test_caches_are_told(vllm: Vllm) -> None:
    one = await suspended(vllm, 50, 40)

    assert vllm.engine.kv_tokens == 41
    assert vllm.engine.memory.num_used == 3
    assert vllm.engine.memory.num_blocks == 64
    await one.go_on()
    assert vllm.engine.kv_tokens == 0


# --- Bounds --------------------------------------------------------------------------------------


async def test_suspended_runs_hold_half_of_the_sequences_at_most() -> None:
    async with running(max_num_seqs=4) as vllm:
        runs = [await suspended(vllm, first) for first in (50, 51, 52, 53)]

        assert vllm.llm.core.num_paused <= 2 + 1  # what was ended just now may not have gone yet
        assert vllm.engine.counters.discards == 2
        new = vllm.open(PROMPT)
        await play(vllm, new)
        for one in runs:
            await one.go_on()
            vllm.check(one.run, num_told=1)


async def test_suspended_runs_hold_a_part_of_the_blocks_at_most() -> None:
    async with running(num_blocks=32, max_model_len=256, suspended_fraction=0.25) as vllm:
        runs = [await suspended(vllm, first, 46) for first in (50, 51, 52)]

        assert vllm.engine.counters.discards == 1
        assert vllm.engine.memory.num_used == 6
        for one in runs:
            await one.go_on()
            vllm.check(one.run, num_told=1)


async def test_the_least_worth_ends_first() -> None:
    async with running(num_blocks=32, max_model_len=256) as vllm:
        runs = [await suspended(vllm, first, 80) for first in (50, 51)]
        small = await suspended(vllm, 52, 10)

        long_gone, kept = runs
        assert backend_of(vllm).memory.num_used <= 16
        await small.go_on()
        await kept.go_on()
        await long_gone.go_on()
        for one in (small, kept, long_gone):
            vllm.check(one.run, num_told=1)


async def test_where_there_is_memory_for_one_run_only_none_is_kept() -> None:
    async with running(num_blocks=8, max_model_len=4096) as vllm:
        assert vllm.engine.max_context == 8 * 16
        one = await suspended(vllm, 50)
        other = vllm.open([7] * 100)
        await play(vllm, other)

        await one.go_on()

        vllm.check(one.run, num_told=1)
        vllm.check(other)


async def test_what_is_kept_too_much_goes_though_nobody_reads_its_end() -> None:
    async with running(max_num_seqs=1) as vllm:
        vllm.llm.core.turns.append((70, 71, IM_END))
        slow = vllm.open(PROMPT, GREEDY, Constraint())
        async with aclosing(vllm.engine.sample(slow)) as outputs:
            await anext(outputs)
            await anext(outputs)
            quick = vllm.open([7, 8])

            await play(vllm, quick)

            vllm.check(quick)


async def test_suspended_runs_leave_room_for_the_longest_one() -> None:
    async with running(num_blocks=32, max_model_len=256, suspended_fraction=1.0) as vllm:
        runs = [await suspended(vllm, first, 100, suffix=[9] * 100) for first in (50, 51, 52, 53)]

        vllm.llm.core.turns.append([70] * 40)
        longest = vllm.open([7] * 200, SamplingParams(temperature=0, max_output_tokens=40))
        await play(vllm, longest)

        assert len(longest.tokens) == 240
        await asyncio.gather(*(one.go_on() for one in runs))
        for one in runs:
            vllm.check(one.run, num_told=1)


async def test_who_waits_for_its_turn_with_what_it_has_counts_too() -> None:
    async with running(num_blocks=32, max_model_len=256, suspended_fraction=1.0) as vllm:
        first = [await suspended(vllm, number, 120, suffix=[9] * 60) for number in (50, 51)]
        vllm.llm.core.turns += [([70] * 8 + list(CALLS)), ([70] * 8 + list(CALLS))]
        others = [Suspended(vllm, vllm.open([number] * 112)) for number in (52, 53)]
        while vllm.llm.core.num_running < 2:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        vllm.llm.may_step.clear()

        going_on = [asyncio.create_task(one.go_on()) for one in first]
        await let_the_loop_turn()
        vllm.llm.may_step.set()

        for one in others:
            await one.until_suspended()
        await asyncio.gather(*going_on)
        await asyncio.gather(*(one.go_on() for one in others))
        for one in (*first, *others):
            vllm.check(one.run, num_told=1)


# --- With whom prefixes are shared ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        (Sources(), Sources(), True),
        (Sources(salt="a"), Sources(salt="a"), True),
        (Sources(salt="a"), Sources(salt="b"), False),
        (Sources(salt="a"), Sources(), False),
        (Sources(reuses_prefixes=False), Sources(reuses_prefixes=False), False),
    ],
)
async def test_prefixes_are_shared_by_those_with_the_same_salt(
    vllm: Vllm, one: Sources, other: Sources, is_shared: bool
) -> None:
    await play(vllm, vllm.open(PROMPT, sources=one))
    run = vllm.open(PROMPT, sources=other)
    await play(vllm, run)

    assert run.segments[0].cached_tokens == (32 if is_shared else 0)
    assert run.num_inherited == run.segments[0].cached_tokens


# --- Failures ------------------------------------------------------------------------------------


async def test_when_vllm_dies_its_runs_fail_and_later_ones_fail_at_once(vllm: Vllm) -> None:
    vllm.llm.core.turns.append([70] * 200)
    running_run = vllm.open(PROMPT, GREEDY, Constraint())
    outputs = vllm.engine.sample(running_run)
    await anext(outputs)
    one = await suspended(vllm, 50)

    vllm.llm.die()

    with pytest.raises(EngineError, match="has died"):
        await read(outputs)
    with pytest.raises(EngineError, match="has died; the server has to be started again"):
        await one.go_on()
    with pytest.raises(EngineError, match="has died; the server has to be started again"):
        await play(vllm, vllm.open(PROMPT))
    assert vllm.engine.kv_tokens == 0
    assert backend_of(vllm).failure is not None


class _Faulty(SegmentProcessor):
    """Has no mask for those who may call."""

    def __init__(self) -> None:
        super().__init__(tokenizer(), 64)
        grammars = self._grammars

        class Broken:
            def matcher(self, constraint: Constraint) -> Any:
                if constraint.tools:
                    raise RuntimeError("a bug")
                return grammars.matcher(constraint)

        self._grammars = Broken()  # type: ignore[assignment]


async def test_a_run_that_cannot_be_sampled_fails_and_others_go_on() -> None:
    async with running(processor=_Faulty) as vllm:
        good = vllm.open(PROMPT, SEEDED, Constraint())
        bad = vllm.open([9, *PROMPT], SEEDED, FREE)

        results = await asyncio.gather(play(vllm, good), play(vllm, bad), return_exceptions=True)

        assert isinstance(results[1], EngineError)
        assert "could not be sampled" in str(results[1])
        assert not isinstance(results[0], BaseException)
        vllm.check(good)
        assert bad.segments[0].output_tokens == 0


async def test_a_known_turn_that_nothing_ends_fails(vllm: Vllm) -> None:
    run = vllm.open(PROMPT, GREEDY, Constraint(forced_ids=(70, 71)))

    with pytest.raises(EngineError, match="could not be sampled"):
        await play(vllm, run)

    assert run.tokens.since(len(PROMPT)) == [70, 71]


async def test_what_vllm_refuses_fails_its_run_only(vllm: Vllm) -> None:
    bad, good = vllm.open([VOCAB_SIZE + 5]), vllm.open(PROMPT)

    with pytest.raises(EngineError, match="vLLM failed"):
        await play(vllm, bad)

    await play(vllm, good)
    vllm.check(good)


async def test_a_request_that_somebody_else_aborts_fails(vllm: Vllm) -> None:
    vllm.llm.core.turns.append([70] * 200)
    run = vllm.open(PROMPT, GREEDY, Constraint())
    outputs = vllm.engine.sample(run)
    await anext(outputs)
    await anext(outputs)

    await vllm.llm.abort(f"{run.id}-1")

    with pytest.raises(EngineError, match="abort"):
        await read(outputs)


async def test_an_engine_that_does_not_start_says_why() -> None:
    def make_llm(arguments: Mapping[str, object]) -> Any:
        raise RuntimeError("no such model\nand more")

    engine = vllm_engine("tiny", language(), library=library(make_llm))

    with pytest.raises(EngineError, match=r"vLLM did not start: no such model$"):
        await engine.start()
    await engine.stop()
    engine.close()


async def test_what_it_says_of_itself(vllm: Vllm) -> None:
    assert vllm.engine.capabilities.as_json() == {
        "keeps_kv": True,
        "token_exact": True,
        "drops_pending_token": True,
        "grammar": True,
    }
    assert vllm.engine.name == "tiny"
