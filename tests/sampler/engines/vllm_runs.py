"""Runs over the fake of vLLM, and what they have to say.

The model is a hash of the whole context, so whatever is wrong with a history shows in what is said
next. Where turns end, and where they call, is up to the hash too.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from sampler.conversation import Conversation
from sampler.engine import Resumption
from sampler.engines.vllm.backend import vllm_engine
from sampler.engines.vllm.library import Library
from sampler.engines.vllm.processor import SegmentProcessor, failure_id_of
from sampler.grammar import GrammarCompiler
from sampler.language import LoadedLanguage
from sampler.outputs import Output
from sampler.params import Constraint, SamplingParams
from sampler.prompt import TokenPrompt
from sampler.run import Run, Segment
from sampler.sampling import sample
from sampler.snapshot import Sources
from sampler.suspension import Suspension
from sampler.token_engine import TokenEngine
from sampler.tokenizer import Tokenizer
from tests.sampler.engines.fake_async_llm import FakeAsyncLLM
from tests.sampler.engines.fake_engine_core import Model, hash_model
from tests.sampler.engines.vllm_types import RequestOutputKind, StreamingInput
from tests.sampler.engines.vllm_types import SamplingParams as VllmParams
from tests.sampler.runs import CALL_OSLO, CALL_ROME, VOCAB_SIZE, steered_model
from tests.tiny_model import IM_END, WEATHER

DEADLINE_SECONDS = 20.0
FREE = Constraint((WEATHER,))
FORCED = Constraint((WEATHER,), min_calls=1, max_calls=1)
GREEDY = SamplingParams(temperature=0)


def language() -> LoadedLanguage:
    """Return that of bytes and whole calls, with counters of its own."""
    model = steered_model()
    return LoadedLanguage("tiny", model.tokenizer, model.chat_format, 4096)


@cache
def tokenizer() -> Tokenizer:
    """Return one to spell with."""
    return language().tokenizer


def talkative_model(eagerness: float = 1.8) -> Model:
    """Return a model that calls often, ends its turns soon, and always after a call.

    Args:
        eagerness: how much more likely a call is than other tokens, in logits.
    """
    noise = hash_model(VOCAB_SIZE)

    def logits(token_ids: Sequence[int]) -> Tensor:
        drawn = noise(token_ids)
        drawn[[CALL_OSLO, CALL_ROME]] += eagerness
        drawn[IM_END] += 1.5 if token_ids[-1] not in (CALL_OSLO, CALL_ROME) else 100.0
        return drawn

    return logits


@dataclass(frozen=True)
class Vllm:
    """An engine over a fake."""

    engine: TokenEngine
    llm: FakeAsyncLLM
    model: Model

    def prefilled(self) -> list[list[int]]:
        """Return how many tokens of each chunk were forwarded, request by request."""
        return list(self.llm.core.prefilled.values())

    def open(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        constraint: Constraint = FREE,
        sources: Sources = Sources(),  # noqa: B008 - frozen
    ) -> Run:
        """Return a queued run."""
        return self.engine.open_run(f"run-{prompt[0]}", prompt, params, constraint, sources)

    def check(self, run: Run, *constraints: Constraint, num_told: int = 0) -> None:
        """Make sure that each segment of ``run``, which had the next of ``constraints``, said what
        is said alone from the same history; but for the first ones, which were told what to say."""
        bounds = constraints or (run.constraint,) * len(run.segments)
        segments = list(zip(run.segments, bounds, strict=True))[num_told:]
        assert segments
        for segment, constraint in segments:
            said = sampled_in(segment, run)
            assert said == solo(self.model, run, segment.input_tokens, len(said), constraint)


def sampled_in(segment: Segment, run: Run) -> list[int]:
    """Return the tokens of a segment."""
    return run.tokens.since(segment.input_tokens)[: segment.output_tokens]


def solo(model: Model, run: Run, start: int, num_tokens: int, constraint: Constraint) -> list[int]:
    """Return what the segment of ``run`` from ``start`` on says, by our own sampler alone."""
    matcher = GrammarCompiler(tokenizer()).matcher(constraint)
    context, counts = list(run.tokens.ids[:start]), Counter[int]()
    never = failure_id_of(tokenizer())
    for _ in range(num_tokens):
        mask = np.ones(VOCAB_SIZE, dtype=bool) if matcher is None else matcher.mask()
        logits = model(context)
        token_id = sample(logits, run.params, len(context), mask, counts).token_id
        if token_id == never and (matcher is not None or run.params.temperature):
            mask[never] = False
            token_id = sample(logits, run.params, len(context), mask, counts).token_id
        if matcher is not None:
            matcher.accept(token_id)
        counts[token_id] += 1
        context.append(token_id)
    return context[start:]


@asynccontextmanager
async def running(
    model: Model | None = None,
    *,
    processor: Callable[[], Any] | None = None,
    suspended_fraction: float = 0.5,
    suspend_ttl_seconds: float = 600.0,
    **settings: Any,
) -> AsyncIterator[Vllm]:
    """Run an engine over a fake of these ``settings``."""
    model = model or talkative_model()
    made: list[FakeAsyncLLM] = []

    def make_llm(arguments: Mapping[str, object]) -> FakeAsyncLLM:
        processors = [processor() if processor else SegmentProcessor(tokenizer(), 64)]
        llm = FakeAsyncLLM(
            vocab_size=VOCAB_SIZE,
            model=model,
            logits_processors=processors,
            **{"max_model_len": 512, **settings},
        )
        made.append(llm)
        return llm

    engine = vllm_engine(
        "tiny",
        language(),
        suspended_fraction=suspended_fraction,
        suspend_ttl_seconds=suspend_ttl_seconds,
        library=library(make_llm),
    )
    try:
        await engine.start()
        yield Vllm(engine, made[0], model)
        assert engine.kv_tokens == 0, "every request has ended with its run"
    finally:
        await engine.stop()
        engine.close()
        for llm in made:
            await llm.wait_closed()
            assert llm.num_unfinished == 0


def library(make_llm: Callable[[Mapping[str, object]], Any]) -> Library:
    """Return a vLLM whose engine is what ``make_llm`` makes."""
    return Library(make_llm, VllmParams, StreamingInput, RequestOutputKind.DELTA)


async def play(
    vllm: Vllm,
    run: Run,
    suffixes: Sequence[Sequence[int]] = (),
    while_suspended: Callable[[Suspension], Any] | None = None,
    constraints: Sequence[Constraint] = (),
) -> list[Output]:
    """Sample ``run`` to its end, each call answered by the next of ``suffixes``, and return all."""
    left, bounds = list(suffixes), list(constraints)

    async def call_tools(suspension: Suspension) -> Resumption | None:
        if not left or len(run.tokens) + len(left[0]) >= vllm.engine.max_context:
            return None
        if while_suspended is not None:
            await while_suspended(suspension)
        return resumption(run, left.pop(0), bounds.pop(0) if bounds else run.constraint)

    async with asyncio.timeout(DEADLINE_SECONDS):
        async with aclosing(vllm.engine.sample(run, call_tools)) as outputs:
            return [output async for output in outputs]


def resumption(run: Run, suffix: Sequence[int], constraint: Constraint) -> Resumption:
    """Return what has ``run`` go on with ``suffix``."""
    prompt = TokenPrompt(Conversation(()), (*run.tokens.ids, *suffix))
    return Resumption(prompt, time.monotonic(), constraint)
