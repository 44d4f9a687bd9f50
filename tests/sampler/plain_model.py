"""A model without an engine: the whole of a log at once, with no cache, chunk, batch or block.

What a log says can be told from that by itself. So what an engine has wrong whatever it does shows
here: which seed and position a token is drawn by, what the penalties count, what a token has read.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from sampler.params import SamplingParams
from sampler.run import Run
from sampler.sampling import gumbel_noise

TOLERANCE = 1e-3
"""How much better than the token that was sampled another one may look: what rounding may move."""


class PlainModel:
    """Finds tokens that do not follow from what comes before them."""

    def __init__(self, model: PreTrainedModel, steer: Callable[[Tensor, int], Tensor]) -> None:
        """Judge by ``model``, which nobody else has.

        Args:
            model: of the transformers library.
            steer: what becomes of the logits of the token at a position.
        """
        self._model = model.double()
        self._steer = steer

    @torch.inference_mode()
    def check(self, run: Run, free: Callable[[int], bool]) -> int:
        """Make sure of the tokens that ``run`` has sampled in segments without a grammar.

        Args:
            run: one that draws from all of the vocabulary.
            free: tells whether the segment of that number had no grammar.

        Returns:
            How many were looked at.
        """
        assert run.params.top_p == 1
        token_ids = torch.tensor([run.tokens.ids])  # (1, seq)
        logits = self._model(input_ids=token_ids, use_cache=False).logits[0]  # (seq, vocab)
        num_checked = 0
        for number, segment in enumerate(run.segments):
            if free(number):
                stop = segment.input_tokens + segment.output_tokens
                self._check(run, range(segment.input_tokens, stop), logits)
                num_checked += segment.output_tokens
        return num_checked

    def _check(self, run: Run, positions: range, logits: Tensor) -> None:
        said: Counter[int] = Counter()
        for position in positions:
            token_id = run.tokens.ids[position]
            steered = self._steer(logits[position - 1], position).numpy()
            scores = _scores(steered, run.params, position, said)
            assert scores.max() - scores[token_id] < TOLERANCE, f"{run.id}, position {position}"
            said[token_id] += 1


def _scores(
    logits: NDArray[np.float64], params: SamplingParams, position: int, said: Counter[int]
) -> NDArray[np.float64]:
    """Return ``(vocab,)``: the largest is that of the token which comes next."""
    scores = logits.copy()
    for token_id, times in said.items():
        scores[token_id] -= params.presence_penalty + params.frequency_penalty * times
    if not params.temperature:
        return scores
    noise: NDArray[np.float32] = gumbel_noise(params.seed, position, len(scores))
    noisy: NDArray[np.float64] = scores / params.temperature + noise
    return noisy
