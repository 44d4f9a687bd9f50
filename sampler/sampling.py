"""Logits to a token.

The token at a position is a function of the run's seed, the position and the logits, and of nothing
else: no generator state is carried along, so neither a suspension nor a neighbour in the batch can
shift a run's randomness. Sampling is by the Gumbel-max trick (Gumbel 1954): add independent Gumbel
noise to the log-probabilities and take the largest. The noise comes from a counter-based generator,
Philox (Salmon et al., SC 2011), keyed by seed and position.
"""

import numpy as np
import torch
from torch import Tensor

from sampler.params import SamplingParams

# Logits divided by a temperature under this one may overflow, and then even a mask means nothing.
_GREEDY_BELOW = 1e-5


def sample(
    logits: Tensor, params: SamplingParams, position: int, mask: np.ndarray | None = None
) -> int:
    """Return the id of the token at ``position``.

    Args:
        logits: ``(vocab,)`` float32.
        params: temperature, top-p and seed.
        position: index in the token log of the token to be.
        mask: ``(vocab,)`` bool; False forbids a token. None allows all.
    """
    if mask is not None:
        allowed = torch.from_numpy(mask).to(logits.device)
        logits = logits.masked_fill(~allowed, -torch.inf)
    if params.temperature < _GREEDY_BELOW:
        return int(torch.argmax(logits))
    scores = torch.log_softmax(logits / params.temperature, dim=-1)
    if params.top_p < 1:
        scores = _keep_nucleus(scores, params.top_p)
    noise = gumbel_noise(params.seed, position, logits.shape[-1])
    return int(torch.argmax(scores + torch.from_numpy(noise).to(logits.device)))


def gumbel_noise(seed: int, position: int, size: int) -> np.ndarray:
    """Return ``(size,)`` float32 standard Gumbel noise for one position of one run."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position << 64))
    uniform = generator.random(size, dtype=np.float32)
    tiny = np.finfo(np.float32).tiny
    return -np.log(-np.log(np.maximum(uniform, tiny)))


def _keep_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Forbid all but the smallest set of tokens whose probability reaches ``top_p``.

    Nucleus sampling (Holtzman et al., 2020). The most likely token is always kept.
    """
    ordered, order = torch.sort(scores, descending=True, stable=True)  # (vocab,)
    probabilities = ordered.exp()
    before = torch.cumsum(probabilities, dim=-1) - probabilities
    dropped = order[1:][before[1:] >= top_p]
    return scores.index_fill(0, dropped, -torch.inf)
