"""What is taken of which models. What the weights compute is tested with the forward passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sampler.decoder_weights import DecoderShape, decoder_weights
from tests.sampler.decoders import DECODERS, decoder_model, known_weights
from tests.sampler.families import DIMENSIONS, IDS, WINDOW, family, tiny_llama, without_cache


def is_part_of(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", DECODERS)
def test_weights_are_those_of_the_model(name: str) -> None:
    model = decoder_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    weights = known_weights(model)

    def taken(*names: str) -> Tensor:
        return torch.cat([before[f"model.layers.1.{name}"] for name in names])

    layer, qkv = weights.layers[1], ["q_proj", "k_proj", "v_proj"]
    assert len(weights.layers) == 2
    assert layer.input_norm.equal(taken("input_layernorm.weight"))
    assert layer.qkv.equal(taken(*(f"self_attn.{name}.weight" for name in qkv)))
    if layer.qkv_bias is not None:
        assert layer.qkv_bias.equal(taken(*(f"self_attn.{name}.bias" for name in qkv)))
    if layer.q_norm is not None and layer.k_norm is not None:
        assert layer.q_norm.equal(taken("self_attn.q_norm.weight"))
        assert layer.k_norm.equal(taken("self_attn.k_norm.weight"))
    assert layer.o.equal(taken("self_attn.o_proj.weight"))
    assert layer.post_norm.equal(taken("post_attention_layernorm.weight"))
    assert layer.gate_up.equal(taken("mlp.gate_proj.weight", "mlp.up_proj.weight"))
    assert layer.down.equal(taken("mlp.down_proj.weight"))
    assert weights.embed.equal(before["model.embed_tokens.weight"])
    assert weights.norm.equal(before["model.norm.weight"])
    assert weights.head.equal(before["lm_head.weight"])


def test_families_differ_in_biases_and_norms() -> None:
    has = {
        name: (layer.qkv_bias is not None, layer.q_norm is not None, layer.k_norm is not None)
        for name in ("Llama", "Qwen 2", "Qwen 3", "Mistral")
        for layer in known_weights(decoder_model(name)).layers
    }

    assert has == {
        "Llama": (False, False, False),
        "Qwen 2": (True, False, False),
        "Qwen 3": (False, True, True),
        "Mistral": (False, False, False),
    }


def test_the_shape_is_what_the_config_says() -> None:
    model = family("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-5})

    assert known_weights(model).shape == DecoderShape(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        vocab_size=64,
        rms_norm_eps=1e-5,
        max_context=128,
    )


@pytest.mark.parametrize("name", DECODERS)
def test_the_model_goes_on_working_and_nothing_is_held_twice(name: str) -> None:
    model = decoder_model(name)
    before = without_cache(model, IDS)

    weights = known_weights(model)

    assert without_cache(model, IDS).equal(before)
    for layer, ours in zip(model.model.layers, weights.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        assert is_part_of(attention.q_proj.weight, ours.qkv)
        assert is_part_of(attention.k_proj.weight, ours.qkv)
        assert is_part_of(attention.v_proj.weight, ours.qkv)
        assert is_part_of(attention.o_proj.weight, ours.o)
        assert is_part_of(mlp.gate_proj.weight, ours.gate_up)
        assert is_part_of(mlp.up_proj.weight, ours.gate_up)
        assert is_part_of(mlp.down_proj.weight, ours.down)
        if ours.qkv_bias is not None:
            assert is_part_of(attention.v_proj.bias, ours.qkv_bias)
    assert is_part_of(model.lm_head.weight, weights.head)


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = known_weights(decoder_model("Llama, tied")), known_weights(tiny_llama())

    assert tied.head is tied.embed
    assert not is_part_of(untied.head, untied.embed)


def test_weights_can_be_taken_again() -> None:
    model = decoder_model("Qwen 2")

    first, second = known_weights(model), known_weights(model)

    assert first.layers[0].qkv.equal(second.layers[0].qkv)
    assert is_part_of(model.model.layers[0].self_attn.q_proj.weight, second.layers[0].qkv)


def test_weights_are_in_the_dtype_of_the_model_and_frequencies_in_float32() -> None:
    weights = known_weights(nn.Module.to(tiny_llama(), torch.bfloat16))

    assert weights.dtype == weights.layers[0].qkv.dtype == torch.bfloat16
    assert weights.device == torch.device("cpu")
    assert weights.inv_freq.dtype == torch.float32
    assert weights.inv_freq.shape == (4,)


def test_weights_ask_for_no_gradient() -> None:
    weights = known_weights(tiny_llama())

    assert not weights.embed.requires_grad
    assert not weights.layers[0].qkv.requires_grad
    assert not weights.layers[0].o.requires_grad


def test_only_yarn_scales_cosines_and_sines() -> None:
    scaling = {name: known_weights(decoder_model(name)).attention_scaling for name in DECODERS}

    assert [name for name, factor in scaling.items() if factor != 1] == ["Llama, YaRN"]


# --- What is not taken ---------------------------------------------------------------------------

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "another family": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "partial rotary": ("GPTNeoX", {}),
    "attention biases": ("Llama", {"attention_bias": True}),
    "biases in the MLP": ("Llama", {"mlp_bias": True}),
    "biases beside norms": ("Qwen3", {"attention_bias": True}),
    "another activation": ("Llama", {"hidden_act": "gelu"}),
    "a window everywhere": ("Mistral", {"sliding_window": WINDOW}),
    "a window in some layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "a window in some layers of Qwen 3": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "frequencies that depend on length": ("Llama", {"rope_parameters": DYNAMIC_ROPE}),
    "frequencies in two sets": ("Llama", {"rope_parameters": LONG_ROPE}),
}


@pytest.mark.parametrize(("name", "options"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_our_forward_does_not_do_is_not_taken(name: str, options: dict[str, Any]) -> None:
    model = family(name, options)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    assert decoder_weights(model) is None
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


def test_a_class_derived_from_a_known_one_is_not_taken() -> None:
    class Derived(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        pass

    assert decoder_weights(Derived(LlamaConfig(**DIMENSIONS))) is None


class Adapted(nn.Linear):
    """A layer that does more than it says."""


def wrap_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj = Adapted(32, 64, bias=False)


def wrap_the_embedding(model: PreTrainedModel) -> None:
    class Scaled(nn.Embedding):
        pass

    model.model.embed_tokens = Scaled(64, 32)


def add_a_hook(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def add_a_hook_before(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda *_: None)


def add_a_parameter(model: PreTrainedModel) -> None:
    model.model.layers[0].sink = nn.Parameter(torch.zeros(4))


def mix_dtypes(model: PreTrainedModel) -> None:
    model.model.norm.to(torch.bfloat16)


def mix_devices(model: PreTrainedModel) -> None:
    model.model.norm.to("meta")


def leave_empty(model: PreTrainedModel) -> None:
    nn.Module.to(model, "meta")


def say_that_it_is_quantised(model: PreTrainedModel) -> None:
    model.config.quantization_config = {"quant_method": "gptq"}


def drop_a_layer(model: PreTrainedModel) -> None:
    model.config.num_hidden_layers = 1


CHANGES = [
    wrap_a_layer,
    wrap_the_embedding,
    add_a_hook,
    add_a_hook_before,
    add_a_parameter,
    mix_dtypes,
    mix_devices,
    leave_empty,
    say_that_it_is_quantised,
    drop_a_layer,
]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_model_that_was_changed_is_not_taken(change: Callable[[PreTrainedModel], None]) -> None:
    model = tiny_llama()
    change(model)

    assert decoder_weights(model) is None
