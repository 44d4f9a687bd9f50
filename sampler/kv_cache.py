"""The keys and values of one run, in the model's own cache class.

Any causal LM of the transformers library works: sliding-window and hybrid caches too, because a run
only ever appends, so nothing is cropped.
"""

from transformers import DynamicCache, PreTrainedConfig


class KVCache:
    """One run's cache. It belongs to the model thread while a step is in flight."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.layers = DynamicCache(config=config)
        self.num_tokens = 0
        """Positions held, which is also the position of the next input."""
