"""A model small enough to be built in a test: random weights, a token per byte, and a script.

The forward pass, the cache and the tokenizer are real. Where a script is given, the logits of the
next scripted token are raised above all others, so that the model says what the test wants.
"""

from collections.abc import Iterable, Sequence

import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.tools import FunctionTool
from sampler.chat_template import ChatMLFormat
from sampler.kv_cache import GenericCache
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.model_runner import GenericRunner
from sampler.tokenizer import Tokenizer

END_OF_TEXT, IM_START, IM_END = 0, 1, 2

WEATHER = FunctionTool(
    "get_weather",
    "Current weather in a city",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


def byte_tokenizer() -> FastTokenizer:
    """Return a tokenizer with three control tokens and one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    fast = FastTokenizer(BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return fast


def word_tokenizer(words: Iterable[str]) -> FastTokenizer:
    """Return the byte tokenizer with merges that make each of ``words`` one token.

    The merges are needed: where a grammar leaves no choice, llguidance admits only the token that
    the tokenizer itself would use.
    """
    fast = byte_tokenizer()
    vocab = fast.get_vocab()
    merges: list[tuple[str, str]] = []
    for word in words:
        head, *letters = list(_in_byte_alphabet(word))
        for letter in letters:
            if head + letter not in vocab:
                merges.append((head, letter))
                vocab[head + letter] = len(vocab)
            head += letter
    fast.model = BPE(vocab=vocab, merges=merges)
    return fast


def _in_byte_alphabet(text: str) -> str:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))


class ScriptedRunner(GenericRunner):
    """A runner that says the turns of a script, each ended by ``<|im_end|>``.

    Like a model it knows nothing but what it has read: the script's first turn is its answer where
    the context holds no assistant's turn yet, the second where it holds one, and so on. So it goes
    on in the same way in a run that was suspended and in one that starts from a history.
    """

    def __init__(
        self, model: LlamaForCausalLM, script: Sequence[Sequence[int]], header: Sequence[int]
    ) -> None:
        """Say ``script``.

        Args:
            model: gives the shapes, and what is said beyond the script.
            script: the token ids of each turn.
            header: what an assistant's turn begins with.
        """
        super().__init__(model)
        self._script = [[*turn, IM_END] for turn in script]
        self._header = list(header)
        self.inputs: list[list[int]] = []
        """The token ids of every forward pass, in order."""
        self.context: tuple[int, ...] = ()
        """What the latest forward pass knew: all token ids of its run so far."""

    def extend(self, token_ids: Sequence[int], cache: GenericCache) -> Tensor:
        self.inputs.append(list(token_ids))
        # An attribute of the cache, so that a fork has it too; a tuple, so that it is its own.
        read = (*getattr(cache, "read", ())[: cache.num_tokens], *token_ids)
        cache.read = read  # type: ignore[attr-defined]
        self.context = read
        logits = super().extend(token_ids, cache).clone()
        if (token_id := self._next(list(read))) is not None:
            logits[token_id] = 1e4
        return logits

    def _next(self, read: list[int]) -> int | None:
        length = len(self._header)
        starts = [i + length for i in range(len(read)) if read[i : i + length] == self._header]
        if not 0 < len(starts) <= len(self._script):
            return None
        turn, said = self._script[len(starts) - 1], read[starts[-1] :]
        return turn[len(said)] if len(said) < len(turn) else None


def tiny_model(
    script: Sequence[str | Sequence[int]] | None = None, *, max_context: int = 4096
) -> LoadedModel:
    """Return a two-layer Llama over bytes.

    Args:
        script: the turns it is to say, as text or token ids; None leaves it to its random weights.
        max_context: the most positions.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        pad_token_id=IM_END,
    )
    model = LlamaForCausalLM(config)
    tokenizer = Tokenizer(byte_tokenizer(), [END_OF_TEXT, IM_END])
    runner: GenericRunner
    if script is None:
        runner = GenericRunner(model)
    else:
        turns = [tokenizer.encode_text(t) if isinstance(t, str) else list(t) for t in script]
        header = [IM_START, *tokenizer.encode_text("assistant\n")]
        runner = ScriptedRunner(model, turns, header)
    tokenizer.counters = runner.counters
    return LoadedModel("tiny", runner, tokenizer, ChatMLFormat(tokenizer))


def tiny_engine(
    script: Sequence[str | Sequence[int]] | None = None, *, max_context: int = 4096
) -> LocalEngine:
    """Return an engine on a tiny model. Close it."""
    return LocalEngine(tiny_model(script, max_context=max_context), prefill_chunk=max_context)


def call_text(name: str, arguments: str) -> str:
    """Return the text in which a model makes one call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
