"""Tiny models for the server: scripted in few tokens, held at a step, or failing at one."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sampler.chat_template import ChatMLFormat
from sampler.executor import Executor
from sampler.job import Job
from sampler.kv_cache import GenericCache
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.model_runner import GenericRunner
from sampler.tokenizer import Tokenizer
from tests.tiny_model import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    ScriptedRunner,
    byte_tokenizer,
    call_text,
    word_tokenizer,
)

WORDS = (
    '<tool_call>\n{"name": "get_weather", "arguments": ',
    '{"city": "',
    "Oslo",
    "Bergen",
    '"}',
    "}\n</tool_call>",
    "Rain.",
    "Sun.",
    "Let me look.",
    "<think>\nHm.\n</think>\n\n",
)
"""A model step takes milliseconds however small the model, so what it often says is a token each;
the rest is a token per byte."""

OSLO = call_text("get_weather", '{"city": "Oslo"}')
BERGEN = call_text("get_weather", '{"city": "Bergen"}')
BOTH = f"{OSLO}\n{BERGEN}"
THOUGHT = "<think>\nHm.\n</think>\n\n"


def scripted_engine(
    *turns: str | Sequence[int], max_context: int = 4096, thinks: bool = False
) -> LocalEngine:
    """Return an engine whose model says ``turns``, one after the other. Close it.

    Args:
        turns: as text or token ids.
        max_context: the most positions.
        thinks: whether the model may think before it speaks.
    """
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
    )
    header = [IM_START, *tokenizer.encode_text("assistant\n")]
    script = [tokenizer.encode_text(t) if isinstance(t, str) else list(t) for t in turns]
    runner = ScriptedRunner(LlamaForCausalLM(config), script, header)
    tokenizer.counters = runner.counters
    model = LoadedModel("tiny", runner, tokenizer, ChatMLFormat(tokenizer, thinks=thinks))
    return LocalEngine(model, prefill_chunk=max_context)


@cache
def encoded(text: str) -> tuple[int, ...]:
    """Return the ids that the tokenizer chooses for ``text``."""
    return tuple(_tokenizer().encode_text(text))


def spelled_out(text: str) -> list[int]:
    """Return ids that no tokenizer would choose for ``text`` where a word in it is one token: one
    per byte. Who encodes what a model said that way gets other ids."""
    return byte_tokenizer().encode(text, add_special_tokens=False).ids


def _tokenizer() -> Tokenizer:
    return Tokenizer(word_tokenizer(WORDS), [END_OF_TEXT, IM_END])


class Held:
    """A model that waits."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        """Set once a step waits."""
        self.asked_to_stop = asyncio.Event()
        """Set once somebody wants no more steps for a run or a warm-up."""
        self._released = threading.Event()

    def release(self) -> None:
        """Let this step and all later ones go on."""
        self._released.set()

    async def release_once_stopped(self) -> None:
        """Do so when the news that a client is gone has come through: the model may be faster."""
        async with asyncio.timeout(20):
            await self.asked_to_stop.wait()
        self.release()

    def wait(self) -> None:
        """Model thread: wait for the release."""
        assert self._released.wait(20), "nobody released the model"


@contextmanager
def held_at(step: int, engine: LocalEngine) -> Iterator[Held]:
    """Hold the model before its ``step``-th step from now, counted from 1, and any after it."""
    held = Held()
    loop = asyncio.get_running_loop()

    def hold(number: int) -> None:
        if number >= step:
            loop.call_soon_threadsafe(held.reached.set)
            held.wait()

    stop = Executor.stop

    async def watched(executor: Executor, job: Job, num_tokens: int | None = None) -> None:
        held.asked_to_stop.set()
        await stop(executor, job, num_tokens)

    with _before_each_step(engine, hold), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "stop", watched)
        try:
            yield held
        finally:
            held.release()


@contextmanager
def failing_at(step: int, engine: LocalEngine) -> Iterator[None]:
    """Have the ``step``-th step from now fail."""

    def fail(number: int) -> None:
        if number == step:
            raise RuntimeError("out of memory")

    with _before_each_step(engine, fail):
        yield


@contextmanager
def _before_each_step(engine: LocalEngine, act: Callable[[int], None]) -> Iterator[None]:
    runner = engine.model.runner
    assert isinstance(runner, GenericRunner)
    extend = runner.extend
    steps = count(1)

    def watched(token_ids: Sequence[int], cache: GenericCache) -> Tensor:
        act(next(steps))
        return extend(token_ids, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "extend", watched)
        yield


def inputs_of(engine: LocalEngine) -> list[int]:
    """Return every token id that a scripted model was given, in order."""
    assert isinstance(engine.model.runner, ScriptedRunner)
    return [token_id for chunk in engine.model.runner.inputs for token_id in chunk]


def steps_of(engine: LocalEngine) -> list[int]:
    """Return how many token ids a scripted model was given in each step."""
    assert isinstance(engine.model.runner, ScriptedRunner)
    return list(map(len, engine.model.runner.inputs))


def context_of(engine: LocalEngine) -> tuple[int, ...]:
    """Return every token id that a scripted model knew of when it said its latest token."""
    assert isinstance(engine.model.runner, ScriptedRunner)
    return engine.model.runner.context


def context_text(engine: LocalEngine) -> str:
    """Return the same as text."""
    return text_of(context_of(engine))


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text that a scripted model reads in ``token_ids``; control tokens are left out."""
    return b"".join(map(_tokenizer().token_bytes, token_ids)).decode()
