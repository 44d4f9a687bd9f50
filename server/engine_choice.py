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
from sampler.engines.endpoint.client import Endpoint, EndpointSettings, EndpointSettingsError
from sampler.engines.vllm.arguments import parse_engine_args
from sampler.engines.vllm.backend import vllm_engine
from sampler.engines.vllm.library import VllmError
from sampler.language import find_model, load_language, model_name
from server.settings import Settings

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
    max_concurrent: int = EndpointSettings.max_concurrent
    """Requests in flight at once."""
    patience_seconds: float = EndpointSettings.patience_seconds
    """How long a request is tried again."""
    silence_seconds: float = EndpointSettings.read_timeout_seconds
    """How long it may say nothing."""
    omitted: frozenset[str] = EndpointSettings.omitted
    """Members that it does not take."""
    max_tokens_member: str = EndpointSettings.max_tokens_member
    """The member that bounds what is sampled, where it is asked with messages."""
    max_tokens: int = 8192
    """Of a segment, where the request says nothing."""
    engine_args: Sequence[str] = ()
    """What vLLM is started with, ``key=value``."""
    suspend_ttl_seconds: float = Settings.suspend_ttl_seconds
    """How long vLLM keeps the cache of a suspended run, at most."""
    max_forced_string: int | None = None
    """See ``GrammarCompiler``, for vLLM; None: what suits the model."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    """Where the API keys are."""


_CHAT = frozenset({Kind.CEREBRAS, Kind.OPENAI_CHAT})
_ENDPOINTS = _CHAT | {Kind.OPENAI_COMPLETIONS}

_CONCERNS: Mapping[str, tuple[str, frozenset[Kind]]] = {
    "endpoint": ("--endpoint", _ENDPOINTS),
    "dialect": ("--endpoint-dialect", frozenset({Kind.OPENAI_COMPLETIONS})),
    "reasoning_field": ("--endpoint-reasoning", _CHAT),
    "tokenizer": ("--tokenizer", frozenset({Kind.OPENAI_COMPLETIONS, Kind.VLLM})),
    "max_concurrent": ("--endpoint-concurrency", _ENDPOINTS),
    "patience_seconds": ("--endpoint-patience", _ENDPOINTS),
    "silence_seconds": ("--endpoint-silence", _ENDPOINTS),
    "omitted": ("--endpoint-omit", _ENDPOINTS),
    "max_tokens_member": ("--endpoint-max-tokens-member", _CHAT),
    "engine_args": ("--engine-arg", frozenset({Kind.VLLM})),
}
"""For each of the ``RemoteOptions`` that not all engines have: its name, and who has it."""

_OPTIONS_OF_SETTINGS = {
    "max_concurrent": "--endpoint-concurrency",
    "read_timeout_seconds": "--endpoint-silence",
    "max_tokens_member": "--endpoint-max-tokens-member",
    "omitted": "--endpoint-omit",
}
"""What is chosen by which, of the ``EndpointSettings`` that can be wrong."""


def kind_of(model: str | None) -> Kind | None:
    """Return the kind of ``model``; None where it is to run in this process."""
    kind, colon, _ = (model or "").partition(":")
    return Kind(kind) if colon and kind in list(Kind) else None


def name_of(model: str | None) -> str:
    """Return what clients will call the model that ``model`` names.

    Raises:
        ModelLoadError: there is no such directory, or no name, or it cannot be looked for.
    """
    if model is None or (kind := kind_of(model)) is None:
        return model_name(model)
    name = model.removeprefix(f"{kind}:")
    return model_name(name) if kind is Kind.VLLM else name


def check_choice(model: str | None, options: RemoteOptions) -> None:
    """Make sure that the engine which ``model`` names could be had with ``options``, as far as that
    can be told from what was chosen.

    Raises:
        EngineChoiceError: something is missing, is not what it should be, or means nothing to an
            engine of this kind.
    """
    kind = kind_of(model)
    _check_concerns(kind, options)
    if model is None or kind is None:
        return
    if model == f"{kind}:":
        raise EngineChoiceError(f"--model {model} needs the name of a model behind the colon")
    if kind in _ENDPOINTS:
        _endpoint_settings(model, options)


def _check_concerns(kind: Kind | None, options: RemoteOptions) -> None:
    """Make sure that nothing was chosen that means nothing to an engine of this kind."""
    usual = RemoteOptions()
    for member, (option, kinds) in _CONCERNS.items():
        if kind not in kinds and getattr(options, member) != getattr(usual, member):
            named = " or ".join(f"{kind}:NAME" for kind in Kind if kind in kinds)
            raise EngineChoiceError(f"{option} goes with --model {named} only")


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
    check_choice(model, options)
    kind = kind_of(model)
    assert kind is not None, "who asks has asked for the kind"
    name = model.removeprefix(f"{kind}:")
    match kind:
        case Kind.CEREBRAS:
            return _cerebras(name, _endpoint(model, options), options)
        case Kind.OPENAI_CHAT:
            return _openai_chat(name, _endpoint(model, options), options)
        case Kind.OPENAI_COMPLETIONS:
            return _completions(name, _endpoint(model, options), options, progress)
        case Kind.VLLM:
            return _vllm(name, options, progress)


def _cerebras(name: str, endpoint: Endpoint, options: RemoteOptions) -> ChatEngine:
    return _chat(name, endpoint, CEREBRAS, options, cache_seconds=CEREBRAS_CACHE_SECONDS)


def _openai_chat(name: str, endpoint: Endpoint, options: RemoteOptions) -> ChatEngine:
    is_openai = httpx2.URL(endpoint.settings.base_url).host == _OPENAI_HOST
    return _chat(name, endpoint, OPENAI_CHAT if is_openai else COMPATIBLE, options)


def _chat(
    name: str,
    endpoint: Endpoint,
    dialect: ChatDialect,
    options: RemoteOptions,
    *,
    cache_seconds: float | None = None,
) -> ChatEngine:
    reasoning_field = options.reasoning_field or dialect.reasoning_field
    return ChatEngine(
        name,
        endpoint,
        replace(dialect, reasoning_field=reasoning_field),
        max_tokens=options.max_tokens,
        cache_seconds=cache_seconds,
    )


def _completions(
    name: str, endpoint: Endpoint, options: RemoteOptions, progress: Progress | None
) -> Engine:
    language = load_language(options.tokenizer, progress=progress)
    try:
        return completions_engine(
            name,
            endpoint,
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
            suspend_ttl_seconds=options.suspend_ttl_seconds,
            max_forced_string=max_forced_string,
        )
    except VllmError as error:
        raise EngineChoiceError(f"--model vllm:{source}: {error}") from error


def _endpoint(model: str, options: RemoteOptions) -> Endpoint:
    return Endpoint(_endpoint_settings(model, options))


def _endpoint_settings(model: str, options: RemoteOptions) -> EndpointSettings:
    """Return how the endpoint of ``model`` is spoken to.

    Raises:
        EngineChoiceError: there is no URL or no key, or an option is not what it should be.
    """
    key = _key_variable(model, options)
    api_key = options.environment.get(key) or None
    if kind_of(model) is Kind.CEREBRAS and api_key is None:
        raise EngineChoiceError(f"--model {model} needs a key in {key}")
    url = _url_of(model, options)
    try:
        return EndpointSettings(
            base_url=url,
            api_key=api_key,
            max_concurrent=options.max_concurrent,
            patience_seconds=options.patience_seconds,
            read_timeout_seconds=options.silence_seconds,
            max_tokens_member=options.max_tokens_member,
            omitted=options.omitted,
        )
    except EndpointSettingsError as error:
        places = {"base_url": f"endpoint {url}", "api_key": key, **_OPTIONS_OF_SETTINGS}
        raise EngineChoiceError(f"{places[error.member]}: {error}") from error


def _key_variable(model: str, options: RemoteOptions) -> str:
    """Return the variable of the environment that holds the key."""
    is_cerebras = kind_of(model) is Kind.CEREBRAS or options.dialect == "cerebras"
    return "CEREBRAS_API_KEY" if is_cerebras else "OPENAI_API_KEY"


def _url_of(model: str, options: RemoteOptions) -> str:
    if options.endpoint is not None:
        return options.endpoint
    if kind_of(model) is not Kind.CEREBRAS:
        raise EngineChoiceError(f"--model {model} needs an --endpoint")
    return options.environment.get("CEREBRAS_BASE_URL") or CEREBRAS_URL
