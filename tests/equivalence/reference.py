"""The plain way: one uninterrupted loop over the model, without a run, a suspension or a thread.

It has a copy of the model of its own, and shares with the server only what says which token follows
from given logits (the sampler and the grammar) and which ids new text makes (the chat format).
Where the engine would suspend, or one response would end and another begin, the ids that the
outputs or the user add are force-fed, and decoding goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from protocol.items import CallOutput, Message
from protocol.tools import callable_tools, parse_tools
from sampler.conversation import Conversation
from sampler.detokenizer import Detokenizer
from sampler.grammar import GrammarCompiler
from sampler.model_loading import LoadedModel
from sampler.params import Constraint, SamplingParams
from sampler.recorded_turn import Call
from sampler.sampled_turn import SampledTurn
from sampler.sampling import Sampled, sample
from tests.equivalence.dialogues import INSTRUCTIONS, TOOLS, Dialogue, text_of

PREFILL_CHUNK = 512
"""As in the engine: equal shapes give equal bits."""


@dataclass(frozen=True)
class Round:
    """What was sampled at a stretch."""

    start: int
    stop: int
    """Token ids ``[start, stop)``; the end-of-turn token is among them if it was sampled."""
    calls: Sequence[Call]
    is_cut_short: bool
    """Whether the budget ended it."""
    is_canonical: bool
    """Whether encoding its text gives the same ids."""


@dataclass(frozen=True)
class Reference:
    """What a dialogue comes to."""

    token_ids: tuple[int, ...]
    """All of them, from the prompt to the last that was sampled."""
    rounds: Sequence[Round]
    logits: Mapping[int, Tensor]
    """What each sampled token was drawn from, ``(vocab,)``, by its position."""


class UninterruptedLoop:
    """Samples whole dialogues, one after the other."""

    def __init__(self, loaded: LoadedModel, model: PreTrainedModel) -> None:
        """Use the tokenizer and the chat format of ``loaded``.

        Args:
            loaded: what the server has.
            model: its model once more.
        """
        self._loaded = loaded
        self._model = model
        self._grammars = GrammarCompiler(loaded.tokenizer)

    @torch.inference_mode()
    def hold(self, dialogue: Dialogue) -> Reference:
        """Return what ``dialogue`` comes to."""
        log = _Log(self._loaded, self._model, self._grammars, dialogue)
        num_calls = 0
        for message in dialogue.messages:
            log.add_message(message)
            round_number = 0
            while calls := log.sample_turn(is_forced=dialogue.is_forced(round_number)):
                outputs = [text_of(dialogue.output(num_calls + i)) for i in range(len(calls))]
                log.add_outputs(calls, outputs)
                num_calls += len(calls)
                round_number += 1
        return Reference(tuple(log.token_ids), log.rounds, log.logits)


class _Log:
    """All token ids of one dialogue, the cache of those that were read, and how they came about."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: PreTrainedModel,
        grammars: GrammarCompiler,
        dialogue: Dialogue,
    ) -> None:
        self.token_ids: list[int] = []
        self.rounds: list[Round] = []
        self.logits: dict[int, Tensor] = {}
        self._tokenizer = loaded.tokenizer
        self._chat_format = loaded.chat_format
        self._model: Any = model
        self._grammars = grammars
        self._tools = tuple(callable_tools(parse_tools(TOOLS)))
        self._max_calls = None if dialogue.is_parallel else 1
        self._max_output_tokens = dialogue.max_output_tokens
        self._params = SamplingParams(dialogue.temperature, seed=dialogue.seed)
        self._cache = DynamicCache(config=model.config)

    def add_message(self, text: str) -> None:
        """Add what the user says."""
        message = Message("user", text)
        if not self.token_ids:
            conversation = Conversation([message], INSTRUCTIONS, self._tools)
            self.token_ids += self._chat_format.prompt_ids(conversation)
            return
        if self.rounds[-1].is_cut_short:
            self.token_ids.append(self._chat_format.end_of_turn)
        self.token_ids += self._chat_format.suffix_ids([], [message])

    def add_outputs(self, calls: Sequence[Call], texts: Sequence[str]) -> None:
        """Add what ``calls`` returned."""
        outputs = [CallOutput(call.call_id, text) for call, text in zip(calls, texts, strict=True)]
        self.token_ids += self._chat_format.suffix_ids(calls, outputs)

    def sample_turn(self, *, is_forced: bool) -> Sequence[Call]:
        """Sample to the end of the model's turn, and return the calls it made."""
        constraint = Constraint(self._tools, int(is_forced), self._max_calls)
        matcher = self._grammars.matcher(constraint)
        turn = SampledTurn(Detokenizer(self._tokenizer), matcher, may_call=True)
        start = len(self.token_ids)
        for position in range(start, start + self._max_output_tokens):
            logits = self._read()
            mask = matcher.mask() if matcher else None
            token_id = sample(logits, self._params, position, mask).token_id
            if matcher:
                matcher.accept(token_id)
            self.token_ids.append(token_id)
            self.logits[position] = logits
            turn.feed([Sampled(token_id)])
            if token_id in self._tokenizer.stop_ids:
                break
        self.rounds.append(self._round(start, turn.calls))
        return turn.calls

    def _read(self) -> Tensor:
        """Read what was not read yet, and return ``(vocab,)`` logits."""
        start = self._cache.get_seq_length()
        logits = torch.empty(0)
        for at in range(start, len(self.token_ids), PREFILL_CHUNK):
            chunk = torch.tensor([self.token_ids[at : at + PREFILL_CHUNK]])  # (1, seq)
            outputs = self._model(
                input_ids=chunk, cache=self._cache, use_cache=True, logits_to_keep=1
            )
            logits = outputs.logits[0, -1]
        return logits

    def _round(self, start: int, calls: Sequence[Call]) -> Round:
        stop_ids = self._tokenizer.stop_ids
        said = [token_id for token_id in self.token_ids[start:] if token_id not in stop_ids]
        text = b"".join(map(self._tokenizer.token_bytes, said)).decode("utf-8", "replace")
        is_cut_short = self.token_ids[-1] not in stop_ids
        assert not (is_cut_short and calls), "nobody can tell whether such calls are to be made"
        is_canonical = self._tokenizer.encode_text(text) == said
        return Round(start, len(self.token_ids), calls, is_cut_short, is_canonical)
