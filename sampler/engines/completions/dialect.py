"""What endpoints for completions are asked for the next tokens of a run, each in its own way."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from protocol.codec import encode
from protocol.validation import JsonObject
from sampler.params import SamplingParams

_SEED_BITS = 31
"""A seed of so many bits is taken everywhere."""


@dataclass(frozen=True)
class CompletionsDialect:
    """What one kind of endpoint takes, and how it gives back the ids of what it has sampled."""

    ids_member: str
    """The member of a choice that holds them."""
    extra: Mapping[str, object]
    """Members that go along with every request."""
    takes_stop_ids: bool
    """Whether it can be told which tokens end a turn."""
    extra_for_logprobs: Mapping[str, object] | None
    """Members that have the tokens of log-probabilities spelled as ids; None: nothing does."""


CEREBRAS = CompletionsDialect(
    ids_member="tokens",
    extra={"return_raw_tokens": True},
    takes_stop_ids=False,
    extra_for_logprobs=None,
)
"""The Cerebras inference API (its reference, completions)."""

VLLM = CompletionsDialect(
    ids_member="token_ids",
    extra={
        "return_token_ids": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        # Where a request says nothing of them, the model's generation config does.
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    },
    takes_stop_ids=True,
    extra_for_logprobs={"return_tokens_as_token_ids": True},
)
"""A server of vLLM (0.32, ``entrypoints/openai/completion/protocol.py``)."""

DIALECTS: Mapping[str, CompletionsDialect] = {"cerebras": CEREBRAS, "vllm": VLLM}
"""By the names that a person gives them."""


def request_body(
    token_ids: Sequence[int],
    *,
    model: str,
    params: SamplingParams,
    max_tokens: int,
    stop_ids: Iterable[int],
    dialect: CompletionsDialect,
    omitted: Collection[str] = (),
) -> bytes:
    """Return a request for what follows ``token_ids``, and nothing of it as text only.

    Args:
        token_ids: the whole context.
        model: its name at the endpoint.
        params: how it is sampled.
        max_tokens: the most tokens; where it is missing, the rest of the context is charged.
        stop_ids: what ends the turn.
        dialect: what the endpoint takes.
        omitted: members that are left out.
    """
    body: JsonObject = {
        "model": model,
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": _seed_at(len(token_ids), params.seed),
        **dialect.extra,
    }
    if params.has_penalties:
        body["presence_penalty"] = params.presence_penalty
        body["frequency_penalty"] = params.frequency_penalty
    if params.top_logprobs is not None:
        body["logprobs"] = params.top_logprobs
        body |= dialect.extra_for_logprobs or {}
    if dialect.takes_stop_ids:
        body["stop_token_ids"] = sorted(stop_ids)
    return encode({name: body[name] for name in body if name not in omitted})


def _seed_at(position: int, seed: int) -> int:
    """Return the seed of what is sampled from ``position`` on, in a run with ``seed``.

    An endpoint begins anew with each request. With one seed for all of them, every turn of a run
    would be drawn with the same luck.
    """
    digest = blake2b(b"%d %d" % (seed, position), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - _SEED_BITS)
