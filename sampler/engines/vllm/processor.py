"""What samples in vLLM's process: a logits processor that leaves one token of each row.

vLLM arms a grammar, and reads a seed, with the first chunk of a session and never again, and its
seeded draws depend on how the session was cut. So it is told to be greedy, and each segment brings
a plan of its own. The token is chosen here as it is in an engine of ours (``sampling``): by the
params, the position and the grammar. All of that follows from the ids of the context. So whatever
vLLM does to a request (it is preempted, moved, or opened again somewhere else), the tokens are the
same.

An exception would kill the engine, and with it all runs. In its place the row says ``failure_id``,
again and again, until the request is given up. Where a row would say it otherwise, and may say
anything else, it says the next best.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from sampler.grammar import GrammarCompiler
from sampler.matcher import Matcher
from sampler.params import Constraint, SamplingParams
from sampler.sampling import sample
from sampler.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PLAN = "segment"
"""The member of vLLM's ``extra_args`` that has the plan."""


@dataclass(frozen=True)
class SegmentPlan:
    """How a segment is sampled."""

    params: SamplingParams
    constraint: Constraint
    start: int
    """Position of its first token."""

    def encode(self) -> bytes:
        """Return it as bytes."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "SegmentPlan":
        """Return what ``encode`` was given."""
        return msgspec.json.decode(data, type=cls)


def failure_id_of(tokenizer: Tokenizer) -> int:
    """Return an id that no model samples for good reasons: a control token that ends no turn or,
    where there is none, the last one of the vocabulary."""
    control_ids = (
        token_id
        for token_id in tokenizer.added_tokens.values()
        if not tokenizer.token_bytes(token_id) and token_id not in tokenizer.stop_ids
    )
    return max(control_ids, default=tokenizer.vocab_size - 1)


class SegmentProcessor:
    """A logits processor of vLLM's V1 model runner, without vLLM."""

    def __init__(self, tokenizer: Tokenizer, max_forced_string: int) -> None:
        """Begin with an empty batch.

        Args:
            tokenizer: of the model.
            max_forced_string: see ``GrammarCompiler``.
        """
        self._grammars = GrammarCompiler(tokenizer, max_forced_string)
        self._failure_id = failure_id_of(tokenizer)
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Tell whether the likeliest token stays the likeliest."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Take note of which requests have which rows from now on; None: of nothing new."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt_ids, output_ids in batch_update.added:
            self._rows.pop(row, None)
            if plan := (params.extra_args or {}).get(PLAN):
                self._rows[row] = _Row(plan, prompt_ids or (), output_ids)
        for source, target, direction in batch_update.moved:
            self._move(source, target, is_swap=direction.name == "SWAP")

    def _move(self, source: int, target: int, *, is_swap: bool) -> None:
        moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if replaced is not None and is_swap:
            self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """Leave one token of each row that has a plan. ``logits`` are ``(rows, vocab)``; rows in
        mid-prefill are among them, and what is left of those does not matter."""
        for index, row in self._rows.items():
            token_id = self._choose(row, logits[index])
            logits[index] = -torch.inf
            logits[index, token_id] = 0.0
        return logits

    def _choose(self, row: "_Row", logits: Tensor) -> int:
        if not row.has_failed:
            try:
                return row.choose(logits, self._grammars, self._failure_id)
            except Exception:  # whatever it is ends this run only
                logger.exception("a token could not be sampled")
                row.has_failed = True
        return self._failure_id


class _Row:
    """A segment in the batch."""

    def __init__(self, plan: bytes, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Begin, or go on.

        Args:
            plan: a ``SegmentPlan``, encoded.
            prompt_ids: the context when the request was added.
            output_ids: what vLLM has sampled since; it grows.
        """
        self.has_failed = False
        self._data = plan
        self._plan: SegmentPlan | None = None
        self._prompt_ids = prompt_ids
        self._output_ids = output_ids
        self._matcher: Matcher | None = None
        self._counts: Counter[int] = Counter()
        self._num_read = 0  # of what the segment has sampled

    def choose(self, logits: Tensor, grammars: GrammarCompiler, failure_id: int) -> int:
        """Return the next token.

        Raises:
            Exception: whatever goes wrong.
        """
        if self._plan is None:
            self._plan = self._begun(SegmentPlan.decode(self._data), grammars)
        for token_id in self._unread(self._plan.start):
            self._read(token_id)
        if self._matcher is not None and (only := self._matcher.only_token) is not None:
            return only
        position = len(self._prompt_ids) + len(self._output_ids)
        mask = None if self._matcher is None else self._matcher.mask()
        params = self._plan.params
        token_id = sample(logits, params, position, mask, self._counts).token_id
        if token_id != failure_id:
            return token_id
        others = torch.ones(len(logits), dtype=torch.bool).numpy() if mask is None else mask
        others[failure_id] = False
        if not others.any():
            return token_id
        return sample(logits, params, position, others, self._counts).token_id

    def _begun(self, plan: SegmentPlan, grammars: GrammarCompiler) -> SegmentPlan:
        self._matcher = grammars.matcher(plan.constraint)
        # Log-probabilities come from vLLM.
        return replace(plan, params=replace(plan.params, top_logprobs=None))

    def _unread(self, start: int) -> Sequence[int]:
        """Return what the segment has sampled, as far as it was not returned before."""
        first = start + self._num_read - len(self._prompt_ids)
        if first >= 0:
            return self._output_ids[first:]
        return [*self._prompt_ids[first:], *self._output_ids]

    def _read(self, token_id: int) -> None:
        if self._matcher is not None:
            self._matcher.accept(token_id)
        self._counts[token_id] += 1
        self._num_read += 1
