"""What goes, and how, where memory or files are short. Through whole runs: test_executor."""

import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from sampler.cache_pool import BLOCK_SIZE, BlockPool
from sampler.counters import Counters
from sampler.kv_cache import GenericCache, KVShape, PagedStorage
from sampler.parked_caches import ParkedCaches
from sampler.suspension_policy import Mode, SuspensionPolicy
from sampler.waste import Disposition, Suspended

CONFIG = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=16, vocab_size=32)
NUM_STATE_BLOCKS = 100
POSITIONS = 4 * BLOCK_SIZE


def with_state(pool: BlockPool) -> GenericCache:
    """Return a cache that takes as much as it counts for, most of it whatever its length."""
    cache = GenericCache(CONFIG, pool, NUM_STATE_BLOCKS)
    cache.grow(POSITIONS)
    there = torch.zeros(1, 1, NUM_STATE_BLOCKS * BLOCK_SIZE + POSITIONS, 16)
    cache.layers.update(there, there.clone(), 0)
    cache.advance(POSITIONS)
    return cache


def test_room_in_files_is_made_for_a_state_too(tmp_path: Path) -> None:
    pool, counters = BlockPool(1000), Counters()
    kept, other, suspended = (with_state(pool) for _ in range(3))
    room = 5 * kept.num_bytes // 2
    parked = ParkedCaches(SuspensionPolicy(Mode.SWAP), counters, tmp_path, room)
    for cache in (kept, other):
        parked.suspend(cache, ["tool"], 0.0)
        parked.keep(cache)

    parked.suspend(suspended, ["tool"], 0.0)

    assert suspended.is_swapped
    assert (kept.num_tokens, other.num_tokens) == (0, POSITIONS)
    assert counters.discards == 0
    parked.close()


def test_how_a_cache_goes_is_decided_when_those_that_shared_it_have_gone(tmp_path: Path) -> None:
    policy, counters = SuspensionPolicy(), Counters()
    for _ in range(12):
        policy.costs.observe_forward(512, 0.26)
        policy.costs.observe_forward(1, 0.004)
        policy.costs.observe_swap(100, 0.1, is_in=True)
        policy.costs.observe_swap(100, 0.1, is_in=False)
    storage = PagedStorage(BlockPool(200), KVShape(2, 1, 8), torch.float32)
    kept = storage.new_cache()
    kept.extend_to(1600)
    kept.advance(1600)
    suspended = kept.fork(1600)
    assert suspended is not None
    suspended.extend_to(BLOCK_SIZE)
    suspended.advance(BLOCK_SIZE)
    parked = ParkedCaches(policy, counters, tmp_path)
    parked.keep(kept)
    parked.suspend(suspended, ["tool"], time.monotonic())
    shares_all = Suspended(suspended.num_own_tokens, suspended.num_blocks)
    assert policy.way_out(shares_all) is Disposition.DISCARD

    for eviction in parked.evictions(0):
        parked.evict(eviction)

    assert kept.num_tokens == 0
    assert suspended.is_swapped
    parked.close()


def test_who_has_ended_a_turn_is_taken_for_suspended_if_nothing_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PagedStorage(BlockPool(8), KVShape(1, 1, 8), torch.float32).new_cache()
    cache.extend_to(20)
    cache.advance(20)
    parked = ParkedCaches(SuspensionPolicy(Mode.SWAP), Counters(), tmp_path)
    parked.hold(cache)
    assert [one.is_premature for one in parked.evictions(0)] == [True]
    assert parked.evictions(0, kept_only=True) == []

    monkeypatch.setattr("sampler.parked_caches.WORD_SECONDS", 0.0)
    [eviction] = parked.evictions(0)

    assert not eviction.is_premature
    parked.evict(eviction)
    assert cache.is_swapped
    parked.close()


def test_a_fork_needs_what_it_takes_beside_what_it_is_made_of(tmp_path: Path) -> None:
    pool = BlockPool(1000)
    generic = with_state(pool)
    whole = NUM_STATE_BLOCKS + POSITIONS // BLOCK_SIZE
    assert generic.needed_to_fork(BLOCK_SIZE) == NUM_STATE_BLOCKS + 1
    paged = PagedStorage(BlockPool(20), KVShape(1, 1, 8), torch.float32).new_cache()
    paged.extend_to(BLOCK_SIZE + 1)
    paged.advance(BLOCK_SIZE + 1)
    assert paged.needed_to_fork(BLOCK_SIZE) == 0

    parked = ParkedCaches(SuspensionPolicy(Mode.SWAP), Counters(), tmp_path)
    for cache in (generic, paged):
        parked.suspend(cache, ["tool"], 0.0)

    assert generic.needed_to_fork(BLOCK_SIZE) == whole + NUM_STATE_BLOCKS + 1
    assert paged.needed_to_fork(BLOCK_SIZE) == 2
    parked.close()
