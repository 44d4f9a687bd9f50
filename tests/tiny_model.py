"""A model small enough to be built in a test: random weights, a token per byte, and a script.

The forward pass, the cache and the tokenizer are real. Where a script is given, the logits of the
next scripted token are raised above all others, so that the model says what the test wants.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.tools import FunctionTool
from sampler.chat_template import ChatMLFormat
from sampler.engine import Engine
from sampler.kv_cache import KVCache
from sampler.model_loading import LoadedModel
from sampler.model_runner import ModelRunner
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


class ScriptedRunner(ModelRunner):
    """A runner that says the turns of a script, each ended by ``<|im_end|>``.

    Every run goes through the script from its beginning. A turn begins with the forward pass that
    follows the end of the turn before, so prompts and suffixes must fit one prefill chunk.
    """

    def __init__(self, model: LlamaForCausalLM, script: Sequence[Sequence[int]]) -> None:
        super().__init__(model)
        self._script = [[*turn, IM_END] for turn in script]
        self._said: WeakKeyDictionary[KVCache, list[int]] = WeakKeyDictionary()
        self.inputs: list[list[int]] = []
        """The token ids of every forward pass, in order."""

    def extend(self, token_ids: Sequence[int], cache: KVCache) -> Tensor:
        self.inputs.append(list(token_ids))
        logits = super().extend(token_ids, cache).clone()
        turns = [token for turn in self._script for token in turn]
        said = self._said.setdefault(cache, [])
        if len(said) < len(turns):
            token = turns[len(said)]
            said.append(token)
            logits[token] = 1e4
        return logits


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
    if script is None:
        runner = ModelRunner(model)
    else:
        turns = [tokenizer.encode_text(t) if isinstance(t, str) else list(t) for t in script]
        runner = ScriptedRunner(model, turns)
    tokenizer.counters = runner.counters
    return LoadedModel("tiny", runner, tokenizer, ChatMLFormat(tokenizer))


def tiny_engine(
    script: Sequence[str | Sequence[int]] | None = None, *, max_context: int = 4096
) -> Engine:
    """Return an engine on a tiny model. Close it."""
    return Engine(tiny_model(script, max_context=max_context), prefill_chunk=max_context)


def call_text(name: str, arguments: str) -> str:
    """Return the text in which a model makes one call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
