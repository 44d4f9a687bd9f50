"""The model: token ids and a cache in, next-token logits out.

Everything here runs on the model thread.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sampler.counters import Counters
from sampler.kv_cache import KVCache


class ModelRunner:
    """Runs any causal LM of the transformers library, one run at a time."""

    def __init__(self, model: PreTrainedModel, counters: Counters | None = None) -> None:
        self._model = model
        self.counters = counters or Counters()

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    @property
    def max_context(self) -> int:
        """The most positions that the model was made for; recurrent models have no bound."""
        config = self._model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)

    def new_cache(self) -> KVCache:
        """Return an empty cache for one run."""
        return KVCache(self._model.config)

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int], cache: KVCache) -> Tensor:
        """Run the model over ``token_ids`` on top of ``cache`` and return the next-token logits.

        Positions continue from ``cache.num_tokens``. If this raises, the cache is no longer whole
        and must be dropped.

        Returns:
            ``(vocab,)`` float32, on the model's device.
        """
        input_ids = torch.tensor([token_ids], device=self.device)  # (1, seq)
        start, stop = cache.num_tokens, cache.num_tokens + len(token_ids)
        # Most models would work the positions out of the cache. Bamba starts anew at 0.
        position_ids = torch.arange(start, stop, device=self.device)[None]  # (1, seq)
        try:
            outputs = self._model(
                input_ids=input_ids,
                position_ids=position_ids,
                cache=cache.layers,
                use_cache=True,
                logits_to_keep=1,
            )
        except BaseException:
            cache.is_broken = True
            raise
        cache.num_tokens = stop
        self.counters.tokens_forwarded += len(token_ids)
        self.counters.forward_passes += 1
        return outputs.logits[0, -1].float()  # type: ignore[no-any-return]  # (vocab,)

    def continues_from_its_cache(self) -> bool:
        """Tell whether extending in two pieces gives the logits of one pass.

        Models whose state does not live in the cache would go on as if from nothing.
        """
        ids = [token_id % self.vocab_size for token_id in range(3, 19)]
        whole = self.extend(ids, self.new_cache())
        cache = self.new_cache()
        self.extend(ids[:11], cache)
        pieces = self.extend(ids[11:], cache)
        # What rounding may move, as a share of the logits' spread.
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        distance = (whole - pieces).abs().max() / (whole.max() - whole.min())
        return bool(distance < tolerance)
