"""What a run leaves for others to start from."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from sampler.kv_cache import KVCache


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Token ids, with the cache of the run that read them.

    The cache may hold less (what was sampled last was never an input) or, where its run has gone
    on, more; whatever it holds of these tokens can be shared.
    """

    token_ids: tuple[int, ...]
    cache: KVCache

    def num_shared(self, token_ids: tuple[int, ...]) -> int:
        """Return how many of ``token_ids``, from the first on, can be had from the cache."""
        held = min(len(self.token_ids), self.cache.num_tokens)
        shared = num_common(self.token_ids[:held], token_ids)
        return shared if self.cache.can_fork(shared) else 0


@dataclass(frozen=True)
class Sources:
    """What a run may start from, besides nothing."""

    snapshots: Sequence[Snapshot] = ()
    """The one that shares most with its prompt is forked."""
    salt: Hashable = None
    """It starts from, and adds to, what runs with the same salt have computed of prompts that
    begin alike."""
    reuses_prefixes: bool = True
    """Whether it does so."""


def num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the length of the longest common prefix, by bisection: slices compare fast."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
