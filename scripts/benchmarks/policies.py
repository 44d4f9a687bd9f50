"""What becomes of suspended caches where memory is short: the policies on one workload.

More runs than the pool has room for are opened at once. Each calls tools, one after the other,
whose times are drawn before and are the same for all policies. Of each suspension it is seen
whether its cache stayed, went to a file, or was given up, and when. From that follows its waste
in token-seconds (``sampler.waste``), and what an oracle that knows the tool's time would have
wasted; both with the costs that were measured beforehand, so that the policies are charged alike.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from protocol.items import Message
from protocol.tools import FunctionTool
from sampler.cache_pool import blocks_for
from sampler.conversation import Conversation
from sampler.costs import Costs
from sampler.engine import Resumption
from sampler.engines.simulated.model import SMOLLM2_KV, simulated_model
from sampler.engines.simulated.script import Script
from sampler.kv_cache import KVCache
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.model_runner import ModelRunner, Piece
from sampler.params import Constraint, SamplingParams
from sampler.prompt import TokenPrompt
from sampler.recorded_turn import RecordedTurn
from sampler.run import Run, RunState
from sampler.suspension import Suspension
from sampler.suspension_policy import Mode
from sampler.swap import SwapStore
from sampler.waste import Disposition, Rates, Suspended, oracle_waste, regret, waste
from scripts.benchmarks import passage
from scripts.benchmarks.bench import Bench
from scripts.benchmarks.contender import PREFILL_CHUNK, prompt_ids
from scripts.benchmarks.figures import Figure, figure
from scripts.benchmarks.pairing import again
from scripts.benchmarks.section import Grid, Section

_RUNS = 20
_ROOM_RUNS = 6
"""How many of them the pool has room for."""
_CALL_TOKENS = 96
"""At most so many for a call, its output, and what is around them."""
_CHARACTERS_PER_TOKEN = 4
_LOOK_SECONDS = 0.01

TOOL_TIMES = {"look_up": (0.05, 0.5), "search": (0.6, 0.8), "build": (4.0, 0.6)}
"""Median in seconds and spread of the log-normal times of each tool."""
_WEIGHTS = (5, 3, 2)
_DECODE_RATE, _PREFILL_RATE = 100.0, 1000.0
"""About what the embedded model does on two cores."""


def run(bench: Bench) -> Section:
    """Measure the section."""
    prompt_tokens, num_calls = bench.pick((600, 3), (600, 1))
    speed_up = bench.pick(2.0, 16.0)  # so that it is over sooner; tools too
    workload = Workload.drawn(num_calls, scale=1 / speed_up)
    tokens_per_run = prompt_tokens + (num_calls + 2) * _CALL_TOKENS
    loaded = simulated_model(
        speed_up * _DECODE_RATE,
        speed_up * _PREFILL_RATE,
        script=Script.of_calls(num_calls, "look_up", '{"number": 3}', num_words=16),
        kv_format=SMOLLM2_KV,
        kv_memory=_ROOM_RUNS * blocks_for(tokens_per_run) * SMOLLM2_KV.block_bytes,
    )
    rates = measured_rates(loaded.runner)
    prompts = passage.excerpts(_RUNS, _CHARACTERS_PER_TOKEN * prompt_tokens)
    modes = {mode.value: mode for mode in Mode} | {again(Mode.AUTO.value): Mode.AUTO}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in modes}
    for _ in range(bench.repeats(2, 1)):
        for name, mode in modes.items():
            bench.settle()
            outcome = asyncio.run(sample_all(loaded, mode, workload, prompts, rates))
            outcomes[name].append(outcome)
    return Section(
        "policies",
        f"{_RUNS} runs with tool calls, memory for {_ROOM_RUNS}, on a simulated accelerator",
        [Grid("policies", {name: _row(each) for name, each in outcomes.items()})],
        {
            "model": loaded.name,
            "is_simulated": loaded.is_simulated,
            "decode_rate": speed_up * _DECODE_RATE,
            "prefill_rate": speed_up * _PREFILL_RATE,
            "runs": _RUNS,
            "memory_for_runs": _ROOM_RUNS,
            "prompt_tokens": prompt_tokens,
            "calls_per_run": num_calls,
            "median_tool_seconds": {n: median / speed_up for n, (median, _) in TOOL_TIMES.items()},
            "rates": asdict(rates),
        },
        [
            "simulated: the steps take the time of a model at these rates; swapping is real",
            "regret: by which share the waste is above that of an oracle that knows the tools' "
            "times",
        ],
    )


@dataclass(frozen=True)
class Workload:
    """Which tools each run calls, and how long they take."""

    calls: Sequence[Sequence[tuple[str, float]]]
    """Of each run: the names and seconds, one after the other."""

    @staticmethod
    def drawn(num_calls: int, *, scale: float, num_runs: int = _RUNS) -> "Workload":
        """Return one that is always the same."""
        generator = random.Random(0)

        def call() -> tuple[str, float]:
            [name] = generator.choices(list(TOOL_TIMES), _WEIGHTS)
            median, spread = TOOL_TIMES[name]
            return name, scale * median * generator.lognormvariate(0.0, spread)

        return Workload([[call() for _ in range(num_calls)] for _ in range(num_runs)])


@dataclass
class Outcome:
    """What one policy came to."""

    wastes: list[tuple[float, float]] = field(default_factory=list)
    """Of each suspension: token-seconds of the policy and of the oracle."""
    run_seconds: list[float] = field(default_factory=list)
    resume_seconds: list[float] = field(default_factory=list)
    """From each output to the next token."""
    seconds: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)


_COUNTS = ("tokens_reforwarded", "swaps_out", "swaps_in", "discards", "preemptions")


def _row(outcomes: Sequence[Outcome]) -> dict[str, Figure]:
    """Return the figures of one policy, over the rounds."""

    def over_rounds(unit: str, value: Callable[[Outcome], float]) -> Figure:
        return figure([value(outcome) for outcome in outcomes], unit)

    def of_counter(name: str) -> Figure:
        return over_rounds("", lambda outcome: outcome.counts[name])

    return {
        "waste, token-seconds": over_rounds(
            "token-seconds", lambda outcome: sum(waste for waste, _ in outcome.wastes)
        ),
        "regret": over_rounds("share", lambda outcome: regret(outcome.wastes)),
        "run, mean s": over_rounds("s", lambda outcome: statistics.mean(outcome.run_seconds)),
        "run, last s": over_rounds("s", lambda outcome: max(outcome.run_seconds)),
        "resume, median ms": over_rounds(
            "ms", lambda outcome: 1000 * statistics.median(outcome.resume_seconds)
        ),
        **{name.replace("_", " "): of_counter(name) for name in _COUNTS},
    }


# --- The runs -------------------------------------------------------------------------------------

_TOOLS = {
    name: FunctionTool(
        name,
        f"{name}s something",
        {
            "type": "object",
            "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 6}},
            "required": ["number"],
        },
    )
    for name in TOOL_TIMES
}
_PARAMS = SamplingParams(temperature=0.0, max_output_tokens=48)


async def sample_all(
    loaded: LoadedModel,
    mode: Mode,
    workload: Workload,
    prompts: Sequence[str],
    rates: Rates,
) -> Outcome:
    """Sample all runs of ``workload``, opened at once, to their ends."""
    counters = loaded.runner.counters
    before = {name: getattr(counters, name) for name in _COUNTS}
    outcome = Outcome()
    # Nothing is shared: each policy is to do its own work.
    engine = LocalEngine(
        loaded, prefill_chunk=PREFILL_CHUNK, suspend_policy=mode, reuse_prefixes=False
    )
    with closing(engine):
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for calls, prompt in zip(workload.calls, prompts, strict=True):
                follower = _Follower(engine, calls, rates, outcome)
                group.create_task(follower.sample(prompt))
        outcome.seconds = time.monotonic() - start
    outcome.counts = {name: getattr(counters, name) - before[name] for name in _COUNTS}
    return outcome


class _Follower:
    """Samples one run, takes the time its tools take, and watches its cache meanwhile."""

    def __init__(
        self,
        engine: LocalEngine,
        calls: Sequence[tuple[str, float]],
        rates: Rates,
        outcome: Outcome,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._rates = rates
        self._outcome = outcome
        self._num_made = 0

    async def sample(self, text: str) -> None:
        """Sample the run to its end, and note what it came to."""
        start = time.monotonic()
        tools = tuple(_TOOLS.values())
        prompt = await self._engine.encode(Conversation([Message("user", text)], tools=tools))
        run = self._engine.open_run(text[:20], prompt.token_ids, _PARAMS, self._constraint())
        async with aclosing(self._engine.sample(run, partial(self._answer, run))) as outputs:
            async for _ in outputs:
                pass
        self._outcome.run_seconds.append(time.monotonic() - start)
        self._outcome.resume_seconds += [
            segment.time_to_first_token
            for segment in run.segments[1:]
            if segment.time_to_first_token is not None
        ]

    def _constraint(self) -> Constraint:
        """Return what the next turn is bound to: the next call, or text."""
        if self._num_made == len(self._calls):
            return Constraint()
        name, _ = self._calls[self._num_made]
        return Constraint((_TOOLS[name],), min_calls=1, max_calls=1)

    async def _answer(self, run: Run, suspension: Suspension) -> Resumption | None:
        if not suspension.calls:
            return None
        _, tool_seconds = self._calls[self._num_made]
        self._num_made += 1
        cache = self._engine.snapshot(run).cache
        facts = Suspended(cache.num_tokens, cache.num_blocks, self._num_running_tokens())
        disposition, held_seconds = await watch(cache, suspension.since, tool_seconds)
        self._outcome.wastes.append(
            (
                waste(facts, self._rates, disposition, tool_seconds, held_seconds),
                oracle_waste(facts, self._rates, tool_seconds),
            )
        )
        return await self._resumption(run, suspension)

    def _num_running_tokens(self) -> int:
        return sum(
            len(run.tokens)
            for run in self._engine.runs
            if run.state in (RunState.PREFILLING, RunState.DECODING)
        )

    async def _resumption(self, run: Run, suspension: Suspension) -> Resumption:
        requested_at = time.monotonic()
        outputs = {call.call_id: f"{self._num_made}: done" for call in suspension.calls}
        answered = suspension.answer(outputs)
        turn = RecordedTurn(answered.calls, tuple(run.sampled_in_segment()))
        known = TokenPrompt(Conversation([turn]), run.tokens.ids)
        prompt = await self._engine.encode(Conversation([turn, *answered.items()]), known)
        return Resumption(prompt, requested_at, self._constraint())


async def watch(cache: KVCache, since: float, tool_seconds: float) -> tuple[Disposition, float]:
    """Wait until ``tool_seconds`` after ``since``, and return what became of ``cache`` meanwhile,
    and after how many seconds."""
    while True:
        elapsed = time.monotonic() - since
        if cache.is_swapped:
            disposition = Disposition.SWAP
        elif cache.num_tokens == 0:
            disposition = Disposition.DISCARD
        elif elapsed >= tool_seconds:
            return Disposition.PRESERVE, tool_seconds
        else:
            await asyncio.sleep(min(_LOOK_SECONDS, tool_seconds - elapsed))
            continue
        await asyncio.sleep(max(0.0, tool_seconds - elapsed))
        return disposition, elapsed


# --- What work takes ------------------------------------------------------------------------------


def measured_rates(runner: ModelRunner) -> Rates:
    """Return what forwarding and swapping take with this runner."""
    costs = Costs(PREFILL_CHUNK)
    store = SwapStore(None)
    try:
        with torch.inference_mode():
            for _ in range(3):
                _observe(runner, costs, store)
    finally:
        store.close()
    return costs.rates


def _observe(runner: ModelRunner, costs: Costs, store: SwapStore) -> None:
    cache = runner.new_cache()
    for num_tokens in (PREFILL_CHUNK, 64, 8, 1):
        ids = prompt_ids(num_tokens, runner.vocab_size)
        start = time.perf_counter()
        runner.forward([Piece(ids, cache)])
        costs.observe_forward(num_tokens, time.perf_counter() - start)
    for is_in in (False, True):
        num_blocks = blocks_for(cache.num_tokens)
        start = time.perf_counter()
        if is_in:
            cache.swap_in()
        else:
            cache.swap_out(store)
        costs.observe_swap(num_blocks, time.perf_counter() - start, is_in=is_in)
    cache.drop()
