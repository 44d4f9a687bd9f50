"""What is found out about a model's own class is checked against what is known of families."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sampler.cache_pool import BLOCK_SIZE, blocks_for
from sampler.load_check import UnfitModelError, check_model
from sampler.model_runner import GenericRunner, Handling
from tests.sampler.families import (
    DIMENSIONS,
    FAMILIES,
    IDS,
    MINIMAX,
    POSITIONS,
    UNFIT_FAMILIES,
    family,
    tiny_llama,
)

PLAIN_BYTES = 2 * 2 * 2 * 8 * 4
"""Of a position: keys and values of two layers with two heads of 8 numbers."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), FAMILIES.items(), ids=FAMILIES.keys())
def test_most_models_are_told_positions(name: str, options: dict[str, Any]) -> None:
    assert check_model(family(name, options)).handling.takes_positions


def test_a_plain_model_shares_passes_and_takes_nothing_but_its_positions() -> None:
    found = check_model(tiny_llama())

    assert found.handling == Handling()
    assert found.block_bytes == BLOCK_SIZE * PLAIN_BYTES


@pytest.mark.parametrize(("name", "options"), POSITIONS.items(), ids=POSITIONS.keys())
def test_a_model_with_positions_of_its_own_shares_no_pass(
    name: str, options: dict[str, Any]
) -> None:
    handling = check_model(family(name, options)).handling

    assert handling.takes_positions is (name != "Roberta")
    assert not handling.shares_passes


def test_it_holds_in_half_precision_too() -> None:
    model = torch.nn.Module.to(family("Roberta", POSITIONS["Roberta"]), torch.bfloat16)

    assert not check_model(model).handling.takes_positions


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), UNFIT_FAMILIES.items(), ids=UNFIT_FAMILIES.keys())
def test_a_model_that_does_not_go_on_where_its_cache_ends_is_unfit(
    name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UnfitModelError, match="does not go on where its cache ends"):
        check_model(family(name, options))


class ForgetfulLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Forgets what came before wherever it is given a single token."""

    def forward(self, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[-1] == 1:
            kwargs["cache"] = None
        return super().forward(**kwargs)


def test_single_tokens_are_tried_too() -> None:
    model = family("Llama")
    forgetful = ForgetfulLlama(LlamaConfig(**DIMENSIONS))
    forgetful.load_state_dict(model.state_dict())

    with pytest.raises(UnfitModelError, match="does not go on where its cache ends"):
        check_model(forgetful)


def test_a_model_that_reads_both_ways_is_unfit() -> None:
    with pytest.raises(UnfitModelError, match="does not go on where its cache ends"):
        check_model(family("Bert", {"is_decoder": False}))


def test_a_model_that_wants_a_cache_of_its_own_is_unfit() -> None:
    with pytest.raises(UnfitModelError, match="fails on a cache: MiniMax uses cache of its own"):
        check_model(family("MiniMax", MINIMAX))


def test_a_model_that_fails_without_a_cache_is_unfit() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.o_proj = torch.nn.Linear(3, 3)

    with pytest.raises(UnfitModelError, match="its own class fails: "):
        check_model(model)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 9, 16, 40])
@pytest.mark.parametrize(("name", "options"), FAMILIES.items(), ids=FAMILIES.keys())
def test_blocks_hold_what_a_cache_takes(name: str, options: dict[str, Any], length: int) -> None:
    model = family(name, options)
    found = check_model(model)
    runner = GenericRunner(model)
    cache = runner.new_cache()

    runner.extend(IDS[:length], cache)

    num_blocks = found.handling.num_state_blocks + blocks_for(length)
    assert cache.num_bytes <= num_blocks * found.block_bytes


def test_a_state_that_is_less_than_a_position_takes_no_block_of_its_own() -> None:
    found = check_model(family("Gemma2", {**FAMILIES["Gemma2"], "sliding_window": 64}))

    assert found.handling.num_state_blocks == 0
    assert 0 < found.block_bytes - BLOCK_SIZE * PLAIN_BYTES < PLAIN_BYTES


def test_a_state_is_counted_in_blocks_that_positions_hardly_matter_beside() -> None:
    model = family("Mamba2")
    found = check_model(model)
    runner = GenericRunner(model)
    cache = runner.new_cache()

    runner.extend(IDS, cache)

    state_bytes = found.handling.num_state_blocks * found.block_bytes
    assert cache.num_bytes <= state_bytes < 1.1 * cache.num_bytes
    assert found.block_bytes < state_bytes / 500
