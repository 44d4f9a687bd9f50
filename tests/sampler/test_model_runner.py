"""The runner is checked against one forward pass of the same model without any cache.

The models are tiny and of random weights, but their code and their caches are real. Weights are
made larger than they are initialised, because a model whose attention is all but even would not
notice what its cache has lost.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    cache_utils,
)

from sampler.kv_cache import KVCache
from sampler.model_runner import ModelRunner
from tests.sampler.runs import one_torch_thread

TOLERANCE = 1e-4
WINDOW = 8
IDS = torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
# Pieces as a run makes them: a prompt in chunks, single tokens, a pending token and its suffix.
# They lie before the end of a window, across it, and beyond it.
CUTS = {
    "in two": [20],
    "as a run does": [6, 12, 13, 14, 15, 16, 30, 31, 32],
    "one by one": list(range(1, 40)),
}

DIMENSIONS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MAMBA_1: dict[str, Any] = {"mamba_d_state": 8, "num_experts": 1}
MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
DELTA_NET: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    # Sliding windows, alone and beside full attention.
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Gemma3Text": {
        "sliding_window": WINDOW,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    # Convolutions, linear attention and state spaces beside full attention.
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Qwen3_5Text": DELTA_NET,
    "GraniteMoeHybrid": {
        **MAMBA_2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "FalconH1": {**MAMBA_2, "mamba_d_ssm": 64},
    "Bamba": {**MAMBA_2, "attn_layer_indices": [1]},
    # Nothing but state spaces.
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
}
UNFIT_FAMILIES: dict[str, dict[str, Any]] = {
    # The scan of Mamba 1 begins with an empty state whenever it is given more than one token.
    "Jamba": {**MAMBA_1, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Mamba": {"state_size": 8},
    # Models that keep their state elsewhere, and take no notice of a cache.
    "RecurrentGemma": {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": WINDOW,
    },
    "Rwkv": {},
}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def family(name: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**DIMENSIONS, **options})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.train(False)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(8)
    return model


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**DIMENSIONS))


def extend_in_pieces(runner: ModelRunner, cache: KVCache, cuts: Sequence[int]) -> Tensor:
    edges = [0, *cuts, len(IDS)]
    pieces = [IDS[start:stop] for start, stop in itertools.pairwise(edges)]
    return [runner.extend(piece, cache) for piece in pieces][-1]


def without_cache(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
    return logits


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


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
