"""What all sections are given: how thorough to be, and the models that they compare."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from sampler import cpu_decoder
from sampler.cache_pool import blocks_for
from sampler.decoder_weights import decoder_weights
from sampler.embedded_model import ensure_embedded_model
from sampler.kv_cache import KVShape
from sampler.model_loading import LoadedModel, load_model
from sampler.model_runner import ModelRunner
from sampler.runner_choice import RunnerOptions, choose_runner
from scripts.benchmarks.llama_cpp import LlamaCpp
from scripts.benchmarks.pairing import wait_until_idle

T = TypeVar("T")

_WITH_KV = ", KV in "
"""Between a format of weights and one of keys and values, where it is not the usual one."""
_ROOM_TOKENS = 24 * 1024
"""Of the caches of each runner. What is not used is not resident."""


class Bench:
    """Loads what is measured, once, and keeps it. To be closed.

    Threads: torch computes on one thread but where a contender says otherwise, so that what
    surrounds our runner starts no OpenMP threads. llama.cpp has a process of its own.
    """

    def __init__(
        self,
        *,
        is_quick: bool = False,
        repeats: int | None = None,
        threads: int | None = None,
        reference_threads: int = 2,
        llama_cpp_python: Path | None = None,
        url: str | None = None,
        model_directory: Path | None = None,
    ) -> None:
        """Prepare to measure.

        Args:
            is_quick: measure less, and less often.
            repeats: rounds of every section, instead of its own number.
            threads: of our runner; None for what it chooses.
            reference_threads: of transformers and of llama.cpp.
            llama_cpp_python: the interpreter whose environment holds llama-cpp-python; None: it
                is not compared.
            url: of a server that runs already, for the sections that talk to one.
            model_directory: the model; None for the embedded one.
        """
        self.is_quick = is_quick
        self.url = url
        self.reference_threads = reference_threads
        self.threads = RunnerOptions(num_threads=threads).threads
        self.num_unsettled = 0
        """Times that something still computed when the next measurement began."""
        self._repeats = repeats
        self._llama_cpp_python = llama_cpp_python
        self._model_directory = model_directory
        self._models: dict[str, PreTrainedModel] = {}
        self._runners: dict[RunnerOptions, ModelRunner] = {}
        self._stack = ExitStack()
        self._stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and processes that were started."""
        self._stack.close()

    def pick(self, full: T, quick: T) -> T:
        """Return the one that is asked for."""
        return quick if self.is_quick else full

    def repeats(self, full: int, quick: int) -> int:
        """Return how many rounds to measure."""
        return self._repeats or self.pick(full, quick)

    def settle(self) -> None:
        """Wait until nothing computes that was measured before."""
        llama_cpp = self.started_llama_cpp
        pids = [llama_cpp.pid] if llama_cpp else []
        self.num_unsettled += not wait_until_idle(pids)

    # --- What is measured -------------------------------------------------------------------------

    @cached_property
    def model_directory(self) -> Path:
        """Where the model is."""
        return self._model_directory or ensure_embedded_model()

    def hf_model(self, dtype: str) -> PreTrainedModel:
        """Return the model as the transformers library runs it, on the CPU."""
        if dtype not in self._models:
            self._models[dtype] = AutoModelForCausalLM.from_pretrained(
                self.model_directory, dtype=getattr(torch, dtype)
            )
        return self._models[dtype]

    @cached_property
    def auto_dtype(self) -> str:
        """What the dtype ``auto`` comes to for this model."""
        weights = decoder_weights(self.hf_model("float32"))
        if weights is None or not cpu_decoder.covers(weights):
            return "float32"
        return cpu_decoder.nearest_lossless_format(weights)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """All formats that our runner has for this model: of its weights, and the usual one with
        keys and values in 8 bits."""
        weights = decoder_weights(self.hf_model("float32"))
        if weights is None or not cpu_decoder.covers(weights):
            return ("float32", "bfloat16")
        return (*cpu_decoder.FORMATS, f"{self.auto_dtype}{_WITH_KV}int8")

    def runner(self, dtype: str, *, is_exact: bool = False) -> ModelRunner:
        """Return our runner of the model in one of ``dtypes``."""
        loading = "bfloat16" if dtype == "bfloat16" else "float32"
        options = self._options(dtype, _ROOM_TOKENS, is_exact=is_exact)
        if options not in self._runners:
            self._runners[options] = choose_runner(self.hf_model(loading), options)
        return self._runners[options]

    @cached_property
    def cuda_runners(self) -> dict[str, ModelRunner]:
        """Our runner on CUDA, with graphs and without; empty where there is no CUDA."""
        if not torch.cuda.is_available():
            return {}
        model = AutoModelForCausalLM.from_pretrained(self.model_directory, dtype=torch.bfloat16)
        torch.nn.Module.to(model, torch.device("cuda"))
        graphs = RunnerOptions("bfloat16", kv_memory=self.kv_bytes(_ROOM_TOKENS, "bfloat16"))
        return {
            "CUDA": choose_runner(model, graphs),
            "CUDA, no graphs": choose_runner(model, replace(graphs, cuda_graphs=False)),
        }

    def loaded_model(self, dtype: str, num_tokens: int) -> LoadedModel:
        """Return the model as an engine wants it, with memory for ``num_tokens`` positions."""
        options = self._options(dtype, num_tokens)
        return load_model(self.model_directory, device="cpu", options=options)

    def _options(self, dtype: str, num_tokens: int, *, is_exact: bool = False) -> RunnerOptions:
        weights_dtype, _, kv_dtype = dtype.partition(_WITH_KV)
        return RunnerOptions(
            weights_dtype,
            is_exact,
            self.kv_bytes(num_tokens, dtype),
            num_threads=self.threads,
            kv_dtype=kv_dtype or "auto",
        )

    def kv_bytes(self, num_tokens: int, dtype: str) -> int:
        """Return what the keys and values of ``num_tokens`` take in one of ``dtypes``, in whole
        blocks."""
        config = self.hf_model("float32").config
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, head_dim)
        weights_dtype, _, kv_dtype = dtype.partition(_WITH_KV)
        usual = "float32" if weights_dtype == "float32" else "bfloat16"
        return blocks_for(num_tokens) * shape.block_bytes(getattr(torch, kv_dtype or usual))

    @property
    def started_llama_cpp(self) -> LlamaCpp | None:
        """llama.cpp, if a section has asked for it."""
        started: LlamaCpp | None = vars(self).get("llama_cpp")
        return started

    @cached_property
    def llama_cpp(self) -> LlamaCpp | None:
        """llama.cpp with the weights of the embedded model, if it is to be compared."""
        if self._llama_cpp_python is None or self._model_directory is not None:
            return None
        llama_cpp = LlamaCpp(self._llama_cpp_python, self.reference_threads)
        self._stack.callback(llama_cpp.close)
        return llama_cpp
