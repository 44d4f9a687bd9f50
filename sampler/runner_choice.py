"""Which way of running a model is taken, in which format, and in how much memory.

Our own forward pass covers one family of networks (``decoder_weights``): on processors it is
compiled (``cpu_decoder``), elsewhere made of torch's operations (``torch_decoder``). Any other
model runs through its own class (``model_runner``).
"""

import os
from dataclasses import dataclass

import psutil
import torch
import transformers

from sampler import cpu_decoder
from sampler.cache_pool import BlockPool
from sampler.cores import num_usable_cores
from sampler.cpu_decoder import CPUDecoder
from sampler.decoder_weights import DecoderWeights, decoder_weights
from sampler.kv_cache import KVShape, PagedStorage
from sampler.load_check import check_model
from sampler.model_runner import GenericRunner, ModelRunner
from sampler.step_graphs import CUDACapture
from sampler.torch_decoder import TorchDecoder

DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8")

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TORCH_KV_DTYPES = {**_TORCH_DTYPES, "int8": torch.int8}
_MEMORY_SHARE = 0.5
"""Of the memory that is free once the model is loaded, for keys and values."""
_MAX_DEFAULT_THREADS = 8
"""Beyond it, a step of a model that suits a processor is too short to be shared."""


class RunnerChoiceError(ValueError):
    """What was asked for cannot be had with this model or device; the message says why."""


@dataclass(frozen=True)
class RunnerOptions:
    """How a model is to be run."""

    dtype: str = "auto"
    """One of ``DTYPES``. ``auto``: bfloat16 on CUDA; on a processor 4 bits where the weights were
    published in them and 8 otherwise, for the models that are compiled; float32 for the rest."""
    is_exact: bool = False
    """Whether no token may depend on who else is served: float32, and no pass that is shared unless
    sharing it changes no bit."""
    kv_memory: int | None = None
    """Bytes for keys and values; None for half of what is free."""
    num_threads: int | None = None
    """That compute, on a processor; None for one on each core that may be used, up to eight."""
    kv_dtype: str = "auto"
    """What keys and values are kept in, of a model that is compiled: one of ``KV_DTYPES``.
    ``auto``: float32 beside weights in it, and bfloat16 beside others."""
    cuda_graphs: bool = True
    """Whether steps that decode are launched as a whole, on CUDA, if not exact."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise RunnerChoiceError(f"expected a dtype of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.is_exact and self.dtype not in ("auto", "float32"):
            raise RunnerChoiceError(f"the exact mode computes in float32, not in {self.dtype}")
        if self.kv_dtype not in KV_DTYPES:
            known = ", ".join(KV_DTYPES)
            raise RunnerChoiceError(
                f"expected keys and values in one of {known}, not {self.kv_dtype!r}"
            )
        if self.is_exact and self.kv_dtype not in ("auto", "float32"):
            raise RunnerChoiceError(
                f"the exact mode keeps keys and values in float32, not in {self.kv_dtype}"
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise RunnerChoiceError(f"expected at least one thread, not {self.num_threads}")

    @property
    def threads(self) -> int:
        """How many threads compute, on a processor."""
        if self.num_threads is not None:
            return self.num_threads
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        return min(cores, num_usable_cores(), _MAX_DEFAULT_THREADS)

    def kv_memory_on(self, device: torch.device) -> int:
        """Return how many bytes there are for keys and values, now that the model is loaded."""
        if self.kv_memory is not None:
            return self.kv_memory
        return int(_MEMORY_SHARE * free_memory(device))

    def records_on(self, device: torch.device) -> bool:
        """Tell whether steps are recorded as graphs there, where our own forward pass runs."""
        # In a graph all rows share their products.
        return self.cuda_graphs and device.type == "cuda" and not self.is_exact

    def loading_dtype(self, device: torch.device) -> torch.dtype:
        """Return what the weights are to be loaded in."""
        if self.dtype in _TORCH_DTYPES:
            return _TORCH_DTYPES[self.dtype]
        is_fast = self.dtype == "auto" and device.type == "cuda" and not self.is_exact
        return torch.bfloat16 if is_fast else torch.float32


def choose_runner(model: "transformers.PreTrainedModel", options: RunnerOptions) -> ModelRunner:
    """Return what runs ``model``, which is where it is to be, in ``options.loading_dtype``.

    Raises:
        RunnerChoiceError: the format is not one that this model can be run in, or the memory for
            keys and values does not hold a single block, or not what a sequence takes beside them.
        UnfitModelError: it is run by its own class, which does not go on from a cache.
    """
    weights = decoder_weights(model)
    if weights is not None and cpu_decoder.covers(weights):
        return _compiled(weights, options)
    if options.dtype not in ("auto", *_TORCH_DTYPES):
        raise RunnerChoiceError(
            f"{options.dtype} is for models on a processor that are compiled; this one is not"
        )
    if options.kv_dtype != "auto":
        raise RunnerChoiceError(
            f"keys and values in {options.kv_dtype} are for models on a processor that are "
            "compiled; this one is not"
        )
    if weights is None:
        return _generic(model, options)
    storage = _storage(weights, weights.dtype, options)
    capture = CUDACapture(weights.device) if options.records_on(weights.device) else None
    return TorchDecoder(weights, storage, is_exact=options.is_exact, capture=capture)


def _compiled(weights: DecoderWeights, options: RunnerOptions) -> CPUDecoder:
    form = options.dtype
    if form == "auto":
        is_exact = options.is_exact
        form = "float32" if is_exact else cpu_decoder.nearest_lossless_format(weights)
    usual = "float32" if form == "float32" else "bfloat16"
    kv_dtype = _TORCH_KV_DTYPES[usual if options.kv_dtype == "auto" else options.kv_dtype]
    storage = _storage(weights, kv_dtype, options)
    runner = CPUDecoder(weights, storage, weight_format=form, num_threads=options.threads)
    runner.warm_up()
    return runner


def _storage(weights: DecoderWeights, dtype: torch.dtype, options: RunnerOptions) -> PagedStorage:
    shape = KVShape(weights.shape.num_layers, weights.shape.num_kv_heads, weights.shape.head_dim)
    num_blocks = _num_blocks(shape.block_bytes(dtype), options, weights.device)
    return PagedStorage(BlockPool(num_blocks), shape, dtype, weights.device)


def _generic(model: "transformers.PreTrainedModel", options: RunnerOptions) -> GenericRunner:
    handling, block_bytes = check_model(model)
    num_blocks = _num_blocks(block_bytes, options, model.device)
    if num_blocks <= handling.num_state_blocks:
        raise RunnerChoiceError(
            f"{options.kv_memory_on(model.device)} bytes do not hold the state of one sequence, "
            f"which is {handling.num_state_blocks * block_bytes}, and a block of {block_bytes}"
        )
    pool = BlockPool(num_blocks)
    return GenericRunner(model, pool=pool, is_exact=options.is_exact, handling=handling)


def _num_blocks(block_bytes: int, options: RunnerOptions, device: torch.device) -> int:
    memory = options.kv_memory_on(device)
    if memory < block_bytes:
        raise RunnerChoiceError(
            f"{memory} bytes do not hold a single block of keys and values, which is {block_bytes}"
        )
    return memory // block_bytes


def free_memory(device: torch.device) -> int:
    """Return how many bytes are free where the keys and values of ``device`` are kept."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)
