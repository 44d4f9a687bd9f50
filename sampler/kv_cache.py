"""The keys and values of one run, in the model's own cache class.

Nearly any causal LM of the transformers library works: sliding-window and hybrid caches too,
because a run only ever appends, so nothing is cropped. What does not (as of transformers 5.24) is
Mamba 1 and Jamba, whose scan forgets its state at each piece of more than one token, and RWKV and
RecurrentGemma, which keep their state elsewhere: loading refuses them.
"""

from transformers import DynamicCache, PreTrainedConfig


class KVCache:
    """One run's cache. It belongs to the model thread while a step is in flight."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.layers = DynamicCache(config=config)
        self.num_tokens = 0
        """Positions held, which is also the position of the next input."""
