"""Each position holds its token id, so that what a cache reads can be told."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread

import pytest
import torch

from sampler.cache_pool import BLOCK_SIZE, BlockPool, OutOfBlocksError
from sampler.kv_cache import KVShape, PagedCache, PagedStorage
from sampler.swap import SwapError, SwapStore
from tests.sampler.test_swap import wait_until_empty

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4)
IDS = list(range(100))


@pytest.fixture
def storage() -> PagedStorage:
    return PagedStorage(BlockPool(8), SHAPE, torch.bfloat16)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SwapStore]:
    store = SwapStore(tmp_path)
    yield store
    store.close()


def extend(cache: PagedCache, token_ids: Sequence[int]) -> None:
    """Do what a forward pass does."""
    cache.extend_to(len(token_ids))
    for position, token_id in enumerate(token_ids, start=cache.num_tokens):
        block, slot = cache.table.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
        place = slice(slot * SHAPE.head_dim, (slot + 1) * SHAPE.head_dim)
        cache.storage.tensor[block, ..., place] = token_id
    cache.advance(len(token_ids))


def filled(storage: PagedStorage, token_ids: Sequence[int]) -> PagedCache:
    cache = storage.new_cache()
    extend(cache, token_ids)
    return cache


def read(cache: PagedCache) -> list[int]:
    slabs = cache.storage.tensor[cache.table.blocks]
    slots = slabs.view(*slabs.shape[:-1], BLOCK_SIZE, SHAPE.head_dim)
    # (blocks, layers, 2, heads, slots, head_dim) to (positions, layers * 2 * heads * head_dim)
    held = slots.movedim(4, 1).flatten(0, 1)[: cache.num_tokens].flatten(1)
    assert bool((held == held[:, :1]).all()), "all of a position is of the same token"
    return [int(token_id) for token_id in held[:, 0]]


def fork(cache: PagedCache, num_tokens: int) -> PagedCache:
    forked = cache.fork(num_tokens)
    assert forked is not None
    return forked


# --- Memory --------------------------------------------------------------------------------------


def test_a_block_takes_the_bytes_that_its_shape_says(storage: PagedStorage) -> None:
    assert storage.tensor.shape == (8, 2, 2, 3, 64)
    assert storage.tensor[0].nbytes == SHAPE.block_bytes(torch.bfloat16) == 2 * 2 * 3 * 64 * 2


def test_a_block_of_integers_holds_a_scale_for_each_32_of_them() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=64)
    storage = PagedStorage(BlockPool(8), shape, torch.int8)

    num_integers = 2 * 2 * 3 * BLOCK_SIZE * 64
    assert storage.tensor[0].nbytes == shape.block_bytes(torch.int8)
    assert shape.block_bytes(torch.int8) == num_integers + num_integers // 32 * 2


needs_linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")

RESIDENT = """
from pathlib import Path
import torch
from sampler.cache_pool import BLOCK_SIZE, BlockPool
from sampler.kv_cache import KVShape, PagedStorage

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident_bytes()
shape = KVShape(num_layers=30, num_kv_heads=3, head_dim=64)
storage = PagedStorage(BlockPool({num_blocks}), shape, torch.bfloat16)
{use}
print(storage.tensor.nbytes, resident_bytes() - before)
"""


def measure(num_blocks: int, use: str) -> tuple[int, int]:
    """Return how many bytes the blocks take, and how many are resident after ``use``.

    In a process of its own: in this one, memory that other tests gave back is resident already.
    """
    code = RESIDENT.format(num_blocks=num_blocks, use=use)
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    num_bytes, num_resident = map(int, said.split())
    return num_bytes, num_resident


@needs_linux
def test_reserved_memory_is_resident_before_it_is_used() -> None:
    num_bytes, num_resident = measure(100, "storage.reserve()")

    assert num_resident > 0.9 * num_bytes > 30e6


@needs_linux
def test_blocks_that_were_never_used_are_not_resident() -> None:
    use = """
cache = storage.new_cache()
cache.extend_to(3 * BLOCK_SIZE)
storage.tensor[cache.table.blocks] = 1
"""
    num_bytes, num_resident = measure(1000, use)

    assert num_bytes > 350e6
    assert num_resident < 30e6


# --- Sharing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 5, 16, 20, 32, 37])
def test_forks_and_parents_go_on_each_by_themselves(storage: PagedStorage, num_tokens: int) -> None:
    cache = filled(storage, IDS[:37])
    forked, sibling = fork(cache, num_tokens), fork(cache, num_tokens)
    assert storage.pool.num_used == 3

    extend(forked, [200, 201])
    extend(cache, [210])

    assert read(cache) == [*IDS[:37], 210]
    assert read(forked) == [*IDS[:num_tokens], 200, 201]
    assert read(sibling) == IDS[:num_tokens]
    storage.pool.check()


def test_only_blocks_that_are_not_shared_would_be_free(storage: PagedStorage) -> None:
    cache = filled(storage, IDS[:40])
    forked = fork(cache, 20)

    assert (cache.num_blocks, cache.num_own_blocks, cache.num_own_tokens) == (3, 1, 8)
    assert (forked.num_blocks, forked.num_own_blocks, forked.num_own_tokens) == (2, 0, 0)
    assert forked.needed(1) == 1
    cache.drop()
    assert (forked.num_own_blocks, forked.num_own_tokens, forked.needed(1)) == (2, 20, 0)


def test_a_truncated_cache_goes_on_from_there(storage: PagedStorage) -> None:
    cache = filled(storage, IDS[:37])
    forked = fork(cache, 37)

    cache.truncate(20)
    extend(cache, [200])

    assert read(cache) == [*IDS[:20], 200]
    assert read(forked) == IDS[:37]


def test_a_cache_becomes_another_and_leaves_it_empty(storage: PagedStorage) -> None:
    cache, other = filled(storage, [200] * 20), filled(storage, IDS[:20])

    cache.become(other)

    other.drop()
    assert read(cache) == IDS[:20]
    assert storage.pool.num_used == 2


def test_a_cache_that_finds_no_blocks_is_as_it_was(storage: PagedStorage) -> None:
    cache = filled(storage, IDS)
    forked = fork(cache, 100)

    with pytest.raises(OutOfBlocksError):
        forked.extend_to(BLOCK_SIZE)

    assert read(forked) == IDS
    assert not forked.is_broken


def test_a_cache_that_nobody_needs_gives_its_blocks_back_on_any_thread(
    storage: PagedStorage, store: SwapStore
) -> None:
    caches = [filled(storage, IDS[:20]) for _ in range(3)]
    caches[0].swap_out(store)

    thread = Thread(target=caches.clear)
    thread.start()
    thread.join()

    assert storage.pool.num_used == 0
    assert store.num_blocks == 0


# --- Prefixes ------------------------------------------------------------------------------------


def test_a_published_prefix_is_found_after_its_cache_is_gone(storage: PagedStorage) -> None:
    cache = filled(storage, IDS[:37])
    cache.publish("salt", IDS)
    del cache

    found = storage.match("salt", [*IDS[:33], 0], 33)

    assert read(found) == IDS[:32]
    assert storage.match("other", IDS, 33).num_tokens == 0


@pytest.mark.parametrize(
    ("limit", "num_found"), [(-1, 0), (0, 0), (10, 10), (16, 16), (31, 31), (90, 32)]
)
def test_no_more_is_found_than_is_wanted(storage: PagedStorage, limit: int, num_found: int) -> None:
    """Of a prompt that is known as a whole the last token is forwarded still."""
    cache = filled(storage, IDS[:37])
    cache.publish("salt", IDS[:37])

    found = storage.match("salt", IDS, limit)

    assert read(found) == IDS[:num_found]
    extend(found, [200])
    assert read(found) == [*IDS[:num_found], 200]
    assert read(cache) == IDS[:37]
    assert read(storage.match("salt", IDS, 90)) == IDS[:32]
    storage.pool.check()


def test_what_is_not_in_the_cache_is_not_published(storage: PagedStorage) -> None:
    cache = filled(storage, IDS[:17])
    cache.extend_to(30)
    cache.publish("salt", IDS)

    assert storage.match("salt", IDS, 100).num_tokens == 16


# --- Swapping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 16, 37])
def test_a_cache_comes_back_as_it_was(
    storage: PagedStorage, store: SwapStore, num_tokens: int
) -> None:
    cache = filled(storage, IDS[:num_tokens])
    num_blocks = cache.num_blocks
    cache.extend_to(20)  # room that is not filled is not written

    cache.swap_out(store)

    assert (cache.is_swapped, cache.num_tokens, cache.num_blocks) == (True, num_tokens, 0)
    assert (storage.pool.num_used, store.num_blocks) == (0, num_blocks)
    assert store.num_bytes - num_blocks * SHAPE.block_bytes(torch.bfloat16) < 100
    assert cache.needed(0) == num_blocks
    storage.tensor.fill_(-1)  # others have used the blocks
    cache.swap_in()
    assert (cache.is_swapped, storage.pool.num_used, store.num_blocks) == (False, num_blocks, 0)
    extend(cache, [200])
    assert read(cache) == [*IDS[:num_tokens], 200]


def test_shared_blocks_are_written_and_stay_with_the_others(
    storage: PagedStorage, store: SwapStore
) -> None:
    cache = filled(storage, IDS[:37])
    forked = fork(cache, 20)

    forked.swap_out(store)

    assert store.num_blocks == 2
    assert storage.pool.num_used == 3
    extend(cache, [210])
    cache.drop()
    forked.swap_in()
    assert read(forked) == IDS[:20]


@pytest.mark.parametrize("num_known", [10, 16, 37])
def test_what_others_hold_in_full_blocks_is_shared_when_a_cache_comes_back(
    storage: PagedStorage, store: SwapStore, num_known: int
) -> None:
    cache, other = filled(storage, IDS[:37]), filled(storage, IDS[:num_known])
    cache.swap_out(store)

    cache.swap_in(other)

    assert storage.pool.num_used == 3 + other.num_blocks - num_known // BLOCK_SIZE
    extend(cache, [200])
    assert read(cache) == [*IDS[:37], 200]
    assert read(other) == IDS[:num_known]


def test_a_cache_knows_whether_anything_was_forwarded_on_it(
    storage: PagedStorage, store: SwapStore
) -> None:
    cache = filled(storage, IDS[:37])
    forked = fork(cache, 20)
    cache.swap_out(store)
    cache.swap_in()

    assert (cache.has_advanced, forked.has_advanced) == (True, False)
    forked.become(cache)
    assert forked.has_advanced
    forked.drop()
    assert not forked.has_advanced


def test_a_cache_that_cannot_be_written_stays_as_it_was(
    storage: PagedStorage, tmp_path: Path
) -> None:
    cache = filled(storage, IDS[:37])
    store = SwapStore(tmp_path, capacity_bytes=SHAPE.block_bytes(torch.bfloat16) * 2)

    with pytest.raises(SwapError):
        cache.swap_out(store)

    assert not cache.is_swapped
    assert read(cache) == IDS[:37]
    store.close()


def test_a_cache_that_finds_no_blocks_stays_swapped_out(
    storage: PagedStorage, store: SwapStore
) -> None:
    cache = filled(storage, IDS[:37])
    cache.swap_out(store)
    other = filled(storage, [200] * 100)

    with pytest.raises(OutOfBlocksError):
        cache.swap_in()
    with pytest.raises(OutOfBlocksError):
        cache.swap_in(fork(other, 16))

    assert cache.is_swapped
    assert storage.pool.num_used == other.num_blocks
    other.drop()
    cache.swap_in()
    assert read(cache) == IDS[:37]


def test_a_cache_whose_file_is_damaged_can_only_be_dropped(
    storage: PagedStorage, store: SwapStore
) -> None:
    cache = filled(storage, IDS[:37])
    cache.swap_out(store)
    file = store.directory / "0"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    with pytest.raises(SwapError):
        cache.swap_in()

    assert (cache.is_swapped, storage.pool.num_used) == (True, 0)
    cache.drop()
    extend(cache, IDS[:3])
    assert read(cache) == IDS[:3]
    wait_until_empty(store)


@pytest.mark.parametrize(
    "use",
    [
        lambda cache: cache.fork(11),
        lambda cache: cache.extend_to(1),
        lambda cache: cache.advance(1),
        lambda cache: cache.truncate(1),
        lambda cache: cache.publish("salt", IDS),
    ],
)
def test_what_is_swapped_out_cannot_be_used(
    storage: PagedStorage, store: SwapStore, use: Callable[[PagedCache], object]
) -> None:
    cache = filled(storage, IDS[:20])
    cache.swap_out(store)
    assert cache.can_fork(11), "once it is back"

    with pytest.raises(AssertionError):
        use(cache)

    cache.swap_in()
    assert read(cache) == IDS[:20]
