"""The keys and values of one run, in the model's own cache class.

Nearly any causal LM of the transformers library works: sliding-window and hybrid caches too,
because a run only ever appends. What does not (as of transformers 5.24) is Mamba 1 and Jamba, whose
scan forgets its state at each piece of more than one token, and RWKV and RecurrentGemma, which keep
their state elsewhere: loading refuses them.
"""

import copy
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Layers that grow by making new tensors, so that old ones can be shared.
_SHAREABLE = (DynamicLayer, DynamicSlidingWindowLayer)


class KVCache:
    """One run's cache. It belongs to the model thread while a step is in flight."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.layers = DynamicCache(config=config)
        self.num_tokens = 0
        """Positions held, which is also the position of the next input."""
        self.is_broken = False
        """True once a forward pass has failed on it: some layers may hold more than others."""

    def can_fork(self, num_tokens: int) -> bool:
        """Tell whether the first ``num_tokens`` positions, at most all, can be had by themselves.

        A state that has seen more (a window, a recurrence) cannot be cut back.
        """
        if self.is_broken:
            return False
        is_all = num_tokens == self.num_tokens
        return is_all or all(type(layer) is DynamicLayer for layer in self.layers.layers)

    def fork(self, num_tokens: int) -> "KVCache | None":
        """Return a cache that holds the first ``num_tokens`` positions, or None where it cannot.

        Tensors are shared, not copied, wherever the layer only ever replaces its own.
        """
        if not self.can_fork(num_tokens):
            return None
        forked = copy.copy(self)
        forked.num_tokens = num_tokens
        forked.layers = copy.copy(self.layers)
        forked.layers.layers = [
            _forked(layer, self.num_tokens - num_tokens) for layer in self.layers.layers
        ]
        return forked

    def become(self, other: "KVCache") -> None:
        """Hold what ``other`` holds; that is not to be used any more."""
        vars(self).update(vars(other))


def _forked(layer: Any, num_dropped: int) -> Any:
    if type(layer) not in _SHAREABLE:
        return copy.deepcopy(layer)
    forked = copy.copy(layer)
    if num_dropped:
        forked.crop(-num_dropped)
    return forked
