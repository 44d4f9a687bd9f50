"""Logits to a token.

The token at a position is a function of the run's seed, the position, the logits and, where there
are penalties, of what the segment has sampled so far; of nothing else. No generator state is
carried along, so neither a suspension nor a neighbour in the batch can shift a run's randomness.
Sampling is by the Gumbel-max trick (Gumbel 1954): add independent Gumbel noise to the
log-probabilities and take the largest. The noise comes from a counter-based generator, Philox
(Salmon et al., SC 2011), keyed by seed and position.

To invert the sum of the probabilities would need one random number in the place of one for each
token, and what it chooses would hang on the last bits of logits, which depend on how a context was
computed: where a difference shifts the sum, it shifts the bounds of all tokens behind it. With
normal differences of 0.001 at perplexities of 200 to 24,000, 8 to 18 % of the tokens were others,
and with Gumbel noise 0.1 %, those where two come within such a difference of each other.

All of it is done in main memory by NumPy, wherever the model is: for one row its operations take a
fraction of what torch's do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sampler.engine_error import EngineError
from sampler.params import SamplingParams

# Logits divided by a temperature under this one may overflow, and then even a mask means nothing.
_GREEDY_BELOW = 1e-5
_NEVER = np.float32(-np.inf)
# What the OpenAI reference has in the place of anything less, and JSON in that of minus infinity.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the model held a token to be, and which ones it held to be likeliest there.

    The probabilities are the model's own, before anything that steers sampling: mask, penalties,
    temperature and top-p. So a token that a grammar forced may well be an unlikely one.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Ids and their log-probabilities, the likeliest first."""


class Sampled(NamedTuple):
    """The token at a position."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Set if the params ask for them."""


class Certain(NamedTuple):
    """The logits of a model that is sure, which need not be worked out.

    Neither temperature nor penalties make a difference to it; only a mask does.
    """

    token_id: int
    work_out: Callable[[], Tensor]
    """Returns the logits, ``(vocab,)`` float32; the largest is the token's."""


Floats = NDArray[np.float32]
Logits = Tensor | Certain
"""Of the token that comes next."""


def sample(
    logits: Logits,
    params: SamplingParams,
    position: int,
    mask: np.ndarray | None = None,
    counts: Mapping[int, int] | None = None,
) -> Sampled:
    """Return the token at ``position``.

    Args:
        logits: ``(vocab,)`` float32, unless they are certain.
        params: how to sample.
        position: index in the token log of the token to be.
        mask: ``(vocab,)`` bool; False forbids a token. None allows all.
        counts: how many times the segment has sampled which token, for the penalties.

    Raises:
        EngineError: the logits mean nothing, as one of them is NaN or the largest is infinite.
    """
    if isinstance(logits, Certain):
        if params.top_logprobs is None and (mask is None or mask[logits.token_id]):
            return Sampled(logits.token_id)
        logits = logits.work_out()
    values = logits.cpu().numpy()
    likeliest = int(np.argmax(values))
    # Of several, NaN counts as the largest: so no other one needs to be looked at.
    if not isfinite(values[likeliest]):
        raise _no_numbers()
    steered = _steered(values, params, mask, counts)
    if steered is not values:
        likeliest = int(np.argmax(steered))
    token_id = _draw(steered, likeliest, params, position)
    if params.top_logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, _logprobs(logits, token_id, params.top_logprobs))


def forced(logits: Logits, token_id: int) -> Sampled:
    """Return ``token_id``, which comes whatever else is likely.

    Raises:
        EngineError: its logit is NaN or too large for a number. Where something went wrong behind
            the logits, that goes for all of them.
    """
    if not isinstance(logits, Certain) and not float(logits[token_id]) < inf:
        raise _no_numbers()
    return Sampled(token_id)


def _no_numbers() -> EngineError:
    return EngineError("the model gave no numbers: its logits are NaN or infinite")


def _steered(
    logits: Floats,
    params: SamplingParams,
    mask: np.ndarray | None,
    counts: Mapping[int, int] | None,
) -> Floats:
    """Return the logits with penalties taken off, and at minus infinity where ``mask`` forbids."""
    if counts and params.has_penalties:
        times = np.fromiter(counts.values(), np.float32, len(counts))
        logits = logits.copy()
        logits[list(counts)] -= params.frequency_penalty * times + params.presence_penalty
    return logits if mask is None else np.where(mask, logits, _NEVER)


def _draw(logits: Floats, likeliest: int, params: SamplingParams, position: int) -> int:
    if params.temperature < _GREEDY_BELOW:
        return likeliest
    # The likeliest has 0, where numbers are densest: noise is not rounded away.
    scores = (logits - logits[likeliest]) / np.float32(params.temperature)
    noisy = scores + gumbel_noise(params.seed, position, len(scores))
    if params.top_p < 1:
        return _draw_from_nucleus(scores, noisy, params.top_p)
    return int(np.argmax(noisy))


def _draw_from_nucleus(scores: Floats, noisy: Floats, top_p: float) -> int:
    """Return the greatest of ``noisy`` in the smallest set whose probability reaches ``top_p``.

    Nucleus sampling (Holtzman et al., 2020). The most likely token is always in it, and of equally
    likely ones the first. Nothing is sorted, which may take longer than a step of a small model: a
    token is in the nucleus if those that are likelier do not reach ``top_p``. One that is not rules
    out all that are no likelier, so this ends after a few that are tried, how ever flat the
    distribution is.
    """
    probabilities = np.exp(scores)
    probabilities /= probabilities.sum()
    while True:
        token_id = int(np.argmax(noisy))
        likelier = scores > scores[token_id]
        likelier[:token_id] |= scores[:token_id] == scores[token_id]
        if not likelier.any() or probabilities[likelier].sum() < top_p:
            return token_id
        noisy = np.where(likelier, noisy, _NEVER)


def _logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits, dim=-1)
    top = torch.topk(logprobs, min(num_top, len(logprobs)))
    values = top.values.clamp(min=_LEAST_LOGPROB).tolist()
    return TokenLogprobs(
        token_id,
        max(float(logprobs[token_id]), _LEAST_LOGPROB),
        tuple(zip(top.indices.tolist(), values, strict=True)),
    )


def gumbel_noise(seed: int, position: int, size: int) -> np.ndarray:
    """Return ``(size,)`` float32 standard Gumbel noise for one position of one run."""
    generator = np.random.Philox(key=seed, counter=position << 64)
    # As ``Generator.random`` has it in float32, which does so number by number, in twice the time.
    bits = generator.random_raw((size + 1) // 2).view(np.uint32)[:size]
    noise = (bits >> 8).astype(np.float32)
    noise *= np.float32(2**-24)
    noise[noise == 0] = np.finfo(np.float32).tiny
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise
