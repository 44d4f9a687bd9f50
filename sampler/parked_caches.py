"""Caches that nobody works on, and what becomes of them when memory runs short.

A cache is parked when its run is suspended, and when it is over: then it stays for others to start
from, as long as somebody holds a snapshot of it. Which of the two a run is that has ended a turn,
the event loop knows a moment later. Here a cache is known by a weak reference only. Whoever lets go
of the last other one frees it, and need not say so.

No cache is worth a run: one that cannot be swapped out is discarded, and one that cannot be brought
back is computed again, whatever the reason.

Everything here belongs to the model thread.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never
from weakref import WeakKeyDictionary, ref

from sampler.cache_pool import OutOfBlocksError
from sampler.counters import Counters
from sampler.kv_cache import KVCache
from sampler.suspension_policy import Eviction, Kind, Parked, SuspensionPolicy
from sampler.swap import SwapError, SwapStore
from sampler.waste import Disposition, Suspended

logger = logging.getLogger(__name__)

WORD_SECONDS = 0.1
"""For how long it is waited to be known what a run wants that has ended a turn. Its consumer may be
slow to hear of it."""


@dataclass(frozen=True)
class _Stay:
    """Why a cache is parked, and since when in monotonic seconds."""

    kind: Kind
    since: float
    tools: tuple[str, ...] = ()


class ParkedCaches:
    """Parks caches, and swaps out or discards them as the policy says."""

    def __init__(
        self,
        policy: SuspensionPolicy,
        counters: Counters,
        swap_directory: Path | None = None,
        swap_bytes: int | None = None,
    ) -> None:
        """Park caches.

        Args:
            policy: decides which one goes, and how.
            counters: where that is counted.
            swap_directory: see ``SwapStore``. The store is made by ``prepare``, or when it is
                needed.
            swap_bytes: the most that may be swapped out.
        """
        self._policy = policy
        self._counters = counters
        self._swap_directory = swap_directory
        self._swap_bytes = swap_bytes
        self._store: SwapStore | None = None
        self._stays: WeakKeyDictionary[KVCache, _Stay] = WeakKeyDictionary()

    @property
    def num_swapped_blocks(self) -> int:
        """Blocks whose content is in files."""
        return self._store.num_blocks if self._store else 0

    def prepare(self) -> None:
        """Be ready to swap out, if that is possible now, and have what dead processes have left
        removed."""
        try:
            self._ready_store()
        except SwapError:
            logger.warning("nothing can be swapped out for now", exc_info=True)

    def keep(self, cache: KVCache) -> None:
        """Park ``cache`` for those who may start from it."""
        self._stays[cache] = _Stay(Kind.KEPT, time.monotonic())

    def hold(self, cache: KVCache) -> None:
        """Park ``cache`` of a run that has ended a turn, and may be suspended: others will say so
        in a moment."""
        self._stays[cache] = _Stay(Kind.ENDED, time.monotonic())

    def suspend(self, cache: KVCache, tools: Sequence[str], since: float) -> None:
        """Park ``cache`` of a run that waits for ``tools``; a forced policy acts at once."""
        self._stays[cache] = _Stay(Kind.SUSPENDED, since, tuple(tools))
        disposition = self._policy.on_suspend()
        if disposition is not Disposition.PRESERVE and cache.num_blocks:
            self._dispose_of(cache, disposition)

    def take(self, cache: KVCache) -> None:
        """Take ``cache`` out, as it is: somebody works on it again."""
        self._stays.pop(cache, None)

    def evictions(self, num_running_tokens: int, *, kept_only: bool = False) -> Sequence[Eviction]:
        """Return all that can be evicted, the first to go first.

        Args:
            num_running_tokens: positions in the caches of the runs that are being sampled.
            kept_only: spare the caches of suspended runs.
        """
        return self._policy.eviction_order(
            self._parked(kept_only=kept_only), time.monotonic(), num_running_tokens
        )

    def evict(self, eviction: Eviction, num_running_tokens: int = 0) -> None:
        """Have its blocks given back, unless nobody holds it any more.

        How is decided anew: what it shared with those that went before it is its own now.
        """
        assert isinstance(eviction.key, ref)
        cache = eviction.key()
        if cache is None or cache not in self._stays or not cache.num_blocks:
            return
        if self._stays[cache].kind is Kind.KEPT:
            self._discard(cache)
        else:
            self._dispose_of(cache, self._policy.way_out(_facts(cache, num_running_tokens)))

    def evict_all(self) -> None:
        """Have all blocks given back that can be."""
        for eviction in self.evictions(0):
            self.evict(eviction)

    def swap_in(self, cache: KVCache, beginning: KVCache | None = None) -> bool:
        """Bring ``cache`` back, if it is swapped out; False if it is lost, and empty.

        What it begins with is shared with ``beginning``, if there is such a cache.

        Raises:
            OutOfBlocksError: there is no room; nothing has changed.
        """
        if not cache.is_swapped:
            return True
        start = time.perf_counter()
        try:
            cache.swap_in(beginning)
        except OutOfBlocksError:
            raise
        except Exception:
            logger.warning("a swapped cache is lost, and computed again", exc_info=True)
            cache.drop()
            return False
        seconds = time.perf_counter() - start
        self._policy.costs.observe_swap(cache.num_blocks, seconds, is_in=True)
        self._counters.swaps_in += 1
        return True

    def close(self) -> None:
        """Remove what is swapped out."""
        if self._store:
            self._store.close()

    def _parked(self, *, kept_only: bool) -> Iterator[Parked]:
        silent_since = time.monotonic() - WORD_SECONDS
        for cache, stay in list(self._stays.items()):
            if stay.kind is Kind.ENDED and stay.since <= silent_since:
                stay = replace(stay, kind=Kind.SUSPENDED)
            if stay.kind is Kind.KEPT or not kept_only:
                yield _parked(cache, stay)

    def set_aside(self, cache: KVCache, num_running_tokens: int) -> bool:
        """Swap out a cache that is worked on, where that is better than to compute it again.

        Returns:
            Whether it was: otherwise it is to be dropped.
        """
        disposition = self._policy.way_out(_facts(cache, num_running_tokens))
        return disposition is Disposition.SWAP and self._swap_out(cache)

    def _dispose_of(self, cache: KVCache, disposition: Disposition) -> None:
        match disposition:
            case Disposition.SWAP:
                if not self._swap_out(cache):
                    self._discard(cache)
            case Disposition.DISCARD:
                self._discard(cache)
            case Disposition.PRESERVE:
                raise AssertionError("to preserve is no eviction")
            case _:
                assert_never(disposition)

    def _swap_out(self, cache: KVCache) -> bool:
        """Swap ``cache`` out; False if it cannot be, and then it is to be dropped."""
        if cache.is_broken:
            return False
        num_blocks = cache.num_blocks
        start = time.perf_counter()
        try:
            store = self._ready_store()
            self._make_room(store, cache.num_blocks_alone)
            cache.swap_out(store)
        except Exception:
            logger.warning("a cache cannot be swapped out, and is discarded", exc_info=True)
            return False
        seconds = time.perf_counter() - start
        self._policy.costs.observe_swap(num_blocks, seconds, is_in=False)
        self._counters.swaps_out += 1
        self._counters.tokens_swapped += cache.num_tokens
        return True

    def _ready_store(self) -> SwapStore:
        """Return the store, which is made if there is none.

        Raises:
            SwapError: it cannot be made now.
        """
        if self._store is None:
            self._store = SwapStore(self._swap_directory, self._swap_bytes)
        return self._store

    def _make_room(self, store: SwapStore, num_blocks: int) -> None:
        """Discard swapped caches that are only kept, the oldest first, where ``num_blocks`` blocks
        can be swapped out then and not before."""
        if num_blocks <= store.num_blocks_left:
            return
        kept = deque(self._kept_in_files())
        reclaimable = sum(cache.num_blocks_alone for cache in kept)
        if num_blocks > store.num_blocks_left + reclaimable:
            return
        while kept and num_blocks > store.num_blocks_left:
            self._discard(kept.popleft())

    def _kept_in_files(self) -> list[KVCache]:
        """Return the swapped caches that are only kept, the oldest first."""
        stays = [(cache, stay) for cache, stay in list(self._stays.items()) if cache.is_swapped]
        stays.sort(key=lambda one: one[1].since)
        return [cache for cache, stay in stays if stay.kind is Kind.KEPT]

    def _discard(self, cache: KVCache) -> None:
        if self._stays[cache].kind is Kind.KEPT:
            self._counters.kept_discards += 1
        else:
            self._counters.discards += 1
        cache.drop()


def _facts(cache: KVCache, num_running_tokens: int) -> Suspended:
    return Suspended(cache.num_own_tokens, cache.num_blocks, num_running_tokens)


def _parked(cache: KVCache, stay: _Stay) -> Parked:
    """Return what the policy is to know of ``cache``."""
    num_own_blocks = cache.num_own_blocks  # looks at each block, and is asked of all caches at once
    return Parked(
        ref(cache),
        stay.kind,
        cache.num_tokens_in_last(num_own_blocks),
        cache.num_blocks,
        stay.since,
        stay.tools,
        cache.num_blocks - num_own_blocks,
    )
