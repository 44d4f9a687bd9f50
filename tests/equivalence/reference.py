"""The plain way: one uninterrupted loop over the model, without a run, a suspension or a thread.

It has a copy of the model of its own, and shares with the engine only what says which token follows
from given logits: the sampler and the grammar. Where the engine would suspend, the ids that the
tools' outputs add are force-fed, and decoding goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from protocol.items import FunctionCall
from sampler.detokenizer import Detokenizer
from sampler.embedded_model import ensure_embedded_model
from sampler.grammar import GrammarCompiler
from sampler.model_loading import LoadedModel
from sampler.params import SamplingParams, ToolConstraint
from sampler.sampled_turn import SampledTurn
from sampler.sampling import sample

PREFILL_CHUNK = 512
"""As in the engine: equal shapes give equal bits."""


@dataclass(frozen=True)
class Turn:
    """What one segment samples under, and what its calls return, in call order."""

    constraint: ToolConstraint
    outputs: Sequence[str] = ()


class UninterruptedLoop:
    """Samples whole conversations, one after the other."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer = loaded.tokenizer
        self._chat_format = loaded.chat_format
        self._grammars = GrammarCompiler(loaded.tokenizer)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            ensure_embedded_model(), dtype=torch.float32
        )

    @torch.inference_mode()
    def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, turns: Sequence[Turn]
    ) -> list[int]:
        """Return all token ids, the prompt's included."""
        cache = DynamicCache(config=self._model.config)
        tokens = list(prompt_ids)
        for turn in turns:
            calls = self._sample_turn(tokens, cache, params, turn.constraint)
            if turn.outputs:
                tokens += self._chat_format.suffix_ids(calls, turn.outputs)
        return tokens

    def _sample_turn(
        self,
        tokens: list[int],
        cache: DynamicCache,
        params: SamplingParams,
        constraint: ToolConstraint,
    ) -> list[FunctionCall]:
        matcher = self._grammars.matcher(constraint)
        turn = SampledTurn(Detokenizer(self._tokenizer), matcher, may_call=constraint.allows_calls)
        limit = params.max_output_tokens
        start = len(tokens)
        while True:
            logits = self._forward_missing(tokens, cache)
            mask = matcher.mask() if matcher else None
            token_id = sample(logits, params, len(tokens), mask)
            if matcher:
                matcher.accept(token_id)
            tokens.append(token_id)
            list(turn.feed(token_id))
            if token_id in self._tokenizer.stop_ids or len(tokens) - start == limit:
                return turn.calls

    def _forward_missing(self, tokens: Sequence[int], cache: DynamicCache) -> Tensor:
        start = cache.get_seq_length()
        logits = torch.empty(0)
        for at in range(start, len(tokens), PREFILL_CHUNK):
            chunk = torch.tensor([tokens[at : at + PREFILL_CHUNK]])  # (1, seq)
            outputs = self._model(input_ids=chunk, cache=cache, use_cache=True, logits_to_keep=1)
            logits = outputs.logits[0, -1]  # (vocab,)
        return logits
