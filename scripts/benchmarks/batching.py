"""Sequences that are decoded together: what a batch adds up to, beside one sequence alone."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing, closing
from functools import partial

from sampler.kv_cache import KVCache
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.model_runner import ModelRunner, Piece
from sampler.outputs import SegmentEnded
from sampler.params import Constraint, SamplingParams
from sampler.run import Run
from scripts.benchmarks import passage
from scripts.benchmarks.bench import Bench
from scripts.benchmarks.contender import PREFILL_CHUNK, best_token, prompt_ids
from scripts.benchmarks.figures import Figure, figure, ratio
from scripts.benchmarks.pairing import again, alternate
from scripts.benchmarks.section import Grid, Section

_RUNS = 8
"""Concurrent runs of the engine."""

Rows = dict[str, dict[str, Figure]]


def run(bench: Bench) -> Section:
    """Measure the section."""
    sizes = bench.pick((1, 2, 4, 8, 16), (1, 8))
    steps = bench.pick(16, 6)
    context = bench.pick(512, 128)
    rates: Rows = {}
    ratios: Rows = {}
    for dtype in bench.pick(bench.dtypes, (bench.auto_dtype,)):
        name = f"runner {dtype}"
        batch = _Batch(bench.runner(dtype), max(sizes), context)
        measurements = {_sequences(size): partial(batch.rate, size, steps) for size in sizes}
        noise = _sequences(1)
        samples = alternate(
            {**measurements, again(noise): measurements[noise]},
            bench.repeats(7, 3),
            settle=bench.settle,
            warm_ups=1,
        )
        batch.drop()
        rates[name] = {size: figure(values, "tokens/s") for size, values in samples.items()}
        ratios[name] = {s: ratio(each, rates[name][noise]) for s, each in rates[name].items()}
    engine_rates = asyncio.run(_measure_engine(bench, context))
    return Section(
        "batching",
        f"sequences decoded together, at a context of {context}",
        [
            Grid("all sequences together, tokens/s", rates),
            Grid("ratio to one sequence; its A/A ratio last", ratios),
            Grid(f"through the engine, {bench.auto_dtype}, tokens/s", engine_rates),
            Grid(
                "ratio to one run",
                {
                    what: {name: ratio(each, row[_runs(1)]) for name, each in row.items()}
                    for what, row in engine_rates.items()
                },
            ),
        ],
        {"our_threads": bench.threads, "auto_dtype": bench.auto_dtype, "steps_per_sample": steps},
    )


def _sequences(number: int) -> str:
    return "1 sequence" if number == 1 else f"{number} sequences"


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


class _Batch:
    """Sequences of one runner, each with a context of its own."""

    def __init__(self, runner: ModelRunner, num_sequences: int, context: int) -> None:
        self._runner = runner
        self._context = context  # in tokens
        self._caches = [self._filled(number) for number in range(num_sequences)]

    def _filled(self, number: int) -> KVCache:
        cache = self._runner.new_cache()
        ids = prompt_ids(self._context, self._runner.vocab_size, start=1000 * number)
        for start in range(0, self._context, PREFILL_CHUNK):
            self._runner.forward([Piece(ids[start : start + PREFILL_CHUNK], cache)])
        return cache

    def rate(self, num_sequences: int, num_steps: int) -> float:
        """Return the tokens per second of all sequences together."""
        caches = self._caches[:num_sequences]
        token_ids = [3] * num_sequences
        start = time.perf_counter()
        for _ in range(num_steps):
            pieces = [Piece([i], cache) for i, cache in zip(token_ids, caches, strict=True)]
            token_ids = list(map(best_token, self._runner.forward(pieces)))
        seconds = time.perf_counter() - start
        for cache in caches:
            cache.truncate(self._context)
        return num_sequences * num_steps / seconds

    def drop(self) -> None:
        """Give the memory back."""
        for cache in self._caches:
            cache.drop()


# --- The engine -----------------------------------------------------------------------------------


async def _measure_engine(bench: Bench, context: int) -> Rows:
    """Return what runs sample together, from opening them to their last output."""
    num_tokens = bench.pick(96, 64)
    loaded = bench.loaded_model(bench.auto_dtype, 2 * _RUNS * (context + num_tokens + 64))
    prompts = passage.windows(bench.model_directory, _RUNS, context, overlap=True)
    rows: dict[str, dict[str, list[float]]] = {}
    with closing(_engine(loaded)) as engine:
        rounds = bench.repeats(5, 1)
        for round_number in range(-1, rounds):
            for name, number in ((_runs(1), 1), (_runs(_RUNS), _RUNS), (again(_runs(1)), 1)):
                if round_number < 0 and number > 1:
                    continue  # one run is enough to warm up
                bench.settle()
                together = _Together(engine, num_tokens)
                await together.sample(prompts[:number])
                if round_number >= 0:
                    for what, value in together.rates().items():
                        rows.setdefault(what, {}).setdefault(name, []).append(value)
    return {
        what: {name: figure(values, "tokens/s") for name, values in row.items()}
        for what, row in rows.items()
    }


def _engine(loaded: LoadedModel) -> LocalEngine:
    # What was computed for the round before is not to help.
    return LocalEngine(loaded, prefill_chunk=PREFILL_CHUNK, reuse_prefixes=False)


class _Together:
    """Runs that are opened at once, and when they sampled."""

    def __init__(self, engine: LocalEngine, num_tokens: int) -> None:
        self._engine = engine
        self._params = SamplingParams(temperature=0.0, max_output_tokens=num_tokens)
        self._runs: list[Run] = []
        self._all_decode: tuple[float, int] | None = None
        """When the last one had its first token, and what had been sampled by then."""
        self._first_ended: tuple[float, int] | None = None
        self._seconds = 0.0

    async def sample(self, prompts: Sequence[Sequence[int]]) -> None:
        """Sample runs on ``prompts`` to their ends."""
        start = time.monotonic()
        self._runs = [
            self._engine.open_run(str(n), prompt, self._params, Constraint())
            for n, prompt in enumerate(prompts)
        ]
        async with asyncio.TaskGroup() as group:
            for each in self._runs:
                group.create_task(self._follow(each))
        self._seconds = time.monotonic() - start

    async def _follow(self, run: Run) -> None:
        async with aclosing(self._engine.sample(run)) as outputs:
            async for output in outputs:
                if self._all_decode is None and all(
                    each.segments[0].first_token_at is not None for each in self._runs
                ):
                    self._all_decode = self._now()
                if self._first_ended is None and isinstance(output, SegmentEnded):
                    self._first_ended = self._now()

    def _now(self) -> tuple[float, int]:
        return time.monotonic(), self._engine.counters.tokens_sampled

    def rates(self) -> dict[str, float]:
        """Return tokens per second: while all of them decode, and in all."""
        in_all = sum(run.segments[0].output_tokens for run in self._runs)
        rates = {"prompts and all": in_all / self._seconds}
        if self._all_decode and self._first_ended:
            (start, before), (stop, after) = self._all_decode, self._first_ended
            if stop > start:
                rates["while all decode"] = (after - before) / (stop - start)
        return rates
