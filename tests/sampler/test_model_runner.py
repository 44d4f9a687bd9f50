"""The runner is checked against one forward pass of the same model without any cache."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, cache_utils

from sampler.cache_pool import BLOCK_SIZE, BlockPool, OutOfBlocksError
from sampler.kv_cache import GenericCache
from sampler.load_check import check_model
from sampler.model_runner import GenericRunner, Handling, Piece, groups_of_like_length
from tests.sampler.families import (
    DIMENSIONS,
    FAMILIES,
    IDS,
    POSITIONS,
    TOLERANCE,
    WINDOW,
    distance,
    family,
    tiny_llama,
    without_cache,
)

# Pieces as a run makes them: a prompt in chunks, single tokens, a pending token and its suffix.
# They lie before the end of a window, across it, and beyond it.
CUTS = {
    "in two": [20],
    "as a run does": [6, 12, 13, 14, 15, 16, 30, 31, 32],
    "one by one": list(range(1, 40)),
}


def extend_in_pieces(runner: GenericRunner, cache: GenericCache, cuts: Sequence[int]) -> Tensor:
    edges = [0, *cuts, len(IDS)]
    pieces = [IDS[start:stop] for start, stop in itertools.pairwise(edges)]
    return [runner.extend(piece, cache) for piece in pieces][-1]


# --- One run at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_extending_in_pieces_equals_one_pass_without_a_cache(cuts: list[int]) -> None:
    model = tiny_llama()
    runner = GenericRunner(model)
    cache = runner.new_cache()

    logits = extend_in_pieces(runner, cache, cuts)

    assert distance(logits, without_cache(model, IDS)) < TOLERANCE


def test_logits_are_one_row_of_float32_over_the_vocabulary() -> None:
    model = torch.nn.Module.to(tiny_llama(), torch.bfloat16)
    runner = GenericRunner(model)

    logits = runner.extend(IDS, runner.new_cache())

    assert logits.shape == (runner.vocab_size,) == (64,)
    assert logits.dtype == torch.float32
    assert runner.dtype == torch.bfloat16
    assert logits.device == runner.device == torch.device("cpu")


def test_the_cache_counts_the_positions_it_holds() -> None:
    runner = GenericRunner(tiny_llama())
    cache = runner.new_cache()
    held = [cache.num_tokens]

    for piece in (IDS[:7], IDS[7:8], IDS[8:20]):
        runner.extend(piece, cache)
        held.append(cache.num_tokens)

    assert held == [0, 7, 8, 20]
    assert cache.layers.get_seq_length() == 20


def test_counters_count_positions_and_passes() -> None:
    runner = GenericRunner(tiny_llama())
    one, other = runner.new_cache(), runner.new_cache()

    runner.extend(IDS[:7], one)
    runner.extend(IDS[:5], other)
    runner.extend(IDS[7:8], one)

    assert runner.counters.tokens_forwarded == 13
    assert runner.counters.forward_passes == 3


def test_caches_do_not_know_of_each_other() -> None:
    model = tiny_llama()
    runner = GenericRunner(model)
    one, other = runner.new_cache(), runner.new_cache()

    for token_id, other_id in zip(IDS[:10], IDS[20:30], strict=True):
        runner.extend([token_id], one)
        runner.extend([other_id], other)
    logits, other_logits = runner.extend(IDS[10:], one), runner.extend(IDS[30:], other)

    assert distance(logits, without_cache(model, IDS)) < TOLERANCE
    assert distance(other_logits, without_cache(model, IDS[20:])) < TOLERANCE


def test_nothing_is_tracked_for_gradients() -> None:
    runner = GenericRunner(tiny_llama())

    assert not runner.extend(IDS, runner.new_cache()).requires_grad


def test_the_context_is_what_the_config_says() -> None:
    assert GenericRunner(tiny_llama()).max_context == 128


def test_the_context_is_no_more_than_what_the_pool_holds_beside_the_state() -> None:
    handling = Handling(num_state_blocks=3)
    runner = GenericRunner(family("Mamba2"), pool=BlockPool(10), handling=handling)

    assert runner.max_context == 7 * BLOCK_SIZE
    runner.extend((IDS * 3)[: 7 * BLOCK_SIZE], cache := runner.new_cache())
    with pytest.raises(OutOfBlocksError):
        runner.extend([9], cache)


def test_a_pass_that_fails_is_not_counted() -> None:
    runner = GenericRunner(tiny_llama())
    cache = runner.new_cache()

    with pytest.raises(IndexError):
        runner.extend([10_000], cache)

    assert cache.num_tokens == 0
    assert runner.counters.tokens_forwarded == 0
    assert runner.counters.forward_passes == 0


def test_a_cache_on_which_a_pass_has_failed_is_broken() -> None:
    runner = GenericRunner(tiny_llama())
    whole, broken = runner.new_cache(), runner.new_cache()
    runner.extend(IDS[:7], whole)

    with pytest.raises(IndexError):
        runner.extend([10_000], broken)

    assert not whole.is_broken
    assert broken.is_broken


class WatchedLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Notes with what it is called."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.calls: list[dict[str, Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert not args
        self.calls.append(kwargs)
        return super().forward(**kwargs)


def test_the_model_is_given_new_tokens_their_positions_and_the_cache_by_its_present_name() -> None:
    model = WatchedLlama(LlamaConfig(**DIMENSIONS))
    runner = GenericRunner(model)
    cache = runner.new_cache()

    runner.extend(IDS[:7], cache)
    runner.extend(IDS[7:9], cache)

    second = model.calls[1]
    assert "past_key_values" not in second  # deprecated in transformers 5.20
    assert second["cache"] is cache.layers
    assert second["input_ids"].tolist() == [IDS[7:9]]
    assert second["position_ids"].tolist() == [[7, 8]]


def test_a_model_that_counts_positions_itself_is_told_none() -> None:
    model = WatchedLlama(LlamaConfig(**DIMENSIONS))
    runner = GenericRunner(model, handling=Handling(takes_positions=False))
    caches = filled(runner, PROMPTS[:2])

    runner.forward([Piece([9], cache) for cache in caches])

    assert len(model.calls) == 3
    assert all("position_ids" not in call for call in model.calls)


# --- Families ------------------------------------------------------------------------------------


@pytest.fixture
def _no_crop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make cropping an error: sliding windows and recurrent states cannot be cropped."""

    def crop(*args: object) -> None:
        raise AssertionError("a cache was cropped")

    for kind in vars(cache_utils).values():
        if isinstance(kind, type) and "crop" in vars(kind):
            monkeypatch.setattr(kind, "crop", crop)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_crop")
@pytest.mark.parametrize(("name", "options"), FAMILIES.items(), ids=FAMILIES.keys())
def test_every_kind_of_cache_is_extended_in_pieces(name: str, options: dict[str, Any]) -> None:
    model = family(name, options)
    runner = GenericRunner(model)
    expected = without_cache(model, IDS)

    got = {how: extend_in_pieces(runner, runner.new_cache(), cuts) for how, cuts in CUTS.items()}

    assert {how: distance(logits, expected) for how, logits in got.items()} == pytest.approx(
        dict.fromkeys(CUTS, 0.0), abs=TOLERANCE
    )
    # Had the cache lost the tokens of a few positions ago, it would show.
    assert distance(without_cache(model, [*IDS[:30], *IDS[:5], *IDS[35:]]), expected) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), POSITIONS.items(), ids=POSITIONS.keys())
def test_positions_are_those_of_the_model(name: str, options: dict[str, Any]) -> None:
    model = family(name, options)
    runner = GenericRunner(model, handling=check_model(model).handling)
    expected = without_cache(model, IDS)

    for cuts in CUTS.values():
        logits = extend_in_pieces(runner, runner.new_cache(), cuts)
        assert distance(logits, expected) < TOLERANCE
    check_rows(model, runner)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text"])
def test_a_sliding_window_cache_holds_no_more_than_its_window(name: str) -> None:
    runner = GenericRunner(family(name, FAMILIES[name]))
    cache = runner.new_cache()

    extend_in_pieces(runner, cache, CUTS["as a run does"])

    assert cache.num_tokens == len(IDS)
    sliding = cache.layers.layers[0]
    assert isinstance(sliding, cache_utils.DynamicSlidingWindowLayer)
    assert sliding.keys is not None
    assert sliding.keys.shape[-2] < WINDOW


# --- Many runs at once ---------------------------------------------------------------------------

# What several sequences hold before they share a step: less than a window, and more.
PROMPTS = [IDS[:5], IDS[3:12], IDS[:13], IDS[7:8], IDS[20:28]]
PLAIN = {
    "Llama": {},
    "Qwen2": {},
    "Gemma": {"head_dim": 8},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": {"n_layer": 2, "n_head": 4},
}


def filled(runner: GenericRunner, prompts: Sequence[list[int]]) -> list[GenericCache]:
    caches = [runner.new_cache() for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        runner.extend(prompt, cache)
    return caches


def check_rows(model: PreTrainedModel, runner: GenericRunner) -> None:
    """Decode three tokens of each prompt at once, and compare each with a pass of its own."""
    caches = filled(runner, PROMPTS)
    read = [list(prompt) for prompt in PROMPTS]
    for step in range(3):
        token_ids = [9 + 5 * row + step for row in range(len(PROMPTS))]
        rows = runner.forward(
            [Piece([token_id], cache) for token_id, cache in zip(token_ids, caches, strict=True)]
        )
        for token_id, ids in zip(token_ids, read, strict=True):
            ids.append(token_id)
        expected = [without_cache(model, ids) for ids in read]

        assert [cache.num_tokens for cache in caches] == [len(ids) for ids in read]
        for row, logits in zip(rows, expected, strict=True):
            assert row is not None
            assert distance(row, logits) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), PLAIN.items(), ids=PLAIN.keys())
def test_rows_that_share_a_pass_are_as_if_alone(name: str, options: dict[str, Any]) -> None:
    model = family(name, options)
    runner = GenericRunner(model)

    check_rows(model, runner)

    assert runner.counters.forward_passes == len(PROMPTS) + 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), FAMILIES.items(), ids=FAMILIES.keys())
def test_rows_on_caches_of_every_kind_are_as_if_alone(name: str, options: dict[str, Any]) -> None:
    model = family(name, options)

    check_rows(model, GenericRunner(model))


def num_passes(runner: GenericRunner, prompts: Sequence[list[int]]) -> int:
    """Return how many passes one token of each of ``prompts`` takes."""
    caches = filled(runner, prompts)
    before = runner.counters.forward_passes
    runner.forward([Piece([9], cache) for cache in caches])
    return runner.counters.forward_passes - before


def test_single_tokens_share_a_pass() -> None:
    runner = GenericRunner(tiny_llama())

    assert num_passes(runner, PROMPTS) == 1
    assert runner.counters.tokens_forwarded == sum(map(len, PROMPTS)) + len(PROMPTS)


def test_rows_of_a_model_that_cannot_tell_them_apart_get_a_pass_of_their_own() -> None:
    runner = GenericRunner(tiny_llama(), handling=Handling(shares_passes=False))

    assert num_passes(runner, PROMPTS) == len(PROMPTS)


def test_an_exact_runner_gives_each_row_a_pass_of_its_own() -> None:
    assert num_passes(GenericRunner(tiny_llama(), is_exact=True), PROMPTS) == len(PROMPTS)


@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text", "Qwen3_5Text"])
@pytest.mark.slow
def test_rows_on_other_caches_get_a_pass_of_their_own(name: str) -> None:
    assert num_passes(GenericRunner(family(name)), PROMPTS) == len(PROMPTS)


def test_rows_of_a_model_whose_frequencies_depend_on_length_get_a_pass_of_their_own() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    runner = GenericRunner(family("Llama", {"rope_parameters": rope}))

    assert num_passes(runner, PROMPTS) == len(PROMPTS)


def test_caches_that_take_longer_to_copy_than_the_weights_to_read_share_no_pass() -> None:
    runner = GenericRunner(tiny_llama())

    assert num_passes(runner, [(IDS * 3)[:120]] * 3) == 3


def test_everything_goes_by_way_of_an_extend_of_ones_own() -> None:
    class Watched(GenericRunner):
        def extend(self, token_ids: Sequence[int], cache: GenericCache) -> Tensor:
            extended.append(list(token_ids))
            return super().extend(token_ids, cache)

    extended: list[list[int]] = []
    runner = Watched(tiny_llama())
    caches = filled(runner, PROMPTS[:2])
    extended.clear()

    runner.forward([Piece([9], caches[0]), Piece([10], caches[1])])

    assert extended == [[9], [10]]


def test_a_chunk_and_rows_go_together_in_one_step() -> None:
    model = tiny_llama()
    runner = GenericRunner(model)
    one, other = filled(runner, PROMPTS[:2])
    new = runner.new_cache()

    rows = runner.forward(
        [Piece([9], one), Piece(IDS[:12], new), Piece([10], other), Piece([8], runner.new_cache())]
    )

    expected = [[*PROMPTS[0], 9], IDS[:12], [*PROMPTS[1], 10], [8]]
    for row, ids in zip(rows, expected, strict=True):
        assert row is not None
        assert distance(row, without_cache(model, ids)) < TOLERANCE


def test_logits_that_are_not_wanted_are_not_returned() -> None:
    runner = GenericRunner(tiny_llama())
    caches = filled(runner, PROMPTS)

    rows = runner.forward([Piece([9], cache, index != 1) for index, cache in enumerate(caches)])

    assert [row is None for row in rows] == [False, True, False, False, False]


def test_a_step_without_pieces_does_nothing() -> None:
    runner = GenericRunner(tiny_llama())

    assert runner.forward([]) == []
    assert runner.counters.forward_passes == 0


def test_a_row_keeps_nothing_of_those_it_shared_a_pass_with() -> None:
    runner = GenericRunner(tiny_llama())
    caches = filled(runner, PROMPTS)

    runner.forward([Piece([9], cache) for cache in caches])

    for cache in caches:
        for layer in cache.layers.layers:
            assert isinstance(layer, cache_utils.DynamicLayer)
            for tensor in (layer.keys, layer.values):
                assert tensor is not None
                assert tensor.shape == (1, 2, cache.num_tokens, 8)
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_fork_sees_nothing_of_the_rows_that_its_parent_goes_on_with() -> None:
    model = tiny_llama()
    runner = GenericRunner(model)
    caches = filled(runner, PROMPTS[:2])
    fork = caches[0].fork(4)
    assert fork is not None

    runner.forward([Piece([9], cache) for cache in caches])
    logits = runner.extend([11], fork)

    assert distance(logits, without_cache(model, [*PROMPTS[0][:4], 11])) < TOLERANCE


def test_caches_whose_shared_pass_fails_are_as_they_were() -> None:
    model = tiny_llama()
    runner = GenericRunner(model)
    one, other = filled(runner, PROMPTS[:2])

    with pytest.raises(IndexError):
        runner.forward([Piece([9], one), Piece([10_000], other)])
    rows = runner.forward([Piece([9], one), Piece([10], other)])

    assert not one.is_broken
    assert not other.is_broken
    for row, ids in zip(rows, [[*PROMPTS[0], 9], [*PROMPTS[1], 10]], strict=True):
        assert row is not None
        assert distance(row, without_cache(model, ids)) < TOLERANCE


@pytest.mark.parametrize("is_exact", [False, True])
def test_without_room_in_the_pool_nothing_is_forwarded(is_exact: bool) -> None:
    pool = BlockPool(3)
    runner = GenericRunner(tiny_llama(), pool=pool, is_exact=is_exact)
    one, other = filled(runner, [IDS[:BLOCK_SIZE], IDS[:BLOCK_SIZE]])
    runner.extend([9], one)

    with pytest.raises(OutOfBlocksError):
        runner.forward([Piece([9], other), Piece([9], one)])

    assert (one.num_tokens, other.num_tokens) == (BLOCK_SIZE + 1, BLOCK_SIZE)
    assert not one.is_broken
    assert not other.is_broken
    pool.check()


def test_positions_count_as_blocks_of_the_pool() -> None:
    pool = BlockPool(10)
    runner = GenericRunner(tiny_llama(), pool=pool)
    one, other = filled(runner, [IDS[:BLOCK_SIZE], IDS[: BLOCK_SIZE + 1]])
    used = [pool.num_used]

    runner.forward([Piece([9], one), Piece([9], other)])
    used.append(pool.num_used)
    one.drop()
    used.append(pool.num_used)

    assert used == [3, 4, 2]


# --- Padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[], [1], [7, 7, 7], [1, 30_000, 2, 500, 600, 20_000], [64, 0]])
def test_groups_of_like_length_hold_each_once_and_little_padding(lengths: list[int]) -> None:
    groups = groups_of_like_length(lengths)

    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        padding = sum(longest - lengths[index] for index in group)
        assert padding <= sum(lengths[index] + 64 for index in group)


def test_short_contexts_do_not_share_a_pass_with_a_long_one() -> None:
    runner = GenericRunner(tiny_llama())
    caches = filled(runner, [IDS[:4], IDS[4:12], (IDS * 3)[:100]])
    before = runner.counters.forward_passes

    runner.forward([Piece([9], cache) for cache in caches])

    assert runner.counters.forward_passes - before == 2
