"""Which engine serves: a model in this process, or one somewhere else.

``--model`` names it. What comes before the first colon is the kind, where there is such a kind: no
local path or Hugging Face id begins like that.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import httpx2

from sampler.embedded_model import EMBEDDED_MODEL_NAME, Progress
from sampler.engine import Engine
from sampler.engines.chat.dialect import CEREBRAS, COMPATIBLE, OPENAI_CHAT, ChatDialect
from sampler.engines.chat.engine import ChatEngine
from sampler.engines.completions.backend import completions_engine
from sampler.engines.endpoint.client import Endpoint, EndpointSettings
from sampler.engines.vllm.arguments import parse_engine_args
from sampler.engines.vllm.backend import vllm_engine
from sampler.engines.vllm.library import VllmError
from sampler.language import find_model, load_language

CEREBRAS_URL = "https://api.cerebras.ai/v1"
CEREBRAS_CACHE_SECONDS = 300.0
"""How long Cerebras promises to keep what it has read of a prompt."""
_OPENAI_HOST = "api.openai.com"


class Kind(StrEnum):
    """What comes before the colon."""

    CEREBRAS = "cerebras"
    OPENAI_CHAT = "openai-chat"
    OPENAI_COMPLETIONS = "openai-completions"
    VLLM = "vllm"


class EngineChoiceError(ValueError):
    """The engine that was asked for cannot be had like that."""


@dataclass(frozen=True)
class RemoteOptions:
    """What can be chosen of an engine that is somewhere else, or vLLM's."""

    endpoint: str | None = None
    """Its base URL."""
    dialect: str = "vllm"
    """How it is asked for token ids."""
    reasoning_field: str | None = None
    """The member in which it takes thoughts back."""
    tokenizer: str | None = None
    """Where the tokenizer and the chat template of its model are; None is the embedded model."""
    max_concurrent: int = 64
    """Requests in flight at once."""
    patience_seconds: float = 60.0
    """How long a request is tried again."""
    max_tokens: int = 8192
    """Of a segment, where the request says nothing."""
    engine_args: Sequence[str] = ()
    """What vLLM is started with, ``key=value``."""
    max_forced_string: int | None = None
    """See ``GrammarCompiler``, for vLLM; None: what suits the model."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    """Where the API keys are."""


def kind_of(model: str | None) -> Kind | None:
    """Return the kind of ``model``; None where it is to run in this process."""
    kind, colon, _ = (model or "").partition(":")
    return Kind(kind) if colon and kind in list(Kind) else None


def check_is_for_local(options: RemoteOptions) -> None:
    """Make sure that nothing was chosen that means nothing to a model in this process.

    Raises:
        EngineChoiceError: something was.
    """
    kinds = ", ".join(f"{kind}:NAME" for kind in Kind)
    for option, value in (
        ("--endpoint", options.endpoint),
        ("--endpoint-reasoning", options.reasoning_field),
        ("--tokenizer", options.tokenizer),
        ("--engine-arg", options.engine_args),
    ):
        if value:
            raise EngineChoiceError(f"{option} goes with a --model that is elsewhere: {kinds}")


def remote_engine(model: str, options: RemoteOptions, progress: Progress | None = None) -> Engine:
    """Return the engine that ``model`` names, ``KIND:NAME``.

    Args:
        model: of a kind.
        options: what else was chosen.
        progress: see ``load_language``.

    Raises:
        EngineChoiceError: something is missing, or is not what it should be.
        ModelLoadError: there is no such tokenizer.
    """
    kind = kind_of(model)
    assert kind is not None, "who asks has asked for the kind"
    name = model.removeprefix(f"{kind}:")
    if not name:
        raise EngineChoiceError(f"--model {kind}: needs the name of a model behind the colon")
    if kind not in (Kind.CEREBRAS, Kind.VLLM) and options.endpoint is None:
        raise EngineChoiceError(f"--model {model} needs an --endpoint")
    match kind:
        case Kind.CEREBRAS:
            return _cerebras(name, options)
        case Kind.OPENAI_CHAT:
            return ChatEngine(
                name, _endpoint(options), _chat_dialect(options), max_tokens=options.max_tokens
            )
        case Kind.OPENAI_COMPLETIONS:
            return _completions(name, options, progress)
        case Kind.VLLM:
            return _vllm(name, options, progress)


def _cerebras(name: str, options: RemoteOptions) -> ChatEngine:
    if not options.environment.get("CEREBRAS_API_KEY"):
        raise EngineChoiceError(f"--model cerebras:{name} needs a key in CEREBRAS_API_KEY")
    url = options.endpoint or options.environment.get("CEREBRAS_BASE_URL") or CEREBRAS_URL
    return ChatEngine(
        name,
        _endpoint(replace(options, endpoint=url), key="CEREBRAS_API_KEY"),
        CEREBRAS,
        max_tokens=options.max_tokens,
        cache_seconds=CEREBRAS_CACHE_SECONDS,
    )


def _chat_dialect(options: RemoteOptions) -> ChatDialect:
    is_openai = httpx2.URL(options.endpoint or "").host == _OPENAI_HOST
    dialect = OPENAI_CHAT if is_openai else COMPATIBLE
    return replace(dialect, reasoning_field=options.reasoning_field or dialect.reasoning_field)


def _completions(name: str, options: RemoteOptions, progress: Progress | None) -> Engine:
    key = "CEREBRAS_API_KEY" if options.dialect == "cerebras" else "OPENAI_API_KEY"
    language = load_language(options.tokenizer, progress=progress)
    try:
        return completions_engine(
            name,
            _endpoint(options, key=key),
            language,
            dialect=options.dialect,
            max_tokens=options.max_tokens,
        )
    except ValueError as error:
        raise EngineChoiceError(f"--model openai-completions:{name}: {error}") from error


def _vllm(source: str, options: RemoteOptions, progress: Progress | None) -> Engine:
    location, name = find_model(source, progress)
    language = load_language(options.tokenizer or location, progress=progress)
    max_forced_string = options.max_forced_string
    if max_forced_string is None:
        max_forced_string = 64 if name == EMBEDDED_MODEL_NAME else 0
    try:
        return vllm_engine(
            location,
            replace(language, name=name),
            engine_args=parse_engine_args(options.engine_args),
            language_source=options.tokenizer,
            max_forced_string=max_forced_string,
        )
    except VllmError as error:
        raise EngineChoiceError(f"--model vllm:{source}: {error}") from error


def _endpoint(options: RemoteOptions, *, key: str = "OPENAI_API_KEY") -> Endpoint:
    assert options.endpoint is not None, "there is one"
    try:
        settings = EndpointSettings(
            base_url=options.endpoint,
            api_key=options.environment.get(key) or None,
            max_concurrent=options.max_concurrent,
            patience_seconds=options.patience_seconds,
        )
    except (ValueError, httpx2.InvalidURL) as error:
        raise EngineChoiceError(f"--endpoint {options.endpoint}: {error}") from error
    return Endpoint(settings)
