"""Tiny models for the server: scripted in few tokens, held at a step, or failing at one."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sampler.chat_template import ChatMLFormat
from sampler.engine import Engine
from sampler.kv_cache import KVCache
from sampler.model_loading import LoadedModel
from sampler.model_runner import ModelRunner
from sampler.tokenizer import Tokenizer
from tests.tiny_model import END_OF_TEXT, IM_END, ScriptedRunner, byte_tokenizer, call_text

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
)
"""A model step takes milliseconds however small the model, so what it often says is a token each;
the rest is a token per byte."""

OSLO = call_text("get_weather", '{"city": "Oslo"}')
BERGEN = call_text("get_weather", '{"city": "Bergen"}')
BOTH = f"{OSLO}\n{BERGEN}"


def scripted_engine(*turns: str, max_context: int = 4096) -> Engine:
    """Return an engine whose model says ``turns``, one after the other. Close it."""
    tokenizer = Tokenizer(_tokenizer_with_words(), [END_OF_TEXT, IM_END])
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
    runner = ScriptedRunner(LlamaForCausalLM(config), list(map(tokenizer.encode_text, turns)))
    tokenizer.counters = runner.counters
    model = LoadedModel("tiny", runner, tokenizer, ChatMLFormat(tokenizer))
    return Engine(model, prefill_chunk=max_context)


def _tokenizer_with_words() -> FastTokenizer:
    """Return the byte tokenizer with merges that make each of ``WORDS`` one token.

    The merges are needed: where a grammar leaves no choice, llguidance admits only the token that
    the tokenizer itself would use.
    """
    plain = byte_tokenizer()
    vocab = plain.get_vocab()
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        head, *letters = list(_in_byte_alphabet(word))
        for letter in letters:
            if head + letter not in vocab:
                merges.append((head, letter))
                vocab[head + letter] = len(vocab)
            head += letter
    plain.model = BPE(vocab=vocab, merges=merges)
    return plain


def _in_byte_alphabet(text: str) -> str:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))


class Held:
    """A model that waits."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        """Set once a step waits."""
        self._released = threading.Event()

    def release(self) -> None:
        """Let this step and all later ones go on."""
        self._released.set()

    def wait(self) -> None:
        """Model thread: wait for the release."""
        assert self._released.wait(20), "nobody released the model"


@contextmanager
def held_at(step: int, engine: Engine) -> Iterator[Held]:
    """Hold the model before its ``step``-th step from now, counted from 1, and any after it."""
    held = Held()
    loop = asyncio.get_running_loop()

    def hold(number: int) -> None:
        if number >= step:
            loop.call_soon_threadsafe(held.reached.set)
            held.wait()

    with _before_each_step(engine, hold):
        try:
            yield held
        finally:
            held.release()


@contextmanager
def failing_at(step: int, engine: Engine) -> Iterator[None]:
    """Have the ``step``-th step from now fail."""

    def fail(number: int) -> None:
        if number == step:
            raise RuntimeError("out of memory")

    with _before_each_step(engine, fail):
        yield


@contextmanager
def _before_each_step(engine: Engine, act: Callable[[int], None]) -> Iterator[None]:
    runner: ModelRunner = engine.model.runner
    extend = runner.extend
    steps = count(1)

    def watched(token_ids: Sequence[int], cache: KVCache) -> Tensor:
        act(next(steps))
        return extend(token_ids, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "extend", watched)
        yield


def inputs_of(engine: Engine) -> list[int]:
    """Return every token id that a scripted model was given, in order."""
    assert isinstance(engine.model.runner, ScriptedRunner)
    return [token_id for chunk in engine.model.runner.inputs for token_id in chunk]
