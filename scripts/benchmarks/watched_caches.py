"""Parked caches of which it is noted what becomes of them: on the model thread, where it is done.

Who looks at a cache from outside, now and then, sees some too late. It may go in the moment between
the end of its run's turn and the suspension; or its run may be back, and its cache with it, before
anybody has looked.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from sampler.cache_pool import BLOCK_SIZE
from sampler.counters import Counters
from sampler.kv_cache import KVCache
from sampler.parked_caches import ParkedCaches
from sampler.suspension_policy import Eviction, SuspensionPolicy
from sampler.waste import Disposition, Suspended


@dataclass
class Fate:
    """What became of the cache of one suspended run."""

    facts: Suspended
    """As they were when its run had ended the turn."""
    disposition: Disposition = Disposition.PRESERVE
    """How it went, if it did."""
    gone_at: float = 0.0
    """When, in monotonic seconds."""
    back_at: float = 0.0
    """When its run was back."""


class WatchedCaches(ParkedCaches):
    """Parks caches as ``ParkedCaches`` does. What was noted may be read once a run is back."""

    def __init__(
        self,
        policy: SuspensionPolicy,
        counters: Counters,
        swap_directory: Path | None = None,
        swap_bytes: int | None = None,
    ) -> None:
        super().__init__(policy, counters, swap_directory, swap_bytes)
        self.fates: dict[float, Fate] = {}
        """Of the caches of suspended runs, by when these were suspended."""
        self.preemptions: list[tuple[Suspended, Disposition]] = []
        """Of caches that were worked on: the facts then, and how they went."""
        self._last: WeakKeyDictionary[KVCache, Fate] = WeakKeyDictionary()

    def hold(self, cache: KVCache) -> None:
        super().hold(cache)
        self._last[cache] = Fate(
            Suspended(cache.num_tokens, cache.num_blocks, self._num_running_tokens(cache))
        )

    def suspend(self, cache: KVCache, tools: Sequence[str], since: float) -> None:
        self.fates[since] = self._last[cache]
        now = time.monotonic()
        super().suspend(cache, tools, since)
        self._note(cache, now)

    def take(self, cache: KVCache) -> None:
        super().take(cache)
        if (fate := self._last.pop(cache, None)) is not None:
            fate.back_at = time.monotonic()

    def evict(self, eviction: Eviction, num_running_tokens: int = 0) -> None:
        now = time.monotonic()
        super().evict(eviction, num_running_tokens)
        if (cache := eviction.key()) is not None:  # type: ignore[operator]
            self._note(cache, now)

    def set_aside(self, cache: KVCache, num_running_tokens: int) -> bool:
        others = max(0, num_running_tokens - cache.num_tokens)
        facts = Suspended(cache.num_tokens, cache.num_blocks, others)
        is_swapped = super().set_aside(cache, num_running_tokens)
        disposition = Disposition.SWAP if is_swapped else Disposition.DISCARD
        self.preemptions.append((facts, disposition))
        return is_swapped

    def _note(self, cache: KVCache, now: float) -> None:
        """Note what was done to ``cache``, if anything was, and this is the first time."""
        fate = self._last.get(cache)
        if fate is None or fate.disposition is not Disposition.PRESERVE or cache.num_blocks:
            return
        fate.disposition = Disposition.SWAP if cache.is_swapped else Disposition.DISCARD
        fate.gone_at = now

    def _num_running_tokens(self, cache: KVCache) -> int:
        """Return the positions in blocks that are not those of parked caches."""
        num_parked = sum(eviction.num_blocks for eviction in self.evictions(0))
        return BLOCK_SIZE * max(0, cache.table.pool.num_used - num_parked)
