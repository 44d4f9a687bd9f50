"""The runner is checked against one forward pass of the same model without any cache."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, cache_utils

from sampler.kv_cache import KVCache
from sampler.model_runner import ModelRunner
from tests.sampler.families import (
    DIMENSIONS,
    FAMILIES,
    IDS,
    TOLERANCE,
    UNFIT_FAMILIES,
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


def extend_in_pieces(runner: ModelRunner, cache: KVCache, cuts: Sequence[int]) -> Tensor:
    edges = [0, *cuts, len(IDS)]
    pieces = [IDS[start:stop] for start, stop in itertools.pairwise(edges)]
    return [runner.extend(piece, cache) for piece in pieces][-1]


# --- One run at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_extending_in_pieces_equals_one_pass_without_a_cache(cuts: list[int]) -> None:
    model = tiny_llama()
    runner = ModelRunner(model)
    cache = runner.new_cache()

    logits = extend_in_pieces(runner, cache, cuts)

    assert distance(logits, without_cache(model, IDS)) < TOLERANCE


def test_logits_are_one_row_of_float32_over_the_vocabulary() -> None:
    model = torch.nn.Module.to(tiny_llama(), torch.bfloat16)
    runner = ModelRunner(model)

    logits = runner.extend(IDS, runner.new_cache())

    assert logits.shape == (runner.vocab_size,) == (64,)
    assert logits.dtype == torch.float32
    assert runner.dtype == torch.bfloat16
    assert logits.device == runner.device == torch.device("cpu")


def test_the_cache_counts_the_positions_it_holds() -> None:
    runner = ModelRunner(tiny_llama())
    cache = runner.new_cache()
    held = [cache.num_tokens]

    for piece in (IDS[:7], IDS[7:8], IDS[8:20]):
        runner.extend(piece, cache)
        held.append(cache.num_tokens)

    assert held == [0, 7, 8, 20]
    assert cache.layers.get_seq_length() == 20


def test_counters_count_positions_and_passes() -> None:
    runner = ModelRunner(tiny_llama())
    one, other = runner.new_cache(), runner.new_cache()

    runner.extend(IDS[:7], one)
    runner.extend(IDS[:5], other)
    runner.extend(IDS[7:8], one)

    assert runner.counters.tokens_forwarded == 13
    assert runner.counters.forward_passes == 3


def test_caches_do_not_know_of_each_other() -> None:
    model = tiny_llama()
    runner = ModelRunner(model)
    one, other = runner.new_cache(), runner.new_cache()

    for token_id, other_id in zip(IDS[:10], IDS[20:30], strict=True):
        runner.extend([token_id], one)
        runner.extend([other_id], other)
    logits, other_logits = runner.extend(IDS[10:], one), runner.extend(IDS[30:], other)

    assert distance(logits, without_cache(model, IDS)) < TOLERANCE
    assert distance(other_logits, without_cache(model, IDS[20:])) < TOLERANCE


def test_nothing_is_tracked_for_gradients() -> None:
    runner = ModelRunner(tiny_llama())

    assert not runner.extend(IDS, runner.new_cache()).requires_grad


def test_the_context_is_what_the_config_says() -> None:
    assert ModelRunner(tiny_llama()).max_context == 128


def test_a_pass_that_fails_is_not_counted() -> None:
    runner = ModelRunner(tiny_llama())
    cache = runner.new_cache()

    with pytest.raises(IndexError):
        runner.extend([10_000], cache)

    assert cache.num_tokens == 0
    assert runner.counters.tokens_forwarded == 0
    assert runner.counters.forward_passes == 0


def test_a_cache_on_which_a_pass_has_failed_is_broken() -> None:
    runner = ModelRunner(tiny_llama())
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
    runner = ModelRunner(model)
    cache = runner.new_cache()

    runner.extend(IDS[:7], cache)
    runner.extend(IDS[7:9], cache)

    second = model.calls[1]
    assert "past_key_values" not in second  # deprecated in transformers 5.20
    assert second["cache"] is cache.layers
    assert second["input_ids"].tolist() == [IDS[7:9]]
    assert second["position_ids"].tolist() == [[7, 8]]


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
    runner = ModelRunner(model)
    expected = without_cache(model, IDS)

    got = {how: extend_in_pieces(runner, runner.new_cache(), cuts) for how, cuts in CUTS.items()}

    assert {how: distance(logits, expected) for how, logits in got.items()} == pytest.approx(
        dict.fromkeys(CUTS, 0.0), abs=TOLERANCE
    )
    # Had the cache lost the tokens of a few positions ago, it would show.
    assert distance(without_cache(model, [*IDS[:30], *IDS[:5], *IDS[35:]]), expected) > 1e-2


KINDS = [(name, options, True) for name, options in FAMILIES.items()] + [
    (name, options, False) for name, options in UNFIT_FAMILIES.items()
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "fits"), KINDS, ids=[kind[0] for kind in KINDS])
def test_a_model_that_does_not_go_on_where_its_cache_ends_is_known(
    name: str, options: dict[str, Any], fits: bool
) -> None:
    assert ModelRunner(family(name, options)).continues_from_its_cache() is fits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text"])
def test_a_sliding_window_cache_holds_no_more_than_its_window(name: str) -> None:
    runner = ModelRunner(family(name, FAMILIES[name]))
    cache = runner.new_cache()

    extend_in_pieces(runner, cache, CUTS["as a run does"])

    assert cache.num_tokens == len(IDS)
    sliding = cache.layers.layers[0]
    assert isinstance(sliding, cache_utils.DynamicSlidingWindowLayer)
    assert sliding.keys is not None
    assert sliding.keys.shape[-2] < WINDOW
