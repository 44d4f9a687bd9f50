"""Find a model, load it, and put together all that belongs to it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from protocol.items import CallOutput, FunctionCall, Message
from sampler.chat_template import THINK, ChatFormat, ChatMLFormat, Render, TemplateFormat
from sampler.conversation import ConversationError
from sampler.embedded_model import EMBEDDED_MODEL_NAME, ensure_embedded_model
from sampler.model_runner import GenericRunner, ModelRunner
from sampler.runner_choice import RunnerChoiceError, RunnerOptions, choose_runner
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import BEGIN

logger = logging.getLogger(__name__)


class ModelLoadError(RuntimeError):
    """The model could not be loaded; the message says why."""


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
            chat template, or it cannot be run as ``options`` say.
        EmbeddedModelError: the embedded model is not installed or its file is not the right one.
    """
    if source is None or source == EMBEDDED_MODEL_NAME:
        return _load(ensure_embedded_model(progress), EMBEDDED_MODEL_NAME, device, options)
    if Path(source).is_dir():
        return _load(source, Path(source).resolve().name, device, options)
    if isinstance(source, Path) or source.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no model directory {str(source)!r}")
    return _load(source, source, device, options)


def _load(source: str | Path, name: str, device: str, options: RunnerOptions) -> LoadedModel:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch_device = _pick_device(device)
    dtype = options.loading_dtype(torch_device)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        torch.nn.Module.to(model, torch_device)  # the model's own `to` is typed wrongly
        hf_tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"cannot load the model {name!r}: {_first_line(error)}") from error
    if not hf_tokenizer.is_fast:
        raise ModelLoadError(f"the model {name!r} has no fast tokenizer")
    try:
        runner = choose_runner(model, options)
    except RunnerChoiceError as error:
        raise ModelLoadError(f"cannot run the model {name!r}: {error}") from error
    if isinstance(runner, GenericRunner):
        _check_cache(model, name)
    tokenizer = Tokenizer(
        hf_tokenizer.backend_tokenizer,
        stop_ids_of(model.generation_config, hf_tokenizer),
        runner.vocab_size,
        runner.counters,
    )
    logger.info("loaded %s on %s: %s", name, torch_device, runner)
    return LoadedModel(name, runner, tokenizer, chat_format_of(hf_tokenizer, tokenizer, name))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _pick_device(device: str) -> torch.device:
    if device != "auto":
        try:
            return torch.empty(0, device=device).device
        # A torch without CUDA asserts, one without any such device finds nothing implemented.
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason, _, _ = _first_line(error).partition(". ")
            raise ModelLoadError(f"cannot use the device {device!r}: {reason}") from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _check_cache(model: PreTrainedModel, name: str) -> None:
    """Make sure that the model goes on where its cache ends, which some families do not."""
    # A runner of its own, so that its work is not counted as a run's.
    if not GenericRunner(model).continues_from_its_cache():
        raise ModelLoadError(f"{name!r} does not go on where its cache ends, so it cannot suspend")


def stop_ids_of(generation_config: Any, hf_tokenizer: Any) -> set[int]:
    """Return what ends a turn: what the generation config says, the EOS, and ChatML's end."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    chatml_end = hf_tokenizer.get_vocab().get("<|im_end|>")
    stop_ids = {*ids, hf_tokenizer.eos_token_id, chatml_end}
    return {token_id for token_id in stop_ids if token_id is not None}


def chat_format_of(hf_tokenizer: Any, tokenizer: Tokenizer, name: str) -> ChatFormat:
    """Return the format that the chat template of the model called ``name`` asks for.

    Raises:
        ModelLoadError: it has none, or one in which no run can be resumed.
    """
    template = hf_tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not template:
        raise ModelLoadError(f"the model {name!r} has no chat template")

    def render(
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> str:
        # A template tells a switch that is not set from one that is off.
        switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        return str(
            hf_tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **switches,
            )
        )

    thinks = THINK in template or THINK in tokenizer.added_tokens
    knows_tools = "tools" in template and BEGIN in template
    is_chatml = "<|im_start|>" in tokenizer.added_tokens and THINK not in template
    if is_chatml and not knows_tools:
        return ChatMLFormat(tokenizer, _default_system(render), thinks=thinks)
    if not knows_tools:
        logger.warning("%s calls tools in no way known here; they are told in the prompt", name)
    chat_format = TemplateFormat(tokenizer, render, knows_tools=knows_tools, thinks=thinks)
    _check_suffixes(chat_format, name)
    return chat_format


def _check_suffixes(chat_format: ChatFormat, name: str) -> None:
    """Make sure, before the first run is suspended, that one can be resumed."""
    calls = [FunctionCall("call_1", "f", "{}")]
    try:
        chat_format.suffix_ids(calls, [CallOutput("call_1", "x")])
        chat_format.suffix_ids([], [Message("user", "x")])
        _ = chat_format.end_of_turn  # found out now, and kept
    except ConversationError as error:
        raise ModelLoadError(f"no run of {name!r} can be resumed: {error}") from error


def _default_system(render: Render) -> str:
    """Return the system message that a ChatML template puts in when a conversation has none."""
    rendered = render([{"role": "user", "content": "x"}], add_generation_prompt=False)
    header = "<|im_start|>system\n"
    if not rendered.startswith(header):
        return ""
    return rendered.removeprefix(header).partition("<|im_end|>")[0]
