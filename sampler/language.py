"""How a model is spoken to: its tokenizer, what ends its turns, and its chat format.

Whoever has the model sampled somewhere else needs no more of it than this, and no weights.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from protocol.items import CallOutput, FunctionCall, Message
from sampler.chat_template import THINK, ChatFormat, ChatMLFormat, Render, TemplateFormat
from sampler.conversation import ConversationError
from sampler.embedded_model import EMBEDDED_MODEL_NAME, ensure_embedded_model
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import BEGIN

logger = logging.getLogger(__name__)


class ModelLoadError(RuntimeError):
    """The model could not be loaded; the message says why."""


class ModelSource(NamedTuple):
    """Where a model is found."""

    location: str | Path
    """A directory, or an id of the hub."""
    name: str
    """What clients call it."""


@dataclass(frozen=True)
class LoadedLanguage:
    """All that belongs to a model, but what runs it."""

    name: str
    """What clients call it."""
    tokenizer: Tokenizer
    chat_format: ChatFormat
    max_context: int | None = None
    """The most tokens that the model was made for, if its config tells."""


def load_language(
    source: str | Path | None = None, *, progress: Callable[[int, int], None] | None = None
) -> LoadedLanguage:
    """Return how a model is spoken to: the embedded one, that of a directory, or one of the hub.

    The vocabulary is as large as the config says, for logits are often padded. Without a config, or
    with one of a kind that is not known here, it is the tokenizer's.

    Args:
        source: a directory with a tokenizer, or an id of the hub; None is the embedded model.
        progress: called with (done, total) while the embedded model is converted, on first use.

    Raises:
        ModelLoadError: there is no such model, or it lacks a fast tokenizer, a chat template, or
            anything that ends a turn.
        EmbeddedModelError: the embedded model is not installed or its file is not the right one.
    """
    location, name = find_model(source, progress)
    hf_tokenizer = load_tokenizer(location, name)
    config = _config_of(location)
    stop_ids = stop_ids_of(_generation_config_of(location) or config, hf_tokenizer)
    if not stop_ids:
        raise ModelLoadError(f"nothing tells what ends a turn of {name!r}")
    vocab_size = getattr(config, "vocab_size", None)
    tokenizer = Tokenizer(hf_tokenizer.backend_tokenizer, stop_ids, vocab_size)
    chat_format = chat_format_of(hf_tokenizer, tokenizer, name)
    return LoadedLanguage(
        name, tokenizer, chat_format, getattr(config, "max_position_embeddings", None)
    )


def find_model(
    source: str | Path | None, progress: Callable[[int, int], None] | None = None
) -> ModelSource:
    """Return where ``source`` is, and its name; arguments and errors are those of
    ``load_language``."""
    name = model_name(source)
    if source is None or source == EMBEDDED_MODEL_NAME:
        return ModelSource(ensure_embedded_model(progress), name)
    return ModelSource(source, name)


def model_name(source: str | Path | None) -> str:
    """Return what clients call the model ``source``; see ``load_language``.

    Raises:
        ModelLoadError: there is no such directory, or no name, or it cannot be looked for.
    """
    if source is None or source == EMBEDDED_MODEL_NAME:
        return EMBEDDED_MODEL_NAME
    if source == "":  # as a path it would be the current directory
        raise ModelLoadError("the name of a model is empty")
    try:
        is_directory = Path(source).is_dir()
    except OSError as error:
        raise ModelLoadError(f"cannot look for {str(source)!r}: {error.strerror}") from error
    if is_directory:
        if name := Path(source).resolve().name:
            return name
        raise ModelLoadError(f"the directory {str(source)!r} has no name")
    if isinstance(source, Path) or source.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no model directory {str(source)!r}")
    return source


def load_tokenizer(location: str | Path, name: str) -> Any:
    """Return the fast tokenizer of the model called ``name``.

    Raises:
        ModelLoadError: it has none.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(location)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"cannot load the model {name!r}: {first_line(error)}") from error
    if not hf_tokenizer.is_fast:
        raise ModelLoadError(f"the model {name!r} has no fast tokenizer")
    return hf_tokenizer


def first_line(error: Exception) -> str:
    """Return the first line of what ``error`` says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _config_of(location: str | Path) -> Any:
    """Return the config of the part of the model that reads text; None if there is none."""
    try:
        return AutoConfig.from_pretrained(location).get_text_config()
    except (OSError, ValueError):
        return None


def _generation_config_of(location: str | Path) -> Any:
    try:
        return GenerationConfig.from_pretrained(location)
    except (OSError, ValueError):
        return None


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
