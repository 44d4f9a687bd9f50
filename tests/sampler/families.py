"""Tiny models of many families, whose code and caches are real, and whose weights are random.

Weights are made larger than they are initialised, because a model whose attention is all but even
would not notice what its cache has lost.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

TOLERANCE = 1e-4
WINDOW = 8
IDS = torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(1)).tolist()

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
# Models that have positions of their own: from the length of the cache, which in a pass of several
# rows is that of the longest, or from an offset.
POSITIONS: dict[str, dict[str, Any]] = {
    "RoFormer": {"is_decoder": True, "embedding_size": 32},
    "TrOCR": {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 64},
    "Bart": {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 64},
    "Roberta": {"is_decoder": True},
}
# Models with a table of positions: the first rows may stand for none, and there may be a row more
# for each of those, or not.
TABLES: dict[str, dict[str, Any]] = {
    **POSITIONS,
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "BioGpt": {},
    "GPT2": {},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "GPTJ": {"rotary_dim": 4},
    "CTRL": {"dff": 64},
    "Bert": {"is_decoder": True},
    "Camembert": {"is_decoder": True, "pad_token_id": 1},
    "Marian": {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_vocab_size": 64},
}
# With a cache class of its own, that is no list of layers.
MINIMAX: dict[str, Any] = {
    "head_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["linear_attention", "full_attention"],
    "block_size": WINDOW,
}


def family(name: str, options: dict[str, Any] | None = None) -> PreTrainedModel:
    """Return a model; without ``options`` it is made of those in ``FAMILIES``."""
    options = FAMILIES[name] if options is None else options
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
    """Return a Llama as its weights are initialised."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**DIMENSIONS))


def without_cache(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Return the next-token logits after ``token_ids``."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
    return logits


def distance(one: Tensor, other: Tensor) -> float:
    """Return how far apart two logits are at most."""
    return (one - other).abs().max().item()
