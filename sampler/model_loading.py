"""Find a model, load it, and put together all that belongs to it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from sampler.chat_template import ChatFormat
from sampler.language import ModelLoadError as ModelLoadError
from sampler.language import chat_format_of as chat_format_of
from sampler.language import find_model, first_line, load_tokenizer
from sampler.language import stop_ids_of as stop_ids_of
from sampler.load_check import UnfitModelError
from sampler.model_runner import ModelRunner
from sampler.runner_choice import RunnerChoiceError, RunnerOptions, choose_runner
from sampler.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model with all that belongs to it."""

    name: str
    """What clients call it."""
    runner: ModelRunner
    tokenizer: Tokenizer
    chat_format: ChatFormat

    @property
    def is_simulated(self) -> bool:
        """Whether there is no model, and what it says is made up."""
        return self.runner.is_simulated


def load_model(
    source: str | Path | None = None,
    *,
    device: str = "auto",
    options: RunnerOptions = RunnerOptions(),  # noqa: B008 - frozen
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load the embedded model, a model directory, or a Hugging Face id.

    Args:
        source: a directory with config, weights and tokenizer, or an id of the hub; None is the
            embedded model.
        device: ``cpu``, ``cuda``, ``mps``, or ``auto`` for the best there is.
        options: in which format, how exactly, and in how much memory it runs.
        progress: called with (done, total) while the embedded model is converted, on first use.

    Raises:
        ModelLoadError: there is no such model or device, the model lacks a fast tokenizer or a
            chat template, its own class does not go on from a cache, or it cannot be run as
            ``options`` say.
        EmbeddedModelError: the embedded model is not installed or its file is not the right one.
    """
    location, name = find_model(source, progress)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch_device = _pick_device(device)
    dtype = options.loading_dtype(torch_device)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(location, dtype=dtype)
        torch.nn.Module.to(model, torch_device)  # the model's own `to` is typed wrongly
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"cannot load the model {name!r}: {first_line(error)}") from error
    hf_tokenizer = load_tokenizer(location, name)
    try:
        runner = choose_runner(model, options)
    except (RunnerChoiceError, UnfitModelError) as error:
        raise ModelLoadError(f"cannot run the model {name!r}: {error}") from error
    tokenizer = Tokenizer(
        hf_tokenizer.backend_tokenizer,
        stop_ids_of(model.generation_config, hf_tokenizer),
        runner.vocab_size,
        runner.counters,
    )
    logger.info("loaded %s on %s: %s", name, torch_device, runner)
    return LoadedModel(name, runner, tokenizer, chat_format_of(hf_tokenizer, tokenizer, name))


def _pick_device(device: str) -> torch.device:
    if device != "auto":
        try:
            return torch.empty(0, device=device).device
        # A torch without CUDA asserts, one without any such device finds nothing implemented.
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason, _, _ = first_line(error).partition(". ")
            raise ModelLoadError(f"cannot use the device {device!r}: {reason}") from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
