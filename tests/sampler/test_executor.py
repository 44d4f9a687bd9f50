"""Many runs on one model thread: batches, memory that does not suffice, and steps that fail.

The models are real and small. A run's letters are left to the weights, which are made large, so
that a run whose cache is not what it should be says something else than alone.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sampler.cache_pool import BLOCK_SIZE, BlockPool, blocks_for
from sampler.decoder_weights import decoder_weights
from sampler.engine import ContextLengthExceededError, EngineError, Resumption, ToolCaller
from sampler.kv_cache import KVCache, KVShape, PagedStorage
from sampler.local_engine import LocalEngine
from sampler.model_runner import GenericRunner, Handling, ModelRunner, Piece, RunnerWrapper
from sampler.outputs import Output, ReasoningDone, SegmentEnded, TextDelta
from sampler.params import Constraint, SamplingParams
from sampler.parked_caches import ParkedCaches
from sampler.run import Run, RunState, StopReason
from sampler.sampling import Certain, Logits
from sampler.snapshot import Sources
from sampler.suspension import Suspension
from sampler.suspension_policy import Mode, SuspensionPolicy
from sampler.swap import SwapEntry, SwapStore
from sampler.torch_decoder import TorchDecoder
from tests.sampler.runs import (
    CALL_OSLO,
    DEADLINE_SECONDS,
    VOCAB_SIZE,
    Client,
    Gate,
    let_the_loop_turn,
    open_run,
    resume_with,
    sample,
    steered_model,
    until_suspended,
)
from tests.tiny_model import IM_END, WEATHER

SEEDED = SamplingParams(temperature=1, seed=3)
NUM_LETTERS = 20
"""Sampled in each segment."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- Models --------------------------------------------------------------------------------------


class WatchedRunner(RunnerWrapper):
    """Another runner, of which each step is noted and the logits are steered."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.steps: list[list[tuple[int, int]]] = []
        """What each piece of each step began at, and how long it was."""
        self.before_step: Callable[[Sequence[Piece]], object] = lambda _: None
        """Called on the model thread; may block or raise."""
        self.steering: Callable[[int], Sequence[int]] = lambda _: ()
        """The tokens that may come at a position; none leaves them all."""

    def forward(self, pieces: Sequence[Piece]) -> list[Tensor | None]:
        self.steps.append([(piece.cache.num_tokens, len(piece.token_ids)) for piece in pieces])
        self.before_step(pieces)
        logits = self._runner.forward(pieces)
        return [self._steered(one, piece.cache) for one, piece in zip(logits, pieces, strict=True)]

    def _steered(self, logits: Logits | None, cache: KVCache) -> Tensor | None:
        assert not isinstance(logits, Certain)
        if logits is None or not (choice := self.steering(cache.num_tokens)):
            return logits
        steered = torch.full_like(logits, -1e9)
        steered[list(choice)] = logits[list(choice)]
        return steered


def llama(max_context: int = 1024) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def generic(num_blocks: int) -> ModelRunner:
    return GenericRunner(llama(), pool=BlockPool(num_blocks), is_exact=True)


def paged(num_blocks: int) -> ModelRunner:
    weights = decoder_weights(llama())
    assert weights is not None
    shape = KVShape(weights.shape.num_layers, weights.shape.num_kv_heads, weights.shape.head_dim)
    storage = PagedStorage(BlockPool(num_blocks), shape, weights.dtype)
    return TorchDecoder(weights, storage, is_exact=True)


RUNNERS = [generic, paged]
both = pytest.mark.parametrize("runner", RUNNERS, ids=["generic", "paged"])
Runner = Callable[[int], ModelRunner]
PLENTY = 1000
WINDOW = 8
"""Fewer tokens than the turns here have."""


@contextmanager
def serving(runner: Runner, num_blocks: int = PLENTY, **options: Any) -> Iterator[LocalEngine]:
    """Give an engine on ``runner`` with a pool of ``num_blocks``."""
    model = steered_model()
    watched = WatchedRunner(runner(num_blocks))
    model.tokenizer.counters = watched.counters
    engine = LocalEngine(replace(model, runner=watched), window=WINDOW, **options)
    try:
        yield engine
    finally:
        engine.close()


def watched(engine: LocalEngine) -> WatchedRunner:
    assert isinstance(engine.model.runner, WatchedRunner)
    return engine.model.runner


# --- Runs ----------------------------------------------------------------------------------------


def steer(engine: LocalEngine, prompt_length: int) -> None:
    """Have runs whose prompts are so long say letters, and make a call after the first ones."""
    letters = engine.model.tokenizer.encode_text("efghijklmnopqrstuvwxyz")
    call = {prompt_length + NUM_LETTERS: [CALL_OSLO], prompt_length + NUM_LETTERS + 1: [IM_END]}
    watched(engine).steering = lambda position: call.get(position, letters)


async def open_runs(engine: LocalEngine, number: int, params: SamplingParams = SEEDED) -> list[Run]:
    """Return runs that differ in what the user says; each calls once."""
    params = replace(params, max_output_tokens=NUM_LETTERS + 2)
    runs = [await open_run(engine, f"run {i:02}", params=params) for i in range(number)]
    steer(engine, len(runs[0].tokens))
    return runs


def answering(engine: LocalEngine, run: Run, until: asyncio.Event) -> ToolCaller:
    """Return a client of ``run`` that answers when it may."""

    async def answer(suspension: Suspension) -> Resumption:
        await until.wait()
        outputs = dict.fromkeys(suspension.awaited, "sunny")
        return await resume_with(engine, run, suspension.answer(outputs))

    return answer


async def sampled_alone(
    runner: Runner, number: int, params: SamplingParams = SEEDED
) -> list[tuple[int, ...]]:
    """Return the logs of runs that are sampled one after the other, with room for all."""
    with serving(runner) as engine:
        runs = await open_runs(engine, number, params)
        for run in runs:
            await sample(engine, run, Client(engine, run))
        assert engine.counters.tokens_reforwarded == 0
        return [run.tokens.ids for run in runs]


def forwarded_up_to(engine: LocalEngine) -> int:
    """Return the highest position that any step went up to."""
    return max(start + length for step in watched(engine).steps for start, length in step)


def logs(runs: Sequence[Run]) -> list[tuple[int, ...]]:
    return [run.tokens.ids for run in runs]


async def assert_all_is_free(engine: LocalEngine) -> None:
    assert engine.runs == ()
    assert engine.kv_tokens == 0
    memory = await engine.measure_memory()
    assert (memory.num_used, memory.num_swapped) == (0, 0)


# --- Batches -------------------------------------------------------------------------------------


@both
async def test_runs_share_steps_and_say_what_they_do_alone(runner: Runner) -> None:
    alone = await sampled_alone(runner, 8)
    with serving(runner, gathering_seconds=1) as engine:
        runs = await open_runs(engine, 8)

        await asyncio.gather(*(sample(engine, run, Client(engine, run)) for run in runs))

        assert logs(runs) == alone
        steps = watched(engine).steps
        assert max(map(len, steps)) == 8
        assert len(steps) == engine.counters.steps < sum(map(len, steps)) / 4
        await assert_all_is_free(engine)


async def test_runs_that_share_steps_share_passes() -> None:
    with serving(paged) as engine:
        runs = await open_runs(engine, 8)

        await asyncio.gather(*(sample(engine, run) for run in runs))

        assert engine.counters.forward_passes == engine.counters.steps
        assert engine.counters.tokens_forwarded == sum(len(run.tokens) - 1 for run in runs) - sum(
            run.num_inherited for run in runs
        )


@both
async def test_no_more_rows_than_are_allowed_share_a_step(runner: Runner) -> None:
    alone = await sampled_alone(runner, 5)
    with serving(runner, max_rows=2) as engine:
        runs = await open_runs(engine, 5)

        await asyncio.gather(*(sample(engine, run, Client(engine, run)) for run in runs))

        assert logs(runs) == alone
        rows = [sum(length == 1 for _, length in step) for step in watched(engine).steps]
        assert max(rows) == 2


async def test_runs_that_share_too_few_rows_have_them_in_turn() -> None:
    with serving(paged, max_rows=2) as engine:
        gate, steps = Gate(), list[list[KVCache]]()

        def watch(pieces: Sequence[Piece]) -> None:
            gate.pass_through()
            steps.append([piece.cache for piece in pieces])

        watched(engine).before_step = watch
        # So few tokens that none waits for its consumer.
        params = replace(SEEDED, max_output_tokens=WINDOW - 1)
        runs = [engine.open_run(f"{i}", [5 + i] * 4, params, Constraint()) for i in range(5)]
        watched(engine).steering = lambda _: [70, 71, 72]
        sampling = [asyncio.ensure_future(sample(engine, run)) for run in runs]
        await gate.wait_until_begun()
        await let_the_loop_turn()
        gate.open()
        await asyncio.gather(*sampling)

        for cache in {cache for step in steps for cache in step}:
            places = [place for place, step in enumerate(steps) if cache in step]
            waits = [after - before for before, after in pairwise(places)]
            assert max(waits) <= 3, "two of five runs have a row in each step"


async def test_a_run_of_one_token_waits_for_room_for_its_state_too() -> None:
    def with_state(num_blocks: int) -> ModelRunner:
        pool, handling = BlockPool(num_blocks), Handling(num_state_blocks=4)
        return GenericRunner(llama(), pool=pool, is_exact=True, handling=handling)

    params = replace(SEEDED, max_output_tokens=8)
    with serving(with_state, num_blocks=9, gathering_seconds=1) as engine:
        watched(engine).steering = lambda _: [70, 71, 72]
        runs = [engine.open_run(str(ids), ids, params, Constraint()) for ids in ([5] * 4, [5])]

        await asyncio.gather(*(sample(engine, run) for run in runs))

        assert [len(run.tokens) for run in runs] == [12, 9]
        assert max(map(len, watched(engine).steps)) == 1


@both
async def test_a_long_prompt_holds_a_neighbour_up_by_a_chunk_at_a_time(runner: Runner) -> None:
    with serving(runner, prefill_chunk=16, gathering_seconds=5) as engine:
        neighbour = engine.open_run(
            "short", [5] * 4, SamplingParams(max_output_tokens=40), Constraint()
        )
        long = engine.open_run(
            "long", range(3, 163), replace(SEEDED, max_output_tokens=2), Constraint()
        )
        watched(engine).steering = lambda _: [70, 71, 72]
        async with aclosing(engine.sample(neighbour)) as outputs:
            await anext(output async for output in outputs if isinstance(output, TextDelta))
            sampling = asyncio.ensure_future(sample(engine, long))
            async for _ in outputs:
                pass
        await sampling

        chunks = [step for step in watched(engine).steps if any(length == 16 for _, length in step)]
        assert [start for step in chunks for start, length in step if length == 16] == list(
            range(0, 160, 16)
        )
        assert all(len(step) == 2 for step in chunks)


@both
async def test_a_consumer_that_does_not_come_back_stops_nobody_else(runner: Runner) -> None:
    with serving(runner) as engine:
        slow, *others = await open_runs(engine, 3)
        async with aclosing(engine.sample(slow)) as outputs:
            await anext(output async for output in outputs if isinstance(output, TextDelta))

            await asyncio.gather(*(sample(engine, run) for run in others))

            assert slow.state is RunState.DECODING
            # What came at once is told at once, but no more than it may be ahead by.
            assert 1 <= slow.segments[0].output_tokens <= WINDOW
            await asyncio.wait_for(anext(outputs), DEADLINE_SECONDS)


async def test_the_model_is_ahead_of_a_consumer_by_a_window_at_most() -> None:
    with serving(paged) as engine:
        slow, other = await open_runs(engine, 2)
        async with aclosing(engine.sample(slow)) as outputs:
            await anext(output async for output in outputs if isinstance(output, TextDelta))
            await sample(engine, other)

            held = engine.snapshot(slow).cache.num_tokens

        # However many came at once, they are with the consumer; the last one sampled is pending.
        assert held == slow.segments[0].input_tokens + WINDOW - 1


# --- What is ahead is undone ---------------------------------------------------------------------


async def test_what_was_sampled_behind_a_steered_stop_is_undone() -> None:
    thought = "<think>\nHm.\n</think>\n\nSunny and warm."
    constraint = Constraint((), thinks=True)
    with serving(paged) as engine:
        run = await open_run(engine, tools=(), params=SEEDED, constraint=constraint)
        said = engine.model.tokenizer.encode_text(thought)
        start = len(run.tokens)
        watched(engine).steering = lambda position: [[*said, IM_END][position - start]]
        has_thought = Event()

        def wait_for_consumer(pieces: Sequence[Piece]) -> None:
            [piece] = pieces
            while not has_thought.is_set() and len(run.tokens) <= piece.cache.num_tokens:
                time.sleep(0.001)

        watched(engine).before_step = wait_for_consumer
        snapshots = []
        async with aclosing(engine.sample(run)) as outputs:
            async for output in outputs:
                if isinstance(output, ReasoningDone):
                    run.wanted_stop = StopReason.STEERED
                    has_thought.set()
                    while forwarded_up_to(engine) < len(run.tokens) + 6:
                        await engine.measure_memory()  # until the window is used up
                if isinstance(output, SegmentEnded):
                    snapshots.append(engine.snapshot(run))

        state = run.state
        assert state is RunState.INCOMPLETE
        [snapshot] = snapshots
        assert snapshot.cache.num_tokens == len(run.tokens) - 1
        follower = engine.open_run(
            "next",
            [*run.tokens.ids, 70],
            replace(SEEDED, max_output_tokens=1),
            Constraint(),
            Sources([snapshot]),
        )
        watched(engine).steering = lambda _: ()
        await sample(engine, follower)
        assert follower.num_inherited == len(run.tokens) - 1


@both
async def test_a_run_that_is_cancelled_in_its_prompt_gives_everything_back(runner: Runner) -> None:
    with serving(runner, prefill_chunk=16) as engine:
        gate = Gate()
        neighbour, run = await open_runs(engine, 2)
        watched(engine).before_step = lambda _: (
            gate.pass_through() if len(watched(engine).steps) == 3 else None
        )
        sampling = asyncio.ensure_future(sample(engine, run))
        await gate.wait_until_begun()
        beside = asyncio.ensure_future(sample(engine, neighbour))
        sampling.cancel()
        await let_the_loop_turn()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await sampling
        await beside

        assert run.num_forwarded == 3 * 16
        assert [run.state, neighbour.state] == [RunState.CANCELLED, RunState.COMPLETED]
        del beside, sampling
        await assert_all_is_free(engine)


# --- Suspended runs ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("mode", Mode)
async def test_what_becomes_of_a_suspended_cache_changes_no_token(
    runner: Runner, mode: Mode, tmp_path: Path
) -> None:
    alone = await sampled_alone(runner, 3)
    options: dict[str, Any] = {
        "suspend_policy": mode,
        "swap_directory": tmp_path,
        "reuse_prefixes": False,
    }
    with serving(runner, **options) as engine:
        runs = await open_runs(engine, 3)
        clients = [Client(engine, run) for run in runs]

        for run, client in zip(runs, clients, strict=True):
            await sample(engine, run, client)

        assert logs(runs) == alone
        counters = engine.counters
        held = sum(client.suspensions[0].num_tokens - 1 for client in clients)
        is_kept = mode in (Mode.AUTO, Mode.PRESERVE)
        assert counters.discards == (3 if mode is Mode.DISCARD else 0)
        assert counters.tokens_reforwarded == (held if mode is Mode.DISCARD else 0)
        assert counters.swaps_out == counters.swaps_in == (3 if mode is Mode.SWAP else 0)
        assert counters.tokens_swapped == (held if mode is Mode.SWAP else 0)
        assert [run.segments[1].cached_tokens > 0 for run in runs] == (
            [False] * 3 if mode is Mode.DISCARD else [True] * 3
        )
        assert is_kept == (counters.discards == counters.swaps_out == 0)
        await assert_all_is_free(engine)


@both
@pytest.mark.parametrize("mode", Mode)
async def test_twenty_suspended_runs_all_end_in_a_pool_for_six(
    runner: Runner, mode: Mode, tmp_path: Path
) -> None:
    alone = await sampled_alone(runner, 20)
    longest = blocks_for(max(map(len, alone)))
    options: dict[str, Any] = {
        "suspend_policy": mode,
        "swap_directory": tmp_path,
        "reuse_prefixes": False,
    }
    with serving(runner, 6 * longest, **options) as engine:
        runs = await open_runs(engine, 20)
        num_suspended = 0
        all_are_suspended = asyncio.Event()

        async def answer_when_all_are(run: Run, suspension: Suspension) -> Resumption:
            nonlocal num_suspended
            num_suspended += 1
            if num_suspended == 20:
                all_are_suspended.set()
            await all_are_suspended.wait()
            answered = suspension.answer(dict.fromkeys(suspension.awaited, "sunny"))
            return await resume_with(engine, run, answered)

        async def play(run: Run) -> None:
            await sample(engine, run, lambda suspension: answer_when_all_are(run, suspension))

        async with asyncio.timeout(60):
            await asyncio.gather(*map(play, runs))

        assert logs(runs) == alone
        counters = engine.counters
        num_held = blocks_for(runs[0].tokens.spans[1].stop - 1)
        assert counters.discards + counters.swaps_out >= 20 - 6 * longest // num_held
        if mode is Mode.SWAP:  # suspended or not
            assert counters.tokens_reforwarded == counters.discards == 0
        elif not counters.discards + counters.preemptions:
            assert counters.tokens_reforwarded == 0
        await assert_all_is_free(engine)


class ReadingNoted(ParkedCaches):
    """Notes what is known of the queue when a cache is read back."""

    def __init__(self, policy: SuspensionPolicy, *options: Any) -> None:
        super().__init__(policy, *options)
        self.costs = policy.costs
        self.queue_seconds: list[float] = []

    def swap_in(self, cache: KVCache, beginning: KVCache | None = None) -> bool:
        if cache.is_swapped:
            self.queue_seconds.append(self.costs.rates.requeue_seconds)
        return super().swap_in(cache, beginning)


async def test_to_read_a_cache_back_is_no_part_of_the_queue(tmp_path: Path) -> None:
    noting: list[ReadingNoted] = []

    def parks(*options: Any) -> ReadingNoted:
        noting.append(ReadingNoted(*options))
        return noting[0]

    with serving(paged, suspend_policy=Mode.SWAP, swap_directory=tmp_path, parks=parks) as engine:
        [run] = await open_runs(engine, 1)

        await sample(engine, run, Client(engine, run))

        [at_reading] = noting[0].queue_seconds
        assert 0.0 < at_reading == noting[0].costs.rates.requeue_seconds


@pytest.mark.parametrize("max_tokens", [2, 9], ids=["out of tokens", "end of turn"])
async def test_whoever_needs_the_memory_of_a_turn_that_is_over_waits_for_word_of_its_run(
    max_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is known to be over; and whoever has enough in what is free goes on meanwhile."""
    monkeypatch.setattr("sampler.parked_caches.WORD_SECONDS", 60.0)
    options: dict[str, Any] = {
        "suspend_policy": Mode.SWAP,
        "swap_directory": tmp_path,
        "reuse_prefixes": False,
    }
    with serving(paged, 12, **options) as engine:
        long, waits = 8 * BLOCK_SIZE - 4, max_tokens > 2
        some, many = (replace(SEEDED, max_output_tokens=n) for n in (max_tokens, 30))
        runs = [
            engine.open_run("ending", [5] * long, some, Constraint((WEATHER,))),
            engine.open_run("going on", [6] * 12, many, Constraint()),  # takes a block in step 6
            engine.open_run("waiting", [7] * long, some, Constraint()),
        ]
        gate, seventh_step, loop = Gate(), Event(), asyncio.get_running_loop()

        def hold_the_loop_up(_: Sequence[Piece]) -> None:
            number = len(watched(engine).steps)
            if number == 1:
                gate.pass_through()
                loop.call_soon_threadsafe(seventh_step.wait, DEADLINE_SECONDS)
            elif number == 7:
                seventh_step.set()

        watched(engine).before_step = hold_the_loop_up
        last = IM_END if waits else 70
        watched(engine).steering = lambda position: [last if position == long + 1 else 70]
        sampling = [asyncio.ensure_future(sample(engine, run)) for run in runs]
        await gate.wait_until_begun()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while any(run.segments[0].handed_at is None for run in runs):
                await let_the_loop_turn()
        gate.open()
        await asyncio.gather(*sampling)

        steps = watched(engine).steps
        first, second = [number for number, step in enumerate(steps, 1) if (0, long) in step]
        assert first == 1
        assert second > 7 if waits else second == 3
        assert engine.counters.swaps_out == engine.counters.discards == 0
        assert engine.counters.kept_discards == (not waits)
        del sampling
        await assert_all_is_free(engine)


async def test_a_run_that_resumes_is_read_before_those_that_came_after_it() -> None:
    with serving(paged, prefill_chunk=4) as engine:
        [first] = await open_runs(engine, 1)
        second = engine.open_run("second", [6] * 80, SEEDED, Constraint())
        may_go_on, gate = asyncio.Event(), Gate()
        readers: list[Run] = []

        def note(pieces: Sequence[Piece]) -> None:
            chunks = [piece for piece in pieces if len(piece.token_ids) > 1]
            readers.extend(first if piece.cache is first_cache else second for piece in chunks)
            if len(readers) == 3:
                gate.pass_through()

        async with aclosing(engine.sample(first, answering(engine, first, may_go_on))) as outputs:
            await until_suspended(outputs)
            first_cache = engine.snapshot(first).cache
            watched(engine).before_step = note
            sampling = asyncio.ensure_future(sample(engine, second))
            await gate.wait_until_begun()
            may_go_on.set()
            going_on = asyncio.ensure_future(anext(outputs))
            async with asyncio.timeout(DEADLINE_SECONDS):
                while len(first.segments) == 1 or first.segments[1].handed_at is None:
                    await let_the_loop_turn()
            gate.open()
            await going_on
            async for _ in outputs:
                pass
        await sampling

        since = readers.index(first)
        num_chunks = readers.count(first)
        assert num_chunks >= 3
        assert readers[since:] == [first] * num_chunks + [second] * (20 - since)
        assert since <= 4, "it came amid the other's prompt"


def damage_files(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file() and (size := path.stat().st_size):
            path.write_bytes(b"x" * size)


async def test_a_swap_file_that_is_damaged_costs_a_prefill_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = await sampled_alone(generic, 1)
    with serving(generic, suspend_policy=Mode.SWAP, swap_directory=tmp_path) as engine:
        [run] = await open_runs(engine, 1)

        async def damage(suspension: Suspension) -> Resumption:
            await engine.measure_memory()
            damage_files(tmp_path)
            answered = suspension.answer(dict.fromkeys(suspension.awaited, "sunny"))
            return await resume_with(engine, run, answered)

        await sample(engine, run, damage)

        assert logs([run]) == alone
        assert engine.counters.swaps_in == 0
        assert engine.counters.tokens_reforwarded > 0
        assert "a swapped cache is lost" in caplog.text


async def test_what_cannot_be_swapped_out_is_discarded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = await sampled_alone(generic, 1)
    options: dict[str, Any] = {
        "suspend_policy": Mode.SWAP,
        "swap_directory": tmp_path,
        "swap_bytes": 100,
    }
    with serving(generic, **options) as engine:
        [run] = await open_runs(engine, 1)

        await sample(engine, run, Client(engine, run))

        assert logs([run]) == alone
        assert (engine.counters.swaps_out, engine.counters.discards) == (0, 1)
        assert "cannot be swapped out" in caplog.text


async def test_a_suspended_run_that_was_discarded_finds_what_is_still_there() -> None:
    alone = await sampled_alone(paged, 1)
    with serving(paged, suspend_policy=Mode.DISCARD) as engine:
        [run] = await open_runs(engine, 1)
        client = Client(engine, run)

        await sample(engine, run, client)

        assert logs([run]) == alone
        assert engine.counters.discards == 1
        num_held = client.suspensions[0].num_tokens - 1
        assert engine.counters.tokens_reforwarded == num_held % BLOCK_SIZE
        assert run.segments[1].cached_tokens == num_held - num_held % BLOCK_SIZE
        assert run.num_inherited == 0


async def test_what_a_discarded_run_finds_beyond_what_it_had_is_of_another() -> None:
    with serving(paged, suspend_policy=Mode.DISCARD) as engine:
        [first], [second] = await open_runs(engine, 1), await open_runs(engine, 1)
        await sample(engine, first, Client(engine, first))
        before = engine.counters.tokens_forwarded

        await sample(engine, second, Client(engine, second))

        assert logs([first]) == logs([second])
        assert second.num_inherited >= second.segments[0].cached_tokens + BLOCK_SIZE
        assert second.tokens_forwarded == engine.counters.tokens_forwarded - before
        assert second.tokens_reforwarded == 0


async def test_what_was_swapped_out_shares_its_prompt_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    alone = await sampled_alone(paged, 1)
    with serving(paged, suspend_policy=Mode.SWAP, swap_directory=tmp_path) as engine:
        [run] = await open_runs(engine, 1)
        prompt = engine.new_snapshot(run.tokens.ids)
        await engine.warm_up(prompt)

        async with aclosing(engine.sample(run, Client(engine, run))) as outputs:
            *_, last = [engine.snapshot(run) async for o in outputs if isinstance(o, SegmentEnded)]

        assert logs([run]) == alone
        assert engine.counters.swaps_in == 1
        num_shared = prompt.cache.num_tokens // BLOCK_SIZE
        memory = await engine.measure_memory()
        assert memory.num_used == prompt.cache.num_blocks + last.cache.num_blocks - num_shared


def test_what_an_eviction_frees_is_what_nobody_else_holds() -> None:
    runner, policy = paged(40), SuspensionPolicy()
    active, lone = runner.new_cache(), runner.new_cache()
    runner.forward([Piece([5] * 160, active), Piece([6] * 320, lone)])
    shared = active.fork(160)
    assert shared is not None
    parked = ParkedCaches(policy, runner.counters)
    for cache in (shared, lone):
        parked.suspend(cache, ["tool"], time.monotonic())

    assert [one.key for one in parked.evictions(0)] == [ref(lone), ref(shared)]
    active.drop()
    assert [one.key for one in parked.evictions(0)] == [ref(shared), ref(lone)]


@pytest.mark.parametrize("forced_ids", [None, (70, IM_END)], ids=["sampled", "forced"])
async def test_what_gave_no_numbers_is_not_told_nor_found_by_others(
    forced_ids: tuple[int, ...] | None,
) -> None:
    with serving(paged) as engine:
        params, prompt = replace(SEEDED, max_output_tokens=2), [7] * 3 * BLOCK_SIZE
        first = engine.open_run("first", prompt, params, Constraint(forced_ids=forced_ids))
        second = engine.open_run("second", prompt, params, Constraint())
        with pytest.MonkeyPatch.context() as patch:
            no_number = torch.full((VOCAB_SIZE,), torch.nan)
            patch.setattr(watched(engine), "_steered", lambda logits, _: no_number)
            with pytest.raises(EngineError, match="no numbers"):
                await sample(engine, first)

        await sample(engine, second)

        assert len(first.tokens) == len(prompt)
        assert second.segments[0].cached_tokens == 0


out_of_memory_or_broken = pytest.mark.parametrize("error", [MemoryError, RuntimeError])


@contextmanager
def failing(owner: type, name: str, error: type[Exception]) -> Iterator[None]:
    """Have a method raise an ``error``, which is not logged: pytest keeps what is, and with its
    traceback the caches."""

    def fail(*_: object) -> None:
        raise error("injected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        patch.setattr("sampler.parked_caches.logger.disabled", True)
        yield


@both
@out_of_memory_or_broken
async def test_an_error_while_a_cache_is_brought_back_costs_a_prefill_and_no_more(
    runner: Runner, error: type[Exception], tmp_path: Path
) -> None:
    alone = await sampled_alone(runner, 2)
    with serving(runner, suspend_policy=Mode.SWAP, swap_directory=tmp_path) as engine:
        run, neighbour = await open_runs(engine, 2)
        async with aclosing(engine.sample(neighbour, Client(engine, neighbour))) as outputs:
            await anext(output async for output in outputs if isinstance(output, TextDelta))

            with failing(SwapEntry, "read_into", error):
                await sample(engine, run, Client(engine, run))

            async for _ in outputs:
                pass

        assert logs([run, neighbour]) == alone
        assert run.tokens_reforwarded > neighbour.tokens_reforwarded == 0
        del outputs
        await assert_all_is_free(engine)


@both
@out_of_memory_or_broken
async def test_an_error_at_a_suspension_has_the_cache_discarded(
    runner: Runner, error: type[Exception], tmp_path: Path
) -> None:
    alone = await sampled_alone(runner, 1)
    with serving(runner, suspend_policy=Mode.SWAP, swap_directory=tmp_path) as engine:
        [run] = await open_runs(engine, 1)

        with failing(SwapStore, "put", error):
            await sample(engine, run, Client(engine, run))

        assert logs([run]) == alone
        assert (engine.counters.swaps_out, engine.counters.discards) == (0, 1)
        await assert_all_is_free(engine)


@out_of_memory_or_broken
async def test_an_error_while_room_is_made_fails_nobody(
    error: type[Exception], tmp_path: Path
) -> None:
    params = replace(SEEDED, max_output_tokens=20)
    with serving(
        paged, 8, suspend_policy=Mode.SWAP, swap_directory=tmp_path, reuse_prefixes=False
    ) as engine:
        watched(engine).steering = lambda _: [70, 71]
        slow = engine.open_run("slow", [5] * 40, params, Constraint())
        async with aclosing(engine.sample(slow)) as outputs:
            await anext(output async for output in outputs if isinstance(output, TextDelta))
            other = engine.open_run("other", [6] * 80, params, Constraint())

            with failing(SwapStore, "put", error):
                await sample(engine, other)

            async for _ in outputs:
                pass

        assert [slow.state, other.state] == [RunState.INCOMPLETE] * 2
        assert engine.counters.swaps_out == 0
        assert engine.counters.preemptions == 1
        del outputs
        await assert_all_is_free(engine)


async def suspended(engine: LocalEngine, run: Run) -> AsyncGenerator[Output, None]:
    """Return what samples ``run``, up to its call, which is not answered."""
    outputs = engine.sample(run, answering(engine, run, asyncio.Event()))
    await until_suspended(outputs)
    await engine.measure_memory()
    return outputs


async def test_files_that_are_only_kept_go_before_what_a_run_waits_for(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "suspend_policy": Mode.SWAP,
        "swap_directory": tmp_path,
        "reuse_prefixes": False,
    }
    with serving(paged, **options) as engine:
        [run] = await open_runs(engine, 1)
        async with aclosing(await suspended(engine, run)):
            [num_bytes] = [path.stat().st_size for path in swap_files(tmp_path)]
    with serving(paged, swap_bytes=3 * num_bytes, **options) as engine:
        runs = await open_runs(engine, 6)
        kept = []
        for run in runs[:3]:
            async with aclosing(await suspended(engine, run)):
                kept.append(engine.snapshot(run).cache)
        async with AsyncExitStack() as stack:
            for run in runs[3:5]:
                await stack.enter_async_context(aclosing(await suspended(engine, run)))

            assert [cache.is_swapped for cache in kept] == [False, False, True]
            assert engine.counters.swaps_out == 5
            assert (engine.counters.discards, engine.counters.kept_discards) == (0, 2)


async def test_files_that_are_kept_stay_where_all_of_them_would_make_no_room(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {
        "suspend_policy": Mode.SWAP,
        "swap_directory": tmp_path,
        "reuse_prefixes": False,
    }
    with serving(paged, swap_bytes=100_000, **options) as engine:
        [run] = await open_runs(engine, 1)
        async with aclosing(await suspended(engine, run)):
            kept = engine.snapshot(run).cache
        large = await open_run(engine, "x" * 600, params=replace(SEEDED, max_output_tokens=2))
        prompt_length = len(large.tokens)
        watched(engine).steering = lambda position: (
            [CALL_OSLO] if position == prompt_length else [IM_END]
        )
        async with aclosing(await suspended(engine, large)):
            assert kept.is_swapped
            assert engine.counters.discards == 1


def swap_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("process-*/*") if path.is_file()]


@pytest.mark.parametrize("mode", Mode)
async def test_an_engine_that_starts_removes_what_a_killed_one_left(
    mode: Mode, tmp_path: Path
) -> None:
    with closing(SwapStore(tmp_path)) as store:
        root = store.directory.parent
    left = root / "process-dead"
    left.mkdir()
    (left / "0").touch()
    with serving(generic, suspend_policy=mode, swap_directory=tmp_path) as engine:
        await engine.start()

        async with asyncio.timeout(DEADLINE_SECONDS):
            while left.exists():
                await engine.measure_memory()
    assert list(root.iterdir()) == []


async def test_an_engine_that_cannot_swap_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    alone = await sampled_alone(generic, 1)
    with serving(generic, suspend_policy=Mode.SWAP, swap_directory=file) as engine:
        await engine.start()
        [run] = await open_runs(engine, 1)

        await sample(engine, run, Client(engine, run))

        assert logs([run]) == alone
        assert engine.counters.discards == 1
        assert "nothing can be swapped out for now" in caplog.text


# --- Memory that does not suffice ----------------------------------------------------------------

CAREFUL = SamplingParams(
    temperature=1, seed=5, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5
)


@both
async def test_runs_that_do_not_fit_together_take_turns(runner: Runner) -> None:
    """With penalties and a grammar, whose state is not in the cache."""
    alone = await sampled_alone(runner, 6, CAREFUL)
    longest = blocks_for(max(map(len, alone)))
    # Two fit when they begin, and do not when they have grown.
    with serving(runner, 2 * longest - 2, reuse_prefixes=False, gathering_seconds=1) as engine:
        runs = await open_runs(engine, 6, CAREFUL)

        async with asyncio.timeout(60):
            await asyncio.gather(*(sample(engine, run, Client(engine, run)) for run in runs))

        assert logs(runs) == alone
        assert engine.counters.preemptions + engine.counters.discards > 0
        await assert_all_is_free(engine)


@both
async def test_what_is_kept_for_followers_goes_before_anything_else(runner: Runner) -> None:
    with serving(runner, 40, reuse_prefixes=False) as engine:
        kept = []
        for run in await open_runs(engine, 4):
            async with aclosing(engine.sample(run)) as outputs:
                kept += [engine.snapshot(run) async for o in outputs if isinstance(o, SegmentEnded)]

        assert engine.counters.kept_discards >= 2
        assert engine.counters.preemptions == engine.counters.discards == 0
        assert kept[-1].cache.num_tokens > 0
        assert kept[0].cache.num_tokens == 0
        del kept, run
        await assert_all_is_free(engine)


async def test_nothing_goes_for_a_parent_that_finds_no_room_even_so(tmp_path: Path) -> None:
    """It is swapped out, and what is kept beside a run that is being sampled does not suffice."""
    options: dict[str, Any] = {
        "suspend_policy": Mode.SWAP,
        "swap_directory": tmp_path,
        "reuse_prefixes": False,
    }
    with serving(paged, 40, **options) as engine:
        watched(engine).steering = lambda position: [CALL_OSLO] if position == 320 else [IM_END]
        params = replace(SEEDED, max_output_tokens=2)
        parent = engine.open_run("parent", [5] * 320, params, Constraint((WEATHER,)))
        async with aclosing(await suspended(engine, parent)):
            source = engine.snapshot(parent)
            watched(engine).steering = lambda _: [70]
            long = replace(params, max_output_tokens=20)
            busy = engine.open_run("busy", [6] * 320, long, Constraint())
            other = engine.open_run("other", [7] * 100, params, Constraint())
            async with aclosing(engine.sample(busy)) as outputs:
                await anext(outputs)
                async with aclosing(engine.sample(other)) as others:
                    [kept] = [
                        engine.snapshot(other).cache
                        async for output in others
                        if isinstance(output, SegmentEnded)
                    ]
                follower = engine.open_run(
                    "follower", [5] * 40, params, Constraint(), Sources([source])
                )

                await sample(engine, follower)

                assert source.cache.is_swapped
                assert follower.num_inherited == 0
                assert kept.num_tokens > 0
                assert engine.counters.kept_discards == 0


async def test_a_prompt_that_no_pool_could_hold_is_refused() -> None:
    with serving(generic, 4) as engine:
        assert engine.max_context == 64
        with pytest.raises(ContextLengthExceededError, match="the context of 64"):
            engine.open_run("run", [5] * 64, SEEDED, Constraint())
        run = engine.open_run("run", [5] * 60, SEEDED, Constraint())
        watched(engine).steering = lambda _: [70]

        outputs = await sample(engine, run)

        assert isinstance(outputs[-1], SegmentEnded)
        assert outputs[-1].reason is StopReason.CONTEXT_LENGTH
        assert len(run.tokens) == 64


async def test_a_consumer_that_is_gone_for_long_does_not_keep_its_memory() -> None:
    with serving(paged, 24, reuse_prefixes=False) as engine:
        slow, *others = await open_runs(engine, 3)
        alone = (await sampled_alone(paged, 1))[0]
        async with aclosing(engine.sample(slow)) as outputs:
            text = [await anext(o.text async for o in outputs if isinstance(o, TextDelta))]
            async with asyncio.timeout(DEADLINE_SECONDS):
                await asyncio.gather(*(sample(engine, run) for run in others))
            text += [o.text async for o in outputs if isinstance(o, TextDelta)]

        assert engine.counters.preemptions > 0
        assert slow.tokens.ids == alone[: len(slow.tokens)]
        # Which way it went and came back, is a matter of what either was measured to take.
        assert slow.tokens_reforwarded > 0 or engine.counters.swaps_in > 0


# --- Prefixes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "shares"),
    [
        (Sources(salt="a"), True),
        (Sources(salt="b"), False),
        (Sources(), False),
        (Sources(salt="a", reuses_prefixes=False), False),
    ],
    ids=["same salt", "another salt", "no salt", "no reuse"],
)
async def test_a_prompt_that_was_read_is_shared_within_its_salt(
    sources: Sources, shares: bool
) -> None:
    with serving(paged) as engine:
        params = replace(SEEDED, max_output_tokens=4)
        prompt = list(range(3, 103))
        first = engine.open_run("first", prompt, params, Constraint(), Sources(salt="a"))
        await sample(engine, first)
        run = engine.open_run("second", prompt, params, Constraint(), sources)

        await sample(engine, run)

        assert run.num_inherited == run.segments[0].cached_tokens == (96 if shares else 0)
        assert run.tokens.ids == first.tokens.ids


async def test_an_engine_that_reuses_no_prefixes_shares_none() -> None:
    with serving(paged, reuse_prefixes=False) as engine:
        params = replace(SEEDED, max_output_tokens=2)
        first, second = [engine.open_run("", range(3, 103), params, Constraint()) for _ in range(2)]

        await sample(engine, first)
        await sample(engine, second)

        assert second.num_inherited == 0
        assert (await engine.measure_memory()).num_cached == 0


async def test_prompts_that_begin_alike_are_computed_once_even_if_they_come_at_once() -> None:
    with serving(paged, prefill_chunk=16) as engine:
        params = replace(SEEDED, max_output_tokens=2)
        runs = [
            engine.open_run(f"{i}", [*range(3, 99), 100 + i, 7], params, Constraint())
            for i in range(4)
        ]

        await asyncio.gather(*(sample(engine, run) for run in runs))

        assert sorted(run.num_inherited for run in runs) == [0, 96, 96, 96]
        assert engine.counters.tokens_reforwarded == 0


@pytest.mark.parametrize("wishes", [True, False], ids=["a wish", "the generator closed"])
async def test_what_ran_ahead_and_was_swapped_out_is_undone(wishes: bool, tmp_path: Path) -> None:
    with serving(
        paged, 8, suspend_policy=Mode.SWAP, swap_directory=tmp_path, reuse_prefixes=False
    ) as engine:
        watched(engine).steering = lambda _: [70, 71]
        slow = engine.open_run(
            "slow", [5] * 40, replace(SEEDED, max_output_tokens=20), Constraint()
        )
        async with aclosing(engine.sample(slow)) as outputs:
            await anext(output async for output in outputs if isinstance(output, TextDelta))
            params = replace(SEEDED, max_output_tokens=2)
            await sample(engine, engine.open_run("other", [6] * 100, params, Constraint()))
            assert engine.counters.swaps_out == 1
            if wishes:
                slow.wanted_stop = StopReason.CANCELLED
                async for _ in outputs:
                    pass
        del outputs

        assert slow.state is RunState.CANCELLED
        await assert_all_is_free(engine)


async def test_warm_ups_that_begin_alike_are_computed_once_and_found_by_runs() -> None:
    with serving(paged) as engine:
        prompt, sources = range(3, 103), Sources(salt="a")
        others = Sources(salt="a"), Sources(salt="b"), Sources(salt="a", reuses_prefixes=False)
        await engine.warm_up(engine.new_snapshot(prompt), sources)

        forwarded = []
        for each in others:
            before = engine.counters.tokens_forwarded
            await engine.warm_up(engine.new_snapshot(prompt), each)
            forwarded.append(engine.counters.tokens_forwarded - before)
        params = replace(SEEDED, max_output_tokens=2)
        run = engine.open_run("run", prompt, params, Constraint(), sources)
        await sample(engine, run)

        assert forwarded == [4, 100, 100]
        assert run.num_inherited == 96


async def test_what_a_warm_up_forwards_again_is_counted() -> None:
    with serving(paged, 16, suspend_policy=Mode.DISCARD, reuse_prefixes=False) as engine:
        gate = Gate()
        watched(engine).before_step = lambda _: (
            gate.pass_through() if len(watched(engine).steps) == 2 else None
        )
        warming_up = asyncio.ensure_future(engine.warm_up(engine.new_snapshot([5] * 200)))
        await gate.wait_until_begun()
        params = replace(SEEDED, max_output_tokens=1)
        run = engine.open_run("run", [6] * 200, params, Constraint())
        sampling = asyncio.ensure_future(sample(engine, run))
        await let_the_loop_turn()
        gate.open()
        await asyncio.gather(warming_up, sampling)

        assert engine.counters.preemptions == 1
        assert engine.counters.tokens_reforwarded == 128
        assert engine.counters.tokens_forwarded == 200 + 200 + 128


async def test_what_a_cancelled_warm_up_took_can_be_had_by_others() -> None:
    with serving(generic, 8, reuse_prefixes=False) as engine:
        watched(engine).steering = lambda _: [70, 71]
        first, second = engine.new_snapshot([5] * 40), engine.new_snapshot([5] * 40)
        await engine.warm_up(first)
        gate = Gate()
        watched(engine).before_step = lambda _: gate.pass_through()
        params = replace(SEEDED, max_output_tokens=1)
        run = engine.open_run("run", [6] * 10, params, Constraint())
        sampling = asyncio.create_task(sample(engine, run))
        await gate.wait_until_begun()
        warming_up = asyncio.create_task(engine.warm_up(second, Sources([first])))
        await let_the_loop_turn()
        warming_up.cancel()
        await let_the_loop_turn()
        gate.open()
        watched(engine).before_step = lambda _: None
        await asyncio.wait([sampling, warming_up])

        params = replace(SEEDED, max_output_tokens=2)
        large = engine.open_run("large", [7] * 100, params, Constraint())
        async with asyncio.timeout(DEADLINE_SECONDS):
            await sample(engine, large)

        assert large.state is RunState.INCOMPLETE


# --- Steps that fail -----------------------------------------------------------------------------


@both
async def test_an_error_that_stays_fails_the_runs_of_its_step_and_no_other(runner: Runner) -> None:
    alone = await sampled_alone(runner, 3)
    with serving(runner) as engine:
        suspended, *hit = await open_runs(engine, 3)
        until = asyncio.Event()
        async with aclosing(
            engine.sample(suspended, answering(engine, suspended, until))
        ) as outputs:
            await until_suspended(outputs)

            def fail(_: Sequence[Piece]) -> None:
                raise RuntimeError("broken")

            watched(engine).before_step = fail
            errors = await asyncio.gather(
                *(sample(engine, run) for run in hit), return_exceptions=True
            )
            watched(engine).before_step = lambda _: None
            until.set()
            async for _ in outputs:
                pass

        assert [type(error) for error in errors] == [EngineError] * 2
        assert {run.state for run in hit} == {RunState.FAILED}
        assert suspended.tokens.ids == alone[0]
        del errors, outputs
        await assert_all_is_free(engine)


@both
async def test_an_error_that_goes_away_fails_nobody(runner: Runner) -> None:
    alone = await sampled_alone(runner, 4)
    with serving(runner, gathering_seconds=1) as engine:
        runs = await open_runs(engine, 4)

        def fail_in_company(pieces: Sequence[Piece]) -> None:
            if len(pieces) > 2:
                raise RuntimeError("too many")

        watched(engine).before_step = fail_in_company

        await asyncio.gather(*(sample(engine, run, Client(engine, run)) for run in runs))

        assert logs(runs) == alone
        assert max(map(len, watched(engine).steps)) == 4


@both
async def test_where_memory_runs_out_what_is_parked_goes_and_the_step_is_taken_again(
    runner: Runner,
) -> None:
    alone = await sampled_alone(runner, 2)
    with serving(runner, reuse_prefixes=False) as engine:
        kept, run = await open_runs(engine, 2)
        async with aclosing(engine.sample(kept)) as outputs:
            [snapshot] = [
                engine.snapshot(kept) async for o in outputs if isinstance(o, SegmentEnded)
            ]
        is_first = iter([True])

        def fail_once(_: Sequence[Piece]) -> None:
            if next(is_first, False):
                raise MemoryError("no memory left")

        watched(engine).before_step = fail_once

        await sample(engine, run, Client(engine, run))

        assert run.tokens.ids == alone[1]
        assert snapshot.cache.num_tokens == 0
        assert engine.counters.kept_discards == 1


@both
async def test_where_memory_stays_short_the_run_fails_and_says_so(runner: Runner) -> None:
    with serving(runner) as engine:
        runs = await open_runs(engine, 2)

        def fail(_: Sequence[Piece]) -> None:
            raise torch.OutOfMemoryError("no memory left")

        watched(engine).before_step = fail
        errors = await asyncio.gather(*(sample(engine, r) for r in runs), return_exceptions=True)
        watched(engine).before_step = lambda _: None

        assert [str(error) for error in errors] == ["out of memory: no memory left"] * 2
        [later] = await open_runs(engine, 1)
        await sample(engine, later)
        assert later.state is RunState.COMPLETED


async def test_a_mistake_in_planning_ends_runs_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(generic) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("sampler.stepper.schedule", lambda _: 1 / 0)
            [run] = await open_runs(engine, 1)
            with pytest.raises(EngineError):
                await sample(engine, run)
        [later] = await open_runs(engine, 1)

        await sample(engine, later)

        assert later.state is RunState.COMPLETED


async def test_a_mistake_in_planning_ends_only_those_that_wanted_to_take_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(paged) as engine:
        slow, run = await open_runs(engine, 2)
        async with aclosing(engine.sample(slow)) as outputs:
            await anext(output async for output in outputs if isinstance(output, TextDelta))
            while forwarded_up_to(engine) < slow.segments[0].input_tokens + WINDOW - 1:
                await engine.measure_memory()
            with monkeypatch.context() as patch:
                patch.setattr("sampler.stepper.schedule", lambda _: 1 / 0)
                with pytest.raises(EngineError):
                    await sample(engine, run)
            async for _ in outputs:
                pass

        assert slow.state is RunState.COMPLETED


async def test_whoever_is_sampled_when_the_engine_is_closed_is_cancelled() -> None:
    with serving(paged) as engine:
        [run] = await open_runs(engine, 1)
        gate = Gate()
        watched(engine).before_step = lambda _: gate.pass_through()
        sampling = asyncio.ensure_future(sample(engine, run))
        await gate.wait_until_begun()
        gate.open()
        engine.close()

        with pytest.raises(asyncio.CancelledError):
            await sampling
        assert run.state is RunState.CANCELLED
