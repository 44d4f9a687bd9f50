"""The weights of a Llama-like decoder, taken out of a model of the transformers library.

Llama (and SmolLM), Qwen 2, Qwen 3 and Mistral are one network with three switches: a bias on the
queries, keys and values, a norm on queries and keys, and how the rotary frequencies are spread. Our
own forward passes (``torch_decoder`` and others) know this network and nothing else. So a model is
taken only if all that it does is known: its class is exactly one of these, each of its parameters
has a place here, and its configuration asks for nothing more. Everything else is None, and runs
through its own class.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

_FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
"""Names: the library loads a class when it is first asked for, which takes seconds."""

# Those whose frequencies are the same at every length.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class DecoderShape:
    """The dimensions of the network."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Each serves ``num_heads // num_kv_heads`` query heads, which lie next to each other."""
    head_dim: int
    """Not always ``hidden_size // num_heads``."""
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_context: int
    """The most positions that the model was made for."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are ``(out, in)``, as ``torch.nn.functional.linear`` takes them."""

    input_norm: Tensor
    """``(hidden,)``."""
    qkv: Tensor
    """``((num_heads + 2 * num_kv_heads) * head_dim, hidden)``: rows of queries, keys, values."""
    qkv_bias: Tensor | None
    """``((num_heads + 2 * num_kv_heads) * head_dim,)``."""
    q_norm: Tensor | None
    """``(head_dim,)``, the same for all heads; before the rotary embedding."""
    k_norm: Tensor | None
    """``(head_dim,)``."""
    o: Tensor
    """``(hidden, num_heads * head_dim)``."""
    post_norm: Tensor
    """``(hidden,)``: between attention and MLP."""
    gate_up: Tensor
    """``(2 * intermediate, hidden)``: rows of the gate, then those of what it gates."""
    down: Tensor
    """``(hidden, intermediate)``."""


@dataclass(frozen=True)
class DecoderWeights:
    """A whole model, in its own dtype and on its own device."""

    shape: DecoderShape
    embed: Tensor
    """``(vocab, hidden)``."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """``(hidden,)``."""
    head: Tensor
    """``(vocab, hidden)``; the same tensor as ``embed`` where the model ties them."""
    inv_freq: Tensor
    """``(head_dim / 2,)`` float32: radians per position. Element ``i`` turns with ``i + half``."""
    attention_scaling: float
    """By what cosines and sines are multiplied (other than 1 for YaRN only)."""

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype


@torch.no_grad()
def decoder_weights(model: "transformers.PreTrainedModel") -> DecoderWeights | None:
    """Return the weights of ``model``, or None where our own forward would not do all it does.

    Queries, keys and values are joined, and so are gate and up. The model goes on working: its
    own matrices become views of the joined ones, so that nothing is held twice. A model of which
    nothing is returned is left as it was.
    """
    if not _is_known(model):
        return None
    shape, parameters = _shape(model), _parameters(model)
    embed, head = parameters["model.embed_tokens.weight"], parameters["lm_head.weight"]
    embed_weights = embed.detach()
    rotary = model.model.rotary_emb
    return DecoderWeights(
        shape=shape,
        embed=embed_weights,
        layers=tuple(
            _layer(parameters, f"model.layers.{index}.") for index in range(shape.num_layers)
        ),
        norm=parameters["model.norm.weight"].detach(),
        head=embed_weights if head is embed else head.detach(),
        # As the model has them: cast to bfloat16 with the rest of it, they are less exact.
        inv_freq=rotary.inv_freq.detach().to(model.device, torch.float32),
        attention_scaling=float(rotary.attention_scaling),
    )


def _parameters(model: "transformers.PreTrainedModel") -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _shape(model: "transformers.PreTrainedModel") -> DecoderShape:
    config = model.config
    return DecoderShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=model.model.layers[0].self_attn.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        max_context=config.max_position_embeddings,
    )


def _layer(parameters: dict[str, nn.Parameter], prefix: str) -> LayerWeights:
    def one(name: str) -> Tensor:
        return parameters[prefix + name].detach()

    def optional(name: str) -> Tensor | None:
        return one(name) if prefix + name in parameters else None

    def joined(names: Sequence[str]) -> Tensor:
        return _join([parameters[prefix + name] for name in names])

    has_bias = prefix + _QKV[0] + ".bias" in parameters
    return LayerWeights(
        input_norm=one("input_layernorm.weight"),
        qkv=joined([f"{name}.weight" for name in _QKV]),
        qkv_bias=joined([f"{name}.bias" for name in _QKV]) if has_bias else None,
        q_norm=optional("self_attn.q_norm.weight"),
        k_norm=optional("self_attn.k_norm.weight"),
        o=one("self_attn.o_proj.weight"),
        post_norm=one("post_attention_layernorm.weight"),
        gate_up=joined(["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        down=one("mlp.down_proj.weight"),
    )


def _join(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return all rows in one tensor, of which the parameters are parts from now on."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    parts = torch.split(joined, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined


# --- What is known --------------------------------------------------------------------------------


def _is_known(model: "transformers.PreTrainedModel") -> bool:
    # A class derived from a known one may do anything.
    return (
        type(model) in [getattr(transformers, name) for name in _FAMILIES]
        and _config_is_known(model)
        and _modules_are_plain(model)
        and _parameters_are_known(model)
    )


def _config_is_known(model: "transformers.PreTrainedModel") -> bool:
    config = model.config
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    # Qwen's configs may name a window; which layers have it is said by their types.
    window = config.sliding_window if type(model) is transformers.MistralForCausalLM else None
    return (
        config.hidden_act == "silu"
        and set(layer_types) == {"full_attention"}
        and (window is None or window >= config.max_position_embeddings)
        and config.num_attention_heads % config.num_key_value_heads == 0
        and config.num_hidden_layers == len(model.model.layers) > 0
        and model.model.rotary_emb.rope_type in _ROPE_TYPES
        and getattr(config, "quantization_config", None) is None
    )


def _modules_are_plain(model: "transformers.PreTrainedModel") -> bool:
    """Tell whether the modules are torch's own, in one dtype and in one place.

    Adapters and quantised weights come as other classes of linear layers, offloading as hooks.
    """
    first, *others = model.parameters()
    return (
        first.dtype.is_floating_point
        and not first.is_meta
        and all((other.device, other.dtype) == (first.device, first.dtype) for other in others)
        and type(model.model.embed_tokens) is nn.Embedding
        and all(type(linear) is nn.Linear for linear in _linears(model))
        and not any(module._forward_hooks for module in model.modules())
        and not any(module._forward_pre_hooks for module in model.modules())
    )


def _linears(model: "transformers.PreTrainedModel") -> Iterator[nn.Module]:
    yield model.lm_head
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _parameters_are_known(model: "transformers.PreTrainedModel") -> bool:
    """Tell whether each parameter has a place in ours, and the size that goes there.

    One that is left over, such as a bias on the output, is something that the model does.
    """
    shape = _shape(model)
    sizes = {name: tuple(parameter.shape) for name, parameter in _parameters(model).items()}
    rotary_size = tuple(model.model.rotary_emb.inv_freq.shape)
    return rotary_size == (shape.head_dim // 2,) and any(
        sizes == _sizes(shape, has_bias=has_bias, has_norms=has_norms)
        for has_bias in (False, True)
        for has_norms in (False, True)
    )


def _sizes(shape: DecoderShape, *, has_bias: bool, has_norms: bool) -> dict[str, tuple[int, ...]]:
    """Return the names and sizes of all parameters of a model of ``shape``."""
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    attention = shape.num_heads * head_dim
    outs = (attention, shape.num_kv_heads * head_dim, shape.num_kv_heads * head_dim)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        **{f"{name}.weight": (out, hidden) for name, out in zip(_QKV, outs, strict=True)},
        "self_attn.o_proj.weight": (hidden, attention),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if has_bias:
        layer |= {f"{name}.bias": (out,) for name, out in zip(_QKV, outs, strict=True)}
    if has_norms:
        layer |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape.vocab_size, hidden),
        **{
            f"model.layers.{index}.{name}": size
            for index in range(shape.num_layers)
            for name, size in layer.items()
        },
    }
