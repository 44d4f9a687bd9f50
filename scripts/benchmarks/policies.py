"""What becomes of suspended caches where memory is short: the policies on one workload.

More runs than the pool has room for are opened at once. Each calls tools, one after the other,
whose times are drawn before and are the same for all policies. Of each suspension it is noted on
the model thread whether its cache stayed, went to a file, or was given up, and when. From that
follows its waste in token-seconds (``sampler.waste``), and the least that an oracle would have
wasted, which knows the tool's time.

All policies are charged alike. What forwarding and swapping take is measured beforehand, in memory
that has been touched; how long a run without its cache waits for room, once the model thread has it
back, is a matter of the workload, and so is the mean over all of them.
"""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from protocol.items import Message
from protocol.tools import FunctionTool
from sampler.cache_pool import blocks_for
from sampler.conversation import Conversation
from sampler.costs import Costs
from sampler.engine import Resumption
from sampler.engines.simulated.model import SMOLLM2_KV, simulated_model
from sampler.engines.simulated.script import Script
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.model_runner import ModelRunner, Piece
from sampler.params import Constraint, SamplingParams
from sampler.prompt import TokenPrompt
from sampler.recorded_turn import RecordedTurn
from sampler.run import Run
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
from scripts.benchmarks.watched_caches import Fate, WatchedCaches

_RUNS = 20
_ROOM_RUNS = 6
"""How many of them the pool has room for."""
_CALL_TOKENS = 96
"""At most so many for a call, its output, and what is around them."""
_CHARACTERS_PER_TOKEN = 4

TOOL_TIMES = {"look_up": (0.05, 0.5), "search": (0.6, 0.8), "build": (2.0, 0.6)}
"""Median in seconds and spread of the log-normal times of each tool."""
_WEIGHTS = (5, 3, 2)
_DECODE_RATE, _PREFILL_RATE = 300.0, 2500.0
"""About what the embedded model does in int4 on two cores, at some hundred tokens."""


def run(bench: Bench) -> Section:
    """Measure the section."""
    prompt_tokens, num_calls = bench.pick((600, 3), (400, 1))
    speed_up = bench.pick(1.0, 5.0)  # so that it is over sooner; tools too
    workload = Workload.drawn(num_calls, scale=1 / speed_up)
    tokens_per_run = prompt_tokens + (num_calls + 2) * _CALL_TOKENS
    loaded = simulated_model(
        speed_up * _DECODE_RATE,
        speed_up * _PREFILL_RATE,
        script=Script.of_calls(num_calls, "look_up", '{"number": 3}', num_words=16),
        kv_format=SMOLLM2_KV,
        kv_memory=_ROOM_RUNS * blocks_for(tokens_per_run) * SMOLLM2_KV.block_bytes,
    )
    loaded.runner.reserve_memory()  # as the server does
    measured = measured_rates(loaded.runner)
    prompts = passage.excerpts(_RUNS, _CHARACTERS_PER_TOKEN * prompt_tokens)
    modes = {mode.value: mode for mode in Mode} | {again(Mode.AUTO.value): Mode.AUTO}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in modes}
    for _ in range(bench.repeats(2, 1)):
        for name, mode in modes.items():
            bench.settle()
            outcomes[name].append(asyncio.run(sample_all(loaded, mode, workload, prompts)))
    rates = with_requeue(measured, [one for each in outcomes.values() for one in each])
    return Section(
        "policies",
        f"{_RUNS} runs with tool calls, memory for {_ROOM_RUNS}, on a simulated accelerator",
        [Grid("policies", {name: row(each, rates) for name, each in outcomes.items()})],
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
            "regret: by which share the waste of suspensions is above that of an oracle that knows "
            "the tools' times",
            "preempted: what it wasted to take memory from runs that were being sampled; it is in "
            "no regret, for the scheduler does it where no parked cache is left",
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


@dataclass(frozen=True)
class Stop:
    """One suspension: what its tool took, and what it came to."""

    tool_seconds: float
    since: float
    """In monotonic seconds."""
    fate: Fate
    queue_seconds: float
    """From when the model thread had the run back to the first step for it."""

    def waste(self, rates: Rates) -> float:
        """Return the token-seconds that were wasted."""
        disposition = self.fate.disposition
        if disposition is Disposition.PRESERVE:
            return waste(self.fate.facts, rates, disposition, self.tool_seconds)
        # It went, even if the tool was done by then: who evicts may be busy with a step.
        held_seconds = max(0.0, self.fate.gone_at - self.since)
        return waste(self.fate.facts, rates, disposition, math.inf, held_seconds)

    def read_seconds(self, rates: Rates) -> float:
        """Return how much of the queue was reading the cache back, which is charged by itself."""
        is_read = self.fate.disposition is Disposition.SWAP
        return is_read * rates.swap_in_seconds * self.fate.facts.num_blocks

    def oracle_waste(self, rates: Rates) -> float:
        """Return the least that could have been wasted."""
        return oracle_waste(self.fate.facts, rates, self.tool_seconds)


@dataclass
class Outcome:
    """What one policy came to."""

    stops: list[Stop] = field(default_factory=list)
    preemptions: list[tuple[Suspended, Disposition]] = field(default_factory=list)
    run_seconds: list[float] = field(default_factory=list)
    resume_seconds: list[float] = field(default_factory=list)
    """From each output to the next token."""
    counts: Mapping[str, int] = field(default_factory=dict)

    def num(self, disposition: Disposition) -> int:
        """Return how many suspended caches went that way."""
        return sum(stop.fate.disposition is disposition for stop in self.stops)

    def waste(self, rates: Rates) -> float:
        """Return the token-seconds that suspensions wasted."""
        return math.fsum(stop.waste(rates) for stop in self.stops)

    def regret(self, rates: Rates) -> float:
        """Return by which share that is above the waste of the oracle."""
        return regret((stop.waste(rates), stop.oracle_waste(rates)) for stop in self.stops)

    def preemption_waste(self, rates: Rates) -> float:
        """Return the token-seconds that preemptions wasted."""
        return math.fsum(
            waste(facts, rates, disposition, math.inf) for facts, disposition in self.preemptions
        )


def with_requeue(rates: Rates, outcomes: Sequence[Outcome]) -> Rates:
    """Return ``rates`` with how long those waited in all ``outcomes`` that had lost their cache."""
    waits = [
        max(0.0, stop.queue_seconds - stop.read_seconds(rates))
        for outcome in outcomes
        for stop in outcome.stops
        if stop.fate.disposition is not Disposition.PRESERVE
    ]
    return replace(rates, requeue_seconds=statistics.mean(waits) if waits else 0.0)


_DISPOSITIONS = {
    "stayed": Disposition.PRESERVE,
    "swapped out": Disposition.SWAP,
    "discarded": Disposition.DISCARD,
}
_COUNTS = ("preemptions", "tokens_reforwarded", "swaps_out", "swaps_in")


def row(outcomes: Sequence[Outcome], rates: Rates) -> dict[str, Figure]:
    """Return the figures of one policy, over the rounds."""

    def over_rounds(unit: str, value: Callable[[Outcome], float]) -> Figure:
        return figure([value(outcome) for outcome in outcomes], unit)

    def of_disposition(disposition: Disposition) -> Figure:
        return over_rounds("", lambda outcome: outcome.num(disposition))

    def of_counter(name: str) -> Figure:
        return over_rounds("", lambda outcome: outcome.counts[name])

    return {
        "waste, token-seconds": over_rounds("token-seconds", lambda outcome: outcome.waste(rates)),
        "regret": over_rounds("share", lambda outcome: outcome.regret(rates)),
        "preempted, token-seconds": over_rounds(
            "token-seconds", lambda outcome: outcome.preemption_waste(rates)
        ),
        "run, mean s": over_rounds("s", lambda outcome: statistics.mean(outcome.run_seconds)),
        "run, last s": over_rounds("s", lambda outcome: max(outcome.run_seconds)),
        "resume, median ms": over_rounds(
            "ms", lambda outcome: 1000 * statistics.median(outcome.resume_seconds)
        ),
        **{name: of_disposition(one) for name, one in _DISPOSITIONS.items()},
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
    loaded: LoadedModel, mode: Mode, workload: Workload, prompts: Sequence[str]
) -> Outcome:
    """Sample all runs of ``workload``, opened at once, to their ends."""
    counters = loaded.runner.counters
    before = {name: getattr(counters, name) for name in _COUNTS}
    outcome = Outcome()
    watched: list[WatchedCaches] = []

    def watching(*arguments: Any) -> WatchedCaches:
        watched.append(WatchedCaches(*arguments))
        return watched[-1]

    # Nothing is shared: each policy is to do its own work.
    engine = LocalEngine(
        loaded,
        prefill_chunk=PREFILL_CHUNK,
        suspend_policy=mode,
        reuse_prefixes=False,
        parks=watching,
    )
    [caches] = watched
    with closing(engine):
        async with asyncio.TaskGroup() as group:
            for calls, prompt in zip(workload.calls, prompts, strict=True):
                follower = _Follower(engine, caches, calls, outcome)
                group.create_task(follower.sample(prompt))
    outcome.preemptions = caches.preemptions
    outcome.counts = {name: getattr(counters, name) - before[name] for name in _COUNTS}
    return outcome


class _Follower:
    """Samples one run, and takes the time that its tools take."""

    def __init__(
        self,
        engine: LocalEngine,
        caches: WatchedCaches,
        calls: Sequence[tuple[str, float]],
        outcome: Outcome,
    ) -> None:
        self._engine = engine
        self._caches = caches
        self._calls = calls
        self._outcome = outcome
        self._suspended_at: list[float] = []
        """At each call that was made."""

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
        self._outcome.stops += self._stops(run)
        self._outcome.resume_seconds += [
            segment.time_to_first_token
            for segment in run.segments[1:]
            if segment.time_to_first_token is not None
        ]

    def _stops(self, run: Run) -> list[Stop]:
        fates = [self._caches.fates[since] for since in self._suspended_at]
        return [
            Stop(tool_seconds, since, fate, (resumed.started_at or 0.0) - fate.back_at)
            for (_, tool_seconds), since, fate, resumed in zip(
                self._calls, self._suspended_at, fates, run.segments[1:], strict=True
            )
        ]

    def _constraint(self) -> Constraint:
        """Return what the next turn is bound to: the next call, or text."""
        num_made = len(self._suspended_at)
        if num_made == len(self._calls):
            return Constraint()
        name, _ = self._calls[num_made]
        return Constraint((_TOOLS[name],), min_calls=1, max_calls=1)

    async def _answer(self, run: Run, suspension: Suspension) -> Resumption | None:
        if not suspension.calls:
            return None
        _, tool_seconds = self._calls[len(self._suspended_at)]
        self._suspended_at.append(suspension.since)
        await asyncio.sleep(suspension.since + tool_seconds - time.monotonic())
        return await self._resumption(run, suspension)

    async def _resumption(self, run: Run, suspension: Suspension) -> Resumption:
        requested_at = time.monotonic()
        number = len(self._suspended_at)
        outputs = {call.call_id: f"{number}: done" for call in suspension.calls}
        answered = suspension.answer(outputs)
        turn = RecordedTurn(answered.calls, tuple(run.sampled_in_segment()))
        known = TokenPrompt(Conversation([turn]), run.tokens.ids)
        prompt = await self._engine.encode(Conversation([turn, *answered.items()]), known)
        return Resumption(prompt, requested_at, self._constraint())


# --- What work takes ------------------------------------------------------------------------------


def measured_rates(runner: ModelRunner, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Return what forwarding and swapping take with this runner, by ``clock``."""
    costs = Costs(PREFILL_CHUNK)
    store = SwapStore(None)
    try:
        with torch.inference_mode():
            # Whoever does something for the first time does it slowly.
            _observe(runner, Costs(), store, clock)
            for _ in range(3):
                _observe(runner, costs, store, clock)
    finally:
        store.close()
    return costs.rates


def _observe(
    runner: ModelRunner, costs: Costs, store: SwapStore, clock: Callable[[], float]
) -> None:
    cache = runner.new_cache()
    for num_tokens in (PREFILL_CHUNK, 64, 8, 1):
        ids = prompt_ids(num_tokens, runner.vocab_size)
        start = clock()
        runner.forward([Piece(ids, cache)])
        costs.observe_forward(num_tokens, clock() - start)
    for is_in in (False, True):
        num_blocks = blocks_for(cache.num_tokens)
        start = clock()
        if is_in:
            cache.swap_in()
        else:
            cache.swap_out(store)
        costs.observe_swap(num_blocks, clock() - start, is_in=is_in)
    cache.drop()
