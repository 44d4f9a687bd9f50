"""Tiny models of every kind that our own forward passes know."""

from typing import Any

import torch
from transformers import PreTrainedModel

from sampler.decoder_weights import DecoderWeights, decoder_weights
from tests.sampler.families import family

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

# A family of the transformers library, and what it is made of other than the usual.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama, wide heads": ("Llama", {"head_dim": 16}),
    "Llama, one head": ("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "Llama, nothing shared": ("Llama", {"num_key_value_heads": 4}),
    "Llama 3": ("Llama", {"rope_parameters": _LLAMA_3_ROPE}),
    "Llama, YaRN": ("Llama", {"rope_parameters": _YARN_ROPE}),
    "Llama, linear": ("Llama", {"rope_parameters": _LINEAR_ROPE}),
    "SmolLM": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "Qwen 2": ("Qwen2", {}),
    "Qwen 2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen 3": ("Qwen3", {"head_dim": 16}),
    "Qwen 3, tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, wide window": ("Mistral", {"sliding_window": 128}),
}


def decoder_model(name: str) -> PreTrainedModel:
    """Return the model, all of whose weights are random: norms and biases too."""
    model = family(*DECODERS[name])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 1:
                weights.add_(0.5 * torch.randn(weights.shape, generator=generator))
    return model


def known_weights(model: PreTrainedModel) -> DecoderWeights:
    weights = decoder_weights(model)
    assert weights is not None
    return weights
