"""What is found out about a model's own class is checked against what is known of families."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sampler.cache_pool import BLOCK_SIZE, blocks_for
from sampler.load_check import UnfitModelError, check_model
from sampler.local_engine import LocalEngine
from sampler.model_runner import GenericRunner, Handling
from sampler.outputs import SegmentEnded
from sampler.params import Constraint, SamplingParams
from sampler.run import StopReason
from tests.sampler.families import (
    DIMENSIONS,
    FAMILIES,
    IDS,
    MINIMAX,
    POSITIONS,
    TABLES,
    UNFIT_FAMILIES,
    family,
    tiny_llama,
)
from tests.sampler.runs import VOCAB_SIZE
from tests.tiny_model import tiny_model

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


@pytest.mark.parametrize(("name", "options"), TABLES.items(), ids=TABLES.keys())
def test_a_model_reads_as_many_positions_as_its_table_has_and_no_more(
    name: str, options: dict[str, Any]
) -> None:
    model = family(name, {**options, "max_position_embeddings": 24})
    runner = GenericRunner(model, handling=check_model(model).handling)
    cache = runner.new_cache()

    for token_id in IDS[: runner.max_context]:
        runner.extend([token_id], cache)

    with pytest.raises((IndexError, RuntimeError)):
        runner.extend([5], cache)


@pytest.mark.parametrize("pad_token_id", [0, 1])
def test_the_rows_of_a_table_that_stand_for_no_position_are_left_out(pad_token_id: int) -> None:
    model = family("Roberta", {"is_decoder": True, "pad_token_id": pad_token_id})

    assert check_model(model).handling.max_positions == 128 - pad_token_id - 1


def test_a_table_says_how_long_a_context_is_where_the_configuration_does_not() -> None:
    model = family("GPT2", {})
    handling = check_model(model).handling
    model.config.max_position_embeddings = None

    assert GenericRunner(model, handling=handling).max_context == 128


async def test_a_run_ends_where_the_table_of_positions_does() -> None:
    model = family("Roberta", {"is_decoder": True, "vocab_size": VOCAB_SIZE})
    runner = GenericRunner(model, handling=check_model(model).handling)
    with closing(LocalEngine(replace(tiny_model(), runner=runner))) as engine:
        run = engine.open_run("run", IDS, SamplingParams(temperature=0), Constraint())
        ended = [output async for output in engine.sample(run)][-1]

    assert isinstance(ended, SegmentEnded)
    assert ended.reason is StopReason.CONTEXT_LENGTH
    assert len(run.tokens) == 127


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
