"""What dialogues are held with: a model in float32, once in the server and once in the reference.

The tiny model has random weights. It speaks in bytes, pieces of words and pieces of calls, so what
it says is seldom what encoding its text would give, and every other turn of it has a call.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sampler.chat_template import ChatMLFormat
from sampler.embedded_model import ensure_embedded_model
from sampler.kv_cache import KVCache
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel, load_model
from sampler.model_runner import GenericRunner, ModelRunner, Piece
from sampler.run import Run
from sampler.runner_choice import RunnerOptions
from sampler.sampling import Logits
from sampler.tokenizer import Tokenizer
from tests.equivalence.dialogues import Dialogue
from tests.equivalence.reference import Reference, UninterruptedLoop
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, word_tokenizer

_CALL = "<tool_call>"
_WORDS = (
    *(_CALL, '\n{"name": "', "weather", "roll", '", "arguments": {"', 'city": "', 'dice": '),
    *("Oslo", "Kyoto", '"}}\n', "}}\n", "</tool_call>", " warm", " rain"),
)


class RecordingEngine(LocalEngine):
    """An engine that remembers its runs.

    The same dialogue is held again and again with one model. So that each is computed, and counted,
    nothing is taken from what another one has left in the pool.
    """

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model, reuse_prefixes=False)
        self.all_runs: list[Run] = []
        """Those that were opened, over or not."""

    def open_run(self, *args: Any, **kwargs: Any) -> Run:
        run = super().open_run(*args, **kwargs)
        self.all_runs.append(run)
        return run


class Recorder:
    """What a server's model gave, forward pass by forward pass."""

    def __init__(self, runner: ModelRunner) -> None:
        """Begin to record ``runner``."""
        self.logits: dict[tuple[int, ...], Tensor] = {}
        """By all that had been read, in whatever pieces."""
        self._forward, self._find_prefix = runner.forward, runner.find_prefix
        runner.forward = self._recorded  # type: ignore[method-assign]
        runner.find_prefix = self._found  # type: ignore[method-assign]

    def _recorded(self, pieces: Sequence[Piece]) -> Sequence[Logits | None]:
        # An attribute of the cache, so that a fork has it too; a tuple, so that it is its own.
        read = [
            (*getattr(piece.cache, "read", ())[: piece.cache.num_tokens], *piece.token_ids)
            for piece in pieces
        ]
        logits = self._forward(pieces)
        for piece, ids, found in zip(pieces, read, logits, strict=True):
            piece.cache.read = ids  # type: ignore[attr-defined]
            if isinstance(found, Tensor):
                self.logits[ids] = found
        return logits

    def _found(self, salt: Hashable, token_ids: Sequence[int]) -> KVCache | None:
        cache = self._find_prefix(salt, token_ids)
        if cache is not None:
            cache.read = tuple(token_ids[: cache.num_tokens])  # type: ignore[attr-defined]
        return cache


class Subject:
    """A model, and what dialogues with it come to if nothing ever interrupts them."""

    def __init__(self, loaded: LoadedModel, model: PreTrainedModel) -> None:
        """Hold dialogues with ``loaded``; ``model`` is the same once more."""
        assert loaded.runner.dtype == model.dtype == torch.float32
        self.recorder = Recorder(loaded.runner)
        self._loaded = loaded
        self._loop = UninterruptedLoop(loaded, model)
        self._references: dict[str, Reference] = {}

    def engine(self) -> RecordingEngine:
        """Return an engine for one server, which closes it."""
        return RecordingEngine(self._loaded)

    def reference(self, dialogue: Dialogue) -> Reference:
        """Return what ``dialogue`` comes to; it is held only once."""
        if dialogue.name not in self._references:
            self._references[dialogue.name] = self._loop.hold(dialogue)
        return self._references[dialogue.name]


def embedded_model() -> Subject:
    """Return the default model."""
    model = AutoModelForCausalLM.from_pretrained(ensure_embedded_model(), dtype=torch.float32)
    return Subject(load_model(device="cpu", options=RunnerOptions(is_exact=True)), model)


def tiny_model() -> Subject:
    """Return a two-layer Llama over bytes and ``_WORDS``."""
    tokenizer = Tokenizer(word_tokenizer(_WORDS), [END_OF_TEXT, IM_END])
    runner = GenericRunner(_llama(tokenizer))
    tokenizer.counters = runner.counters
    loaded = LoadedModel("tiny", runner, tokenizer, ChatMLFormat(tokenizer))
    return Subject(loaded, _llama(tokenizer))


def _llama(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Return a model that likes to call and to end its turn; every time the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        pad_token_id=IM_END,
        # As usual (0.02) it would heed its context so little that a wrong one went unnoticed.
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config)
    head = torch.nn.Linear(config.hidden_size, config.vocab_size)
    head.weight = model.lm_head.weight
    with torch.no_grad():
        head.bias.zero_()
        head.bias[tokenizer.encode_text(_CALL)] = 5.0
        head.bias[IM_END] = 4.0
        head.bias[tokenizer.encode_text("\n")] = 3.0
    model.lm_head = head
    return model
