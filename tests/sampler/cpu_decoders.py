"""Tiny models that the compiled kernels cover, and what their packed weights stand for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from sampler.cache_pool import BlockPool
from sampler.cpu_decoder import FORMATS, CPUDecoder, can_multiply_pairs, line_size, pack
from sampler.cpu_kernels import TILE
from sampler.decoder_weights import DecoderWeights
from sampler.kv_cache import KVShape, PagedStorage
from sampler.simd import GROUP
from tests.sampler.decoders import DECODERS
from tests.sampler.families import family


class Way(NamedTuple):
    """One of the ways to compute."""

    form: str
    """Of the weights."""
    pairs: bool
    """Whether products are of pairs."""
    kv_dtype: torch.dtype
    """Of keys and values."""

    def __str__(self) -> str:
        kv = str(self.kv_dtype).removeprefix("torch.")
        return f"{self.form}, {kv} cache{', pairs' if self.pairs else ''}"


def usual_kv_dtype(form: str) -> torch.dtype:
    """Return what ``choose_runner`` keeps keys and values in, where nothing is said."""
    return torch.float32 if form == "float32" else torch.bfloat16


# All that this processor can compute, with keys and values as usual; and in int8 of those ways
# that differ in the product of queries and keys.
USUAL_WAYS = [
    Way(form, pairs, usual_kv_dtype(form))
    for form in FORMATS
    for pairs in (False, True)
    if not pairs or can_multiply_pairs(form)
]
WAYS = [
    *USUAL_WAYS,
    *(way._replace(kv_dtype=torch.int8) for way in USUAL_WAYS if way.form in ("float32", "int4")),
]


def covered_model(name: str = "Llama", **options: Any) -> PreTrainedModel:
    """Return a model whose dimensions are whole tiles, with random norms and biases."""
    kind, usual = DECODERS[name]
    covered = {"head_dim": 32, "max_position_embeddings": 1024}
    model = family(kind, {**usual, **covered, **options})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 1:
                weights.add_(0.5 * torch.randn(weights.shape, generator=generator))
    return model


def new_storage(weights: DecoderWeights, dtype: torch.dtype, num_blocks: int = 512) -> PagedStorage:
    """Return blocks that hold nothing but NaN, in int8 as scales."""
    network = weights.shape
    shape = KVShape(network.num_layers, network.num_kv_heads, network.head_dim)
    storage = PagedStorage(BlockPool(num_blocks), shape, dtype)
    storage.tensor.view(torch.uint8).fill_(0xFF)
    return storage


def new_decoder(
    weights: DecoderWeights,
    form: str = "float32",
    num_blocks: int = 512,
    num_threads: int = 1,
    *,
    multiplies_pairs: bool | None = None,
    kv_dtype: torch.dtype | None = None,
) -> CPUDecoder:
    """Return a decoder with keys and values as ``choose_runner`` keeps them, or in ``kv_dtype``."""
    storage = new_storage(weights, kv_dtype or usual_kv_dtype(form), num_blocks)
    return CPUDecoder(
        weights,
        storage,
        weight_format=form,
        num_threads=num_threads,
        multiplies_pairs=multiplies_pairs,
    )


def quantise(weights: DecoderWeights, form: str) -> None:
    """Let all matrices, those of the model too, be what is kept of them in ``form``."""
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            matrix.copy_(kept(matrix, form))
    assert weights.head is not weights.embed, "an embedding is kept as it is"
    padding = torch.zeros(-len(weights.head) % TILE, weights.head.shape[1])
    padded = torch.cat([weights.head.float(), padding])
    head_form = "int8" if form == "int4" else form
    weights.head.copy_(kept(padded, head_form)[: len(weights.head)])


def kept(matrix: torch.Tensor, form: str) -> torch.Tensor:
    """Return what ``matrix`` is once packed, in float32."""
    return torch.from_numpy(unpacked(pack(matrix, form), form, matrix.shape[1])).float()


def unpacked(
    packed: NDArray[Any], form: str, num_in: int, *, in_pairs: bool = False
) -> NDArray[np.float64]:
    """Return ``(out, in)`` read from tiles as their layout is described."""
    tiles = packed.reshape(-1, num_in * line_size(form))
    match form:
        case "float32":
            columns = tiles.astype(np.float64)
        case "bfloat16":
            columns = torch.from_numpy(tiles).view(torch.bfloat16).double().numpy()
            columns = _lines(columns) if in_pairs else columns
        case _:
            groups = tiles.view(np.uint8).reshape(-1, GROUP * line_size(form))
            columns = np.stack([_group(group, form, in_pairs) for group in groups])
    return columns.reshape(-1, num_in, TILE).swapaxes(1, 2).reshape(-1, num_in)


def _lines(pairs: NDArray[Any]) -> NDArray[Any]:
    """Return lines one after the other that were in pairs, ``(..., pair, column, 2)``."""
    return pairs.reshape(-1, TILE, 2).swapaxes(1, 2).reshape(-1, TILE)


def _group(group: NDArray[np.uint8], form: str, in_pairs: bool) -> NDArray[np.float64]:
    """Return the ``(32 lines, 32 columns)`` of one group."""
    scales = group[:64].view(np.float16).astype(np.float64)
    if form == "int8":
        integers = group[64:].view(np.int8)
        return (_lines(integers) if in_pairs else integers.reshape(GROUP, TILE)) * scales
    minima = group[64:128].view(np.float16).astype(np.float64)
    lines = np.empty((GROUP, TILE))
    if in_pairs:
        words = group[128:].view(np.uint32).reshape(GROUP // 8, TILE)
        for line in range(8):
            lines[line::8] = words >> (4 * (line // 2) + 16 * (line % 2)) & 15
    else:
        pairs = group[128:].reshape(GROUP // 2, TILE)
        lines[0::2], lines[1::2] = pairs & 15, pairs >> 4
    return lines * scales + minima


# --- Keys and values ------------------------------------------------------------------------------


def rounded_to(dtype: torch.dtype, numbers: Tensor) -> Tensor:
    """Return ``numbers``, ``(..., head_dim)``, as keys or values in ``dtype`` keep them."""
    if dtype is not torch.int8:
        return numbers.to(dtype).float()
    groups = numbers.reshape(*numbers.shape[:-1], -1, GROUP)
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    return ((groups / scales).round().clamp(-127, 127) * scales).reshape(numbers.shape)


class RoundedLayer(DynamicLayer):
    """Keeps keys and values in some format, and gives them back in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept_in = dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = (rounded_to(self._kept_in, states) for states in (key_states, value_states))
        return super().update(keys, values, *args, **kwargs)


def with_rounded_cache(
    model: PreTrainedModel, token_ids: Sequence[int], dtype: torch.dtype
) -> Tensor:
    cache = DynamicCache(config=model.config)
    cache.layers = [RoundedLayer(dtype) for _ in cache.layers]
    with torch.inference_mode():
        logits: Tensor = model(
            input_ids=torch.tensor([token_ids]), cache=cache, use_cache=True
        ).logits[0, -1]
    return logits
