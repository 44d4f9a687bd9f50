"""What exactness costs, and what the faster formats cost in quality.

The exact mode computes in float32. The other formats are judged against that: by their perplexity
on a fixed text, and by how far their greedy choices go along with float32's.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sampler.kv_cache import KVCache
from sampler.model_runner import ModelRunner, Piece
from scripts.benchmarks import passage
from scripts.benchmarks.batching import Rows
from scripts.benchmarks.bench import Bench
from scripts.benchmarks.contender import PREFILL_CHUNK, best_token, prompt_ids
from scripts.benchmarks.figures import figure, ratio
from scripts.benchmarks.pairing import again, alternate
from scripts.benchmarks.section import Grid, Section

_PROMPT_TOKENS = 48
_NUM_WINDOWS = 8
_NUM_PROMPTS = 6


def run(bench: Bench) -> Section:
    """Measure the section."""
    window_tokens, num_greedy = bench.pick((256, 256), (64, 64))
    dtypes = bench.pick(bench.dtypes, tuple(dict.fromkeys(("float32", bench.auto_dtype))))
    context = bench.pick(512, 128)
    rates = _rates(bench, context)
    fast, exact = rates
    return Section(
        "exact",
        "the exact mode, and the quality of the fast ones",
        [
            Grid("tokens/s", rates),
            Grid(
                "ratios",
                {
                    f"{fast} / {exact}": {
                        what: ratio(each, rates[exact][what])
                        for what, each in rates[fast].items()
                        if what in rates[exact]
                    },
                    f"A/A: {fast}": {
                        what: ratio(rates[fast][again(what)], each)
                        for what, each in rates[fast].items()
                        if again(what) in rates[fast]
                    },
                },
            ),
            Grid("quality", _quality(bench, dtypes, window_tokens, num_greedy)),
        ],
        {
            "our_threads": bench.threads,
            "context": context,
            "perplexity_tokens": _NUM_WINDOWS * (window_tokens - 1),
            "perplexity_window": window_tokens,
            "greedy_tokens": num_greedy,
            "greedy_prompts": _NUM_PROMPTS,
        },
        [
            "greedy agreement: the share of the tokens before the first one that differs from "
            "float32's; its spread is over prompts"
        ],
    )


# --- Speed ----------------------------------------------------------------------------------------


def _rates(bench: Bench, context: int) -> Rows:
    steps = bench.pick(16, 6)
    names = {f"fast ({bench.auto_dtype})": False, "exact": True}
    what = {"1 sequence": 1, "8 sequences": 8}
    measurements: dict[tuple[str, str], Callable[[], float]] = {}
    for name, is_exact in names.items():
        dtype = "float32" if is_exact else bench.auto_dtype
        decoder = _Decoder(bench.runner(dtype, is_exact=is_exact), max(what.values()), context)
        for column, number in what.items():
            measurements[name, column] = partial(decoder.decode_rate, number, steps)
        measurements[name, f"prefill of {context}"] = decoder.prefill_rate
    first = next(iter(names))
    measurements[first, again("1 sequence")] = measurements[first, "1 sequence"]
    samples = alternate(measurements, bench.repeats(7, 1), settle=bench.settle, warm_ups=1)
    rows: Rows = {name: {} for name in names}
    for (name, column), values in samples.items():
        rows[name][column] = figure(values, "tokens/s")
    return rows


class _Decoder:
    """Sequences of one runner, at one context."""

    def __init__(self, runner: ModelRunner, num_sequences: int, context: int) -> None:
        self._runner = runner
        self._context = context  # in tokens
        self._ids = prompt_ids(context, runner.vocab_size)
        self._caches = [self._read() for _ in range(num_sequences)]

    def _read(self) -> KVCache:
        cache = self._runner.new_cache()
        for start in range(0, self._context, PREFILL_CHUNK):
            self._runner.forward([Piece(self._ids[start : start + PREFILL_CHUNK], cache)])
        return cache

    def decode_rate(self, num_sequences: int, num_steps: int) -> float:
        caches = self._caches[:num_sequences]
        start = time.perf_counter()
        greedy(self._runner, caches, [3] * num_sequences, num_steps)
        seconds = time.perf_counter() - start
        for cache in caches:
            cache.truncate(self._context)
        return num_sequences * num_steps / seconds

    def prefill_rate(self) -> float:
        start = time.perf_counter()
        cache = self._read()
        seconds = time.perf_counter() - start
        cache.drop()
        return self._context / seconds


# --- Quality --------------------------------------------------------------------------------------


def _quality(bench: Bench, dtypes: Sequence[str], window_tokens: int, num_greedy: int) -> Rows:
    windows = passage.windows(bench.model_directory, _NUM_WINDOWS, window_tokens)
    prompts = passage.windows(bench.model_directory, _NUM_PROMPTS, _PROMPT_TOKENS)
    reference = continuations(bench.runner("float32"), prompts, num_greedy)
    rows: Rows = {}
    exact_perplexity = perplexity(bench.runner("float32"), windows)
    for dtype in dtypes:
        runner = bench.runner(dtype)
        found = exact_perplexity if dtype == "float32" else perplexity(runner, windows)
        same = reference if dtype == "float32" else continuations(runner, prompts, num_greedy)
        shares = [agreement(ours, theirs) for ours, theirs in zip(same, reference, strict=True)]
        rows[dtype] = {
            "perplexity": figure([found], "perplexity"),
            "change, %": figure([100 * (found / exact_perplexity - 1)], "%"),
            "greedy agreement": figure(shares, "share"),
        }
    return rows


@torch.inference_mode()
def perplexity(runner: ModelRunner, windows: Sequence[Sequence[int]]) -> float:
    """Return the perplexity over all tokens of ``windows`` but the first of each.

    They are read token by token, all windows in one pass: the way of decoding, not of prefill.
    """
    caches = [runner.new_cache() for _ in windows]
    loss = 0.0
    for position in range(len(windows[0]) - 1):
        pieces = [Piece([w[position]], cache) for w, cache in zip(windows, caches, strict=True)]
        for window, logits in zip(windows, runner.forward(pieces), strict=True):
            assert isinstance(logits, Tensor), "a model has logits"
            loss -= float(torch.log_softmax(logits.double(), -1)[window[position + 1]])
    for cache in caches:
        cache.drop()
    return math.exp(loss / (len(windows) * (len(windows[0]) - 1)))


def continuations(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Return the greedy continuation of each of ``prompts``."""
    caches = [runner.new_cache() for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        runner.forward([Piece(prompt[:-1], cache, wants_logits=False)])
    found = greedy(runner, caches, [prompt[-1] for prompt in prompts], num_tokens)
    for cache in caches:
        cache.drop()
    return found


def greedy(
    runner: ModelRunner, caches: Sequence[KVCache], token_ids: Sequence[int], num_steps: int
) -> list[list[int]]:
    """Decode on top of each of ``caches``, all in one pass, and return the tokens of each."""
    found: list[list[int]] = [[] for _ in caches]
    for _ in range(num_steps):
        pieces = [Piece([i], cache) for i, cache in zip(token_ids, caches, strict=True)]
        token_ids = list(map(best_token, runner.forward(pieces)))
        for tokens, token_id in zip(found, token_ids, strict=True):
            tokens.append(token_id)
    return found


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Return the share of the tokens that come before the first one that differs."""
    assert len(ours) == len(theirs)
    differing = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return next(differing, len(ours)) / len(ours)
