"""Ways of running the model that are compared at batch 1: ours, and that of transformers."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sampler.kv_cache import KVCache
from sampler.model_runner import ModelRunner, Piece

PREFILL_CHUNK = 512
"""Tokens of a prompt in one pass of our runner, as the engine does it."""


class Contender(ABC):
    """Holds one context in a cache and measures, in seconds, what goes on top of it.

    After each measurement the context is what it was. What a step's greedy choice takes is part of
    the step.
    """

    name: str

    @abstractmethod
    def hold(self, num_tokens: int) -> None:
        """Have a context of ``num_tokens``."""

    @abstractmethod
    def decode(self, num_steps: int) -> float:
        """Return what ``num_steps`` take, one token after the other."""

    @abstractmethod
    def append(self, num_tokens: int) -> float:
        """Return what it takes to read ``num_tokens`` and to know the next token."""

    @abstractmethod
    def prefill(self, num_tokens: int) -> float:
        """Return the same in a new cache. The context stays where it is."""


def prompt_ids(num_tokens: int, vocab_size: int, start: int = 0) -> list[int]:
    """Return token ids that look like no text; speed does not depend on it."""
    return [(7919 * index + 31) % vocab_size for index in range(start, start + num_tokens)]


class OurRunner(Contender):
    """A runner of this project."""

    def __init__(self, runner: ModelRunner, name: str) -> None:
        self.name = name
        self._runner = runner
        self.cache = runner.new_cache()

    def hold(self, num_tokens: int) -> None:
        held = self.cache.num_tokens
        if num_tokens < held:
            self.cache.truncate(num_tokens)
        elif num_tokens > held:
            ids = prompt_ids(num_tokens - held, self._runner.vocab_size, held)
            self._read(ids, self.cache)

    def decode(self, num_steps: int) -> float:
        with self._same_context():
            token_id = 3
            start = time.perf_counter()
            for _ in range(num_steps):
                [logits] = self._runner.forward([Piece([token_id], self.cache)])
                token_id = best_token(logits)
            return time.perf_counter() - start

    def append(self, num_tokens: int) -> float:
        ids = prompt_ids(num_tokens, self._runner.vocab_size, self.cache.num_tokens)
        with self._same_context():
            start = time.perf_counter()
            self._read(ids, self.cache)
            return time.perf_counter() - start

    def prefill(self, num_tokens: int) -> float:
        ids = prompt_ids(num_tokens, self._runner.vocab_size)
        cache = self._runner.new_cache()
        start = time.perf_counter()
        self._read(ids, cache)
        seconds = time.perf_counter() - start
        cache.drop()
        return seconds

    @contextmanager
    def _same_context(self) -> Iterator[None]:
        held = self.cache.num_tokens
        yield
        self.cache.truncate(held)

    def _read(self, token_ids: Sequence[int], cache: KVCache) -> int:
        """Forward ``token_ids`` in chunks and return the next token."""
        last = len(token_ids) - PREFILL_CHUNK
        logits: object = None
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[start : start + PREFILL_CHUNK]
            [logits] = self._runner.forward([Piece(chunk, cache, wants_logits=start >= last)])
        return best_token(logits)


class TransformersLoop(Contender):
    """The model's own class, with a loop around it and a cache of the library's default kind."""

    def __init__(self, model: PreTrainedModel, num_threads: int, dtype: str) -> None:
        self.name = f"transformers loop {dtype}"
        self.model = model
        self.cache = self.new_cache()
        self._num_threads = num_threads
        self._vocab_size = int(model.config.vocab_size)

    def new_cache(self) -> DynamicCache:
        """Return an empty cache."""
        return DynamicCache(config=self.model.config)

    @property
    def num_held(self) -> int:
        """Tokens of the context."""
        return int(self.cache.get_seq_length())

    def hold(self, num_tokens: int) -> None:
        held = self.num_held
        if num_tokens > held:
            with self.computing():
                self._read(prompt_ids(num_tokens - held, self._vocab_size, held), self.cache)
        elif num_tokens < held:
            self.crop(num_tokens)

    def decode(self, num_steps: int) -> float:
        with self.computing(), self.same_context():
            token_id = 3
            start = time.perf_counter()
            for _ in range(num_steps):
                token_id = self._read([token_id], self.cache)
            return time.perf_counter() - start

    def append(self, num_tokens: int) -> float:
        ids = prompt_ids(num_tokens, self._vocab_size, self.num_held)
        with self.computing(), self.same_context():
            start = time.perf_counter()
            self._read(ids, self.cache)
            return time.perf_counter() - start

    def prefill(self, num_tokens: int) -> float:
        ids = prompt_ids(num_tokens, self._vocab_size)
        with self.computing():
            start = time.perf_counter()
            self._read(ids, self.new_cache())
            return time.perf_counter() - start

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Give torch its threads meanwhile."""
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                yield
        finally:
            torch.set_num_threads(1)

    @contextmanager
    def same_context(self) -> Iterator[None]:
        """Undo what is added to the context meanwhile."""
        held = self.num_held
        yield
        self.crop(held)

    def crop(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of the context."""
        if num_tokens == 0:
            self.cache = self.new_cache()
        elif surplus := self.num_held - num_tokens:
            self.cache.crop(-surplus)

    def _read(self, token_ids: Sequence[int], cache: DynamicCache) -> int:
        input_ids = torch.tensor([token_ids])  # (1, seq)
        outputs = self.model(input_ids=input_ids, cache=cache, use_cache=True, logits_to_keep=1)
        return best_token(outputs.logits[0, -1])


class TransformersGenerate(Contender):
    """The library's ``generate``, on the context of a loop over the same model."""

    def __init__(self, loop: TransformersLoop, dtype: str) -> None:
        self.name = f"transformers generate {dtype}"
        self._loop = loop

    def hold(self, num_tokens: int) -> None:
        self._loop.hold(num_tokens)

    def decode(self, num_steps: int) -> float:
        loop = self._loop
        vocab_size = int(loop.model.config.vocab_size)
        # It wants all ids, and forwards those that the cache lacks: one.
        input_ids = torch.tensor([prompt_ids(loop.num_held + 1, vocab_size)])
        with loop.computing(), loop.same_context():
            start = time.perf_counter()
            output = loop.model.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                cache=loop.cache,
                do_sample=False,
                min_new_tokens=num_steps,
                max_new_tokens=num_steps,
            )
            seconds = time.perf_counter() - start
            assert output.shape[1] == input_ids.shape[1] + num_steps
        return seconds

    def append(self, num_tokens: int) -> float:
        return self._loop.append(num_tokens)

    def prefill(self, num_tokens: int) -> float:
        return self._loop.prefill(num_tokens)


def best_token(logits: object) -> int:
    """Return the greedy choice among ``logits``, ``(vocab,)``."""
    assert isinstance(logits, Tensor), "a model has logits"
    return int(logits.argmax())
