"""Caches are checked against one forward pass of the same model without any cache."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from sampler.cache_pool import BLOCK_SIZE, BlockPool, OutOfBlocksError
from sampler.kv_cache import GenericCache
from sampler.model_runner import GenericRunner, Handling
from sampler.swap import SwapError, SwapStore
from tests.sampler.families import (
    FAMILIES,
    IDS,
    TOLERANCE,
    WINDOW,
    distance,
    family,
    without_cache,
)
from tests.sampler.test_swap import wait_until_empty

OTHER_IDS = IDS[::-1]
NOT_PLAIN = [name for name in FAMILIES if name != "Llama"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SwapStore]:
    store = SwapStore(tmp_path)
    yield store
    store.close()


def filled(runner: GenericRunner, token_ids: Sequence[int]) -> GenericCache:
    cache = runner.new_cache()
    runner.extend(token_ids, cache)
    return cache


def fork(cache: GenericCache, num_tokens: int) -> GenericCache:
    forked = cache.fork(num_tokens)
    assert forked is not None
    return forked


def tensors(cache: GenericCache) -> list[Tensor]:
    """Return the keys and values of all layers that grow."""
    layers = [layer for layer in cache.layers.layers if isinstance(layer, DynamicLayer)]
    held = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    return [tensor for tensor in held if tensor is not None]


def addresses(cache: GenericCache) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors(cache)]


def assert_goes_on(
    model: PreTrainedModel, runner: GenericRunner, cache: GenericCache, read: Sequence[int]
) -> None:
    """Assert that the next logits are those of a model that has read all of it at once."""
    following = OTHER_IDS[:5]
    expected = without_cache(model, [*read, *following])
    assert distance(runner.extend(following, cache), expected) < TOLERANCE


# --- Keys and values of full attention -----------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 11, 20])
def test_a_fork_shares_the_tensors_of_its_parent(num_tokens: int) -> None:
    cache = filled(GenericRunner(family("Llama")), IDS[:20])

    forked = fork(cache, num_tokens)

    assert forked.num_tokens == num_tokens
    assert {tensor.shape[-2] for tensor in tensors(forked)} == {num_tokens}
    assert addresses(forked) == addresses(cache)


@pytest.mark.parametrize("num_tokens", [0, 1, 11, 19, 20])
def test_a_fork_goes_on_as_if_it_had_read_no_more_than_it_holds(num_tokens: int) -> None:
    model = family("Llama")
    runner = GenericRunner(model)

    forked = fork(filled(runner, IDS[:20]), num_tokens)

    assert_goes_on(model, runner, forked, IDS[:num_tokens])
    assert forked.num_tokens == num_tokens + 5


@pytest.mark.parametrize("num_tokens", [11, 20])
def test_a_fork_disturbs_neither_its_parent_nor_a_sibling(num_tokens: int) -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    cache = filled(runner, IDS[:20])
    sibling, forked = fork(cache, num_tokens), fork(cache, num_tokens)
    before = [tensor.clone() for tensor in tensors(cache)]

    runner.extend(OTHER_IDS, forked)

    assert all(map(torch.equal, tensors(cache), before))
    assert cache.num_tokens == 20
    assert_goes_on(model, runner, cache, IDS[:20])
    assert_goes_on(model, runner, sibling, IDS[:num_tokens])


@pytest.mark.parametrize("num_tokens", [11, 20])
def test_a_parent_that_goes_on_does_not_disturb_its_fork(num_tokens: int) -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    cache = filled(runner, IDS[:20])
    forked = fork(cache, num_tokens)

    runner.extend(OTHER_IDS, cache)

    assert forked.num_tokens == num_tokens
    assert_goes_on(model, runner, forked, IDS[:num_tokens])


def test_what_a_parent_held_earlier_can_be_forked_after_it_went_on() -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    cache = filled(runner, IDS[:20])
    for token_id in OTHER_IDS[:3]:
        runner.extend([token_id], cache)

    forked = fork(cache, 20)

    assert_goes_on(model, runner, forked, IDS[:20])


def test_a_fork_can_be_forked() -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    forked = fork(filled(runner, IDS[:20]), 15)
    runner.extend(OTHER_IDS[:4], forked)

    again = fork(forked, 17)

    assert addresses(again) == addresses(forked)
    assert_goes_on(model, runner, again, [*IDS[:15], *OTHER_IDS[:2]])


def test_an_empty_cache_can_be_forked() -> None:
    model = family("Llama")
    runner = GenericRunner(model)

    forked = fork(runner.new_cache(), 0)

    assert_goes_on(model, runner, forked, [])


# --- What cannot be cut back ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_state_that_has_seen_more_is_not_forked(name: str) -> None:
    runner = GenericRunner(family(name))
    cache = filled(runner, IDS[: WINDOW + 4])

    assert not cache.can_fork(WINDOW + 3)
    assert cache.fork(WINDOW + 3) is None
    assert cache.fork(0) is None


@pytest.mark.parametrize("num_tokens", [WINDOW - 3, WINDOW + 4])
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_whole_state_is_forked_and_then_lives_by_itself(name: str, num_tokens: int) -> None:
    model = family(name)
    runner = GenericRunner(model)
    cache = filled(runner, IDS[:num_tokens])
    assert cache.can_fork(num_tokens)
    forked, sibling = fork(cache, num_tokens), fork(cache, num_tokens)

    runner.extend(OTHER_IDS[:9], forked)
    runner.extend(IDS[num_tokens : num_tokens + 3], cache)

    assert_goes_on(model, runner, cache, IDS[: num_tokens + 3])
    assert_goes_on(model, runner, forked, [*IDS[:num_tokens], *OTHER_IDS[:9]])
    assert_goes_on(model, runner, sibling, IDS[:num_tokens])


@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text"])
def test_a_window_is_shared_by_reference_too(name: str) -> None:
    cache = filled(GenericRunner(family(name)), IDS[:20])

    assert addresses(fork(cache, 20)) == addresses(cache)


# --- Broken caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 11, 20])
def test_a_broken_cache_is_not_forked(num_tokens: int) -> None:
    """A pass that fails midway leaves some layers with more positions than others."""
    runner = GenericRunner(family("Llama"))
    cache = filled(runner, IDS[:20])
    with pytest.raises(IndexError):
        runner.extend([10_000], cache)

    assert not cache.can_fork(num_tokens)
    assert cache.fork(num_tokens) is None


def test_forks_outlive_a_parent_that_breaks() -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    cache = filled(runner, IDS[:20])
    forked = fork(cache, 20)

    with pytest.raises(IndexError):
        runner.extend([10_000], cache)

    assert not forked.is_broken
    assert_goes_on(model, runner, forked, IDS[:20])


# --- Going back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 11, 20])
def test_a_truncated_cache_goes_on_as_if_it_had_read_no_more(num_tokens: int) -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    cache = filled(runner, IDS[:20])
    forked = fork(cache, 20)
    assert cache.can_truncate

    cache.truncate(num_tokens)

    assert cache.num_tokens == num_tokens
    assert_goes_on(model, runner, cache, IDS[:num_tokens])
    assert_goes_on(model, runner, forked, IDS[:20])


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_state_that_has_seen_more_is_not_truncated(name: str) -> None:
    cache = filled(GenericRunner(family(name)), IDS[:20])

    assert not cache.can_truncate
    with pytest.raises(AssertionError):
        cache.truncate(19)

    assert cache.num_tokens == 20


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dropped_cache_is_as_good_as_new(name: str) -> None:
    model = family(name)
    runner = GenericRunner(model)
    cache = filled(runner, IDS[:20])

    cache.drop()

    assert (cache.num_tokens, cache.num_blocks) == (0, 0)
    assert_goes_on(model, runner, cache, [])


def test_only_dropping_mends_a_broken_cache() -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    cache = filled(runner, IDS[:20])
    with pytest.raises(IndexError):
        runner.extend([10_000], cache)

    cache.drop()

    assert not cache.is_broken
    assert_goes_on(model, runner, cache, [])


def test_a_cache_becomes_another_and_leaves_it_empty() -> None:
    model = family("Llama")
    pool = BlockPool(8)
    runner = GenericRunner(model, pool=pool)
    cache, other = filled(runner, OTHER_IDS[:9]), filled(runner, IDS[:20])

    cache.become(other)

    assert (cache.num_tokens, other.num_tokens) == (20, 0)
    assert pool.num_used == 2
    other.drop()
    assert_goes_on(model, runner, cache, IDS[:20])
    assert_goes_on(model, runner, other, [])


# --- Blocks --------------------------------------------------------------------------------------


def test_each_cache_counts_in_full_what_it_shares() -> None:
    pool = BlockPool(8)
    cache = filled(GenericRunner(family("Llama"), pool=pool), IDS[:20])
    assert (cache.num_blocks, cache.num_own_blocks, pool.num_used) == (2, 2, 2)

    forked = fork(cache, 11)

    assert (forked.num_blocks, forked.num_own_blocks, pool.num_used) == (1, 1, 3)
    assert [cache.needed(n) for n in (0, 12, 13)] == [0, 0, 1]
    assert [forked.needed(n) for n in (0, 5, 6)] == [0, 0, 1]
    del forked
    assert pool.num_used == 2


def test_a_fork_that_finds_no_blocks_leaves_its_parent_as_it_was() -> None:
    model = family("Llama")
    runner = GenericRunner(model, pool=BlockPool(3))
    cache = filled(runner, IDS[:20])

    with pytest.raises(OutOfBlocksError):
        cache.fork(20)

    assert_goes_on(model, runner, cache, IDS[:20])


def test_a_cache_that_finds_no_blocks_to_grow_is_as_it_was() -> None:
    pool = BlockPool(2)
    cache = filled(GenericRunner(family("Llama"), pool=pool), IDS[:20])

    with pytest.raises(OutOfBlocksError):
        cache.grow(2 * BLOCK_SIZE)

    assert (cache.num_tokens, cache.num_blocks, cache.is_broken) == (20, 2, False)


# --- Blocks beside those of positions ------------------------------------------------------------


def with_state(num_blocks: int, num_state_blocks: int = 3) -> tuple[BlockPool, GenericRunner]:
    pool, handling = BlockPool(num_blocks), Handling(num_state_blocks=num_state_blocks)
    return pool, GenericRunner(family("Mamba2"), pool=pool, handling=handling)


def test_what_does_not_grow_is_held_from_the_first_position_on() -> None:
    pool, runner = with_state(10)
    cache = runner.new_cache()
    assert (cache.num_blocks, pool.num_used) == (0, 0)
    assert [cache.needed(n) for n in (0, 1, 16, 17)] == [0, 4, 4, 5]

    runner.extend(IDS[:1], cache)

    assert (cache.num_blocks, cache.num_own_blocks, pool.num_used) == (4, 4, 4)
    assert [cache.needed(n) for n in (0, 15, 16)] == [0, 0, 1]
    cache.drop()
    assert (cache.num_blocks, pool.num_used, cache.needed(1)) == (0, 0, 4)


def test_a_cache_whose_state_finds_no_blocks_is_as_it_was() -> None:
    pool, runner = with_state(3)
    cache = runner.new_cache()

    with pytest.raises(OutOfBlocksError):
        runner.extend(IDS[:1], cache)

    assert (cache.num_blocks, pool.num_used, cache.is_broken) == (0, 0, False)


def test_a_fork_has_a_state_of_its_own() -> None:
    pool, runner = with_state(11)
    cache = filled(runner, IDS[:20])

    forked = fork(cache, 20)

    assert (forked.num_blocks, pool.num_used) == (5, 10)
    with pytest.raises(OutOfBlocksError):
        forked.fork(20)
    assert pool.num_used == 10
    assert fork(runner.new_cache(), 0).num_blocks == 0


def test_a_state_is_swapped_out_and_comes_back(store: SwapStore) -> None:
    pool, runner = with_state(5)
    cache = filled(runner, IDS[:20])

    cache.swap_out(store)

    assert (cache.num_blocks, pool.num_used, store.num_blocks) == (0, 0, 5)
    assert [cache.needed(n) for n in (0, 12, 13)] == [5, 5, 6]
    others = pool.allocate(1)
    with pytest.raises(OutOfBlocksError):
        cache.swap_in()
    assert pool.num_used == 1
    pool.release(others)
    cache.swap_in()
    assert (cache.num_blocks, pool.num_used) == (5, 5)
    assert_goes_on(family("Mamba2"), runner, cache, IDS[:20])


# --- Swapping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [WINDOW - 3, WINDOW + 9])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_comes_back_as_it_was(name: str, num_tokens: int, store: SwapStore) -> None:
    model = family(name)
    pool = BlockPool(8)
    runner = GenericRunner(model, pool=pool)
    cache = filled(runner, IDS[:num_tokens])
    unmoved = fork(cache, num_tokens)
    num_blocks, num_used = cache.num_blocks, pool.num_used

    cache.swap_out(store)

    assert cache.is_swapped
    assert (cache.num_tokens, cache.num_blocks) == (num_tokens, 0)
    assert cache.needed(0) == num_blocks
    assert pool.num_used == num_used - num_blocks
    assert store.num_blocks == num_blocks

    cache.swap_in()

    assert not cache.is_swapped
    assert (pool.num_used, store.num_bytes) == (num_used, 0)
    expected = runner.extend(OTHER_IDS[:5], unmoved)
    assert torch.equal(runner.extend(OTHER_IDS[:5], cache), expected)
    assert distance(expected, without_cache(model, [*IDS[:num_tokens], *OTHER_IDS[:5]])) < TOLERANCE


def test_a_swapped_cache_keeps_no_tensor(store: SwapStore) -> None:
    cache = filled(GenericRunner(family("Llama")), IDS[:20])
    assert tensors(cache)

    cache.swap_out(store)

    assert tensors(cache) == []


def test_an_empty_cache_can_be_swapped_too(store: SwapStore) -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    cache = runner.new_cache()

    cache.swap_out(store)
    cache.swap_in()

    assert_goes_on(model, runner, cache, [])


@pytest.mark.parametrize("num_tokens", [11, 20])
def test_what_a_fork_has_cut_off_is_not_written(num_tokens: int, store: SwapStore) -> None:
    runner = GenericRunner(family("Llama"))
    forked = fork(filled(runner, IDS[:20]), num_tokens)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors(forked))

    forked.swap_out(store)

    assert held < store.num_bytes < held + 100


def test_a_swapped_cache_says_what_can_be_forked(store: SwapStore) -> None:
    cache = filled(GenericRunner(family("Llama")), IDS[:20])

    cache.swap_out(store)

    assert cache.can_fork(11)
    with pytest.raises(AssertionError):
        cache.fork(11)


def test_a_cache_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    cache = filled(runner, IDS[:20])
    store = SwapStore(tmp_path, capacity_bytes=100)

    with pytest.raises(SwapError):
        cache.swap_out(store)

    assert not cache.is_swapped
    assert_goes_on(model, runner, cache, IDS[:20])
    store.close()


def test_a_cache_that_finds_no_blocks_stays_swapped_out(store: SwapStore) -> None:
    model = family("Llama")
    pool = BlockPool(2)
    runner = GenericRunner(model, pool=pool)
    cache = filled(runner, IDS[:20])
    cache.swap_out(store)
    others = pool.allocate(1)

    with pytest.raises(OutOfBlocksError):
        cache.swap_in()

    assert cache.is_swapped
    pool.release(others)
    cache.swap_in()
    assert_goes_on(model, runner, cache, IDS[:20])


def test_a_cache_whose_file_is_damaged_can_only_be_dropped(store: SwapStore) -> None:
    model = family("Llama")
    pool = BlockPool(4)
    runner = GenericRunner(model, pool=pool)
    cache = filled(runner, IDS[:20])
    cache.swap_out(store)
    file = store.directory / "0"
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(SwapError):
        cache.swap_in()

    assert (cache.is_swapped, cache.num_tokens, pool.num_used) == (True, 20, 0)
    cache.drop()
    assert (cache.is_swapped, cache.num_tokens, store.num_blocks) == (False, 0, 0)
    wait_until_empty(store)
    assert_goes_on(model, runner, cache, [])


def test_a_swapped_cache_that_nobody_needs_takes_its_file_along(store: SwapStore) -> None:
    cache = filled(GenericRunner(family("Llama")), IDS[:20])
    cache.swap_out(store)

    del cache

    assert store.num_blocks == 0


def test_a_cache_can_become_one_that_is_swapped_out(store: SwapStore) -> None:
    model = family("Llama")
    runner = GenericRunner(model)
    cache, other = filled(runner, OTHER_IDS[:9]), filled(runner, IDS[:20])
    other.swap_out(store)

    cache.become(other)

    assert cache.is_swapped
    cache.swap_in()
    assert_goes_on(model, runner, cache, IDS[:20])
