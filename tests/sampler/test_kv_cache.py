"""Forks are checked against one forward pass of the same model without any cache."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from sampler.kv_cache import KVCache
from sampler.model_runner import ModelRunner
from tests.sampler.families import (
    FAMILIES,
    IDS,
    TOLERANCE,
    WINDOW,
    distance,
    family,
    without_cache,
)

OTHER_IDS = IDS[::-1]


def filled(runner: ModelRunner, token_ids: Sequence[int]) -> KVCache:
    cache = runner.new_cache()
    runner.extend(token_ids, cache)
    return cache


def fork(cache: KVCache, num_tokens: int) -> KVCache:
    forked = cache.fork(num_tokens)
    assert forked is not None
    return forked


def tensors(cache: KVCache) -> list[Tensor]:
    """Return the keys and values of all layers that grow."""
    layers = [layer for layer in cache.layers.layers if isinstance(layer, DynamicLayer)]
    held = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    return [tensor for tensor in held if tensor is not None]


def addresses(cache: KVCache) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors(cache)]


def assert_goes_on(
    model: PreTrainedModel, runner: ModelRunner, cache: KVCache, read: Sequence[int]
) -> None:
    """Assert that the next logits are those of a model that has read all of it at once."""
    following = OTHER_IDS[:5]
    expected = without_cache(model, [*read, *following])
    assert distance(runner.extend(following, cache), expected) < TOLERANCE


# --- Keys and values of full attention -----------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 11, 20])
def test_a_fork_shares_the_tensors_of_its_parent(num_tokens: int) -> None:
    cache = filled(ModelRunner(family("Llama")), IDS[:20])

    forked = fork(cache, num_tokens)

    assert forked.num_tokens == num_tokens
    assert {tensor.shape[-2] for tensor in tensors(forked)} == {num_tokens}
    assert addresses(forked) == addresses(cache)


@pytest.mark.parametrize("num_tokens", [0, 1, 11, 19, 20])
def test_a_fork_goes_on_as_if_it_had_read_no_more_than_it_holds(num_tokens: int) -> None:
    model = family("Llama")
    runner = ModelRunner(model)

    forked = fork(filled(runner, IDS[:20]), num_tokens)

    assert_goes_on(model, runner, forked, IDS[:num_tokens])
    assert forked.num_tokens == num_tokens + 5


@pytest.mark.parametrize("num_tokens", [11, 20])
def test_a_fork_disturbs_neither_its_parent_nor_a_sibling(num_tokens: int) -> None:
    model = family("Llama")
    runner = ModelRunner(model)
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
    runner = ModelRunner(model)
    cache = filled(runner, IDS[:20])
    forked = fork(cache, num_tokens)

    runner.extend(OTHER_IDS, cache)

    assert forked.num_tokens == num_tokens
    assert_goes_on(model, runner, forked, IDS[:num_tokens])


def test_what_a_parent_held_earlier_can_be_forked_after_it_went_on() -> None:
    model = family("Llama")
    runner = ModelRunner(model)
    cache = filled(runner, IDS[:20])
    for token_id in OTHER_IDS[:3]:
        runner.extend([token_id], cache)

    forked = fork(cache, 20)

    assert_goes_on(model, runner, forked, IDS[:20])


def test_a_fork_can_be_forked() -> None:
    model = family("Llama")
    runner = ModelRunner(model)
    forked = fork(filled(runner, IDS[:20]), 15)
    runner.extend(OTHER_IDS[:4], forked)

    again = fork(forked, 17)

    assert addresses(again) == addresses(forked)
    assert_goes_on(model, runner, again, [*IDS[:15], *OTHER_IDS[:2]])


def test_an_empty_cache_can_be_forked() -> None:
    model = family("Llama")
    runner = ModelRunner(model)

    forked = fork(runner.new_cache(), 0)

    assert_goes_on(model, runner, forked, [])


# --- What cannot be cut back ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Llama"])
def test_a_state_that_has_seen_more_is_not_forked(name: str) -> None:
    runner = ModelRunner(family(name))
    cache = filled(runner, IDS[: WINDOW + 4])

    assert not cache.can_fork(WINDOW + 3)
    assert cache.fork(WINDOW + 3) is None
    assert cache.fork(0) is None


@pytest.mark.parametrize("num_tokens", [WINDOW - 3, WINDOW + 4])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Llama"])
def test_a_whole_state_is_forked_and_then_lives_by_itself(name: str, num_tokens: int) -> None:
    model = family(name)
    runner = ModelRunner(model)
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
    cache = filled(ModelRunner(family(name)), IDS[:20])

    assert addresses(fork(cache, 20)) == addresses(cache)


# --- Broken caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 11, 20])
def test_a_broken_cache_is_not_forked(num_tokens: int) -> None:
    """A pass that fails midway leaves some layers with more positions than others."""
    runner = ModelRunner(family("Llama"))
    cache = filled(runner, IDS[:20])
    with pytest.raises(IndexError):
        runner.extend([10_000], cache)

    assert not cache.can_fork(num_tokens)
    assert cache.fork(num_tokens) is None


def test_forks_outlive_a_parent_that_breaks() -> None:
    model = family("Llama")
    runner = ModelRunner(model)
    cache = filled(runner, IDS[:20])
    forked = fork(cache, 20)

    with pytest.raises(IndexError):
        runner.extend([10_000], cache)

    assert not forked.is_broken
    assert_goes_on(model, runner, forked, IDS[:20])
