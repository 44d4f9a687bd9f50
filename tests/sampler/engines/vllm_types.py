"""What one meets of vLLM from outside, as far as it matters here; the names are those of 0.32.

Unit tests run where vLLM is not. ``tests/vllm`` makes sure that the real ones can do the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol, TypeAlias

from torch import Tensor


class VLLMValidationError(Exception):
    """A request that is refused."""


class EngineDeadError(Exception):
    """The engine is no more, for anybody."""


class RequestOutputKind(Enum):
    """What an output holds: all since the beginning, what is new, or all and only at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """How to sample one turn."""

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    structured_outputs: Sequence[int] | None = None
    """Here: the only ids that the grammar admits, one after the other."""
    extra_args: dict[str, Any] | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE


@dataclass
class StreamingInput:
    """A chunk of a session: what is appended to its context, and how to go on sampling."""

    prompt: dict[str, Any]
    sampling_params: SamplingParams | None = None


@dataclass
class Logprob:
    """Of one token at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """What was sampled."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass
class RequestOutput:
    """What a consumer gets."""

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None


class MoveDirectionality(Enum):
    """Whether a request moved to a free row, or two changed places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


AddedRequest: TypeAlias = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Row, params, ids of the prompt, and the list to which what is sampled is added."""


@dataclass(frozen=True)
class BatchUpdate:
    """What became of the rows of the batch: first some were removed, then added, then moved."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(Protocol):
    """What can be put between the model and the sampler, in the process that runs the model."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take note of which requests have which rows from now on; None: of nothing new."""

    def apply(self, logits: Tensor) -> Tensor:
        """Return what to sample from, ``(rows, vocab)``; rows in mid-prefill are among them."""
