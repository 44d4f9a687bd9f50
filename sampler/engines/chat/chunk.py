"""What one chunk of a streamed chat completion says.

Endpoints agree on little more than the outline of a chunk (OpenAI reference, the chat completion
chunk object). Whatever members they fill, leave out, null or spell in their own way, the rest of
the program sees a few plain values. Only the first choice counts: no other is ever asked for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from protocol.output_items import Logprob, TopLogprob
from protocol.validation import JsonObject
from sampler.engine_error import EngineError
from sampler.engines.chat.json_text import encoded, well_formed
from sampler.engines.endpoint.errors import EndpointError
from sampler.run import StopReason

LEGACY_INDEX = -1
"""The index of the one call that the ``function_call`` of old makes."""

STOP_REASONS: Mapping[str, StopReason] = {
    **dict.fromkeys(("stop", "tool_calls", "function_call"), StopReason.END_OF_TURN),
    "eos": StopReason.END_OF_TURN,  # Together's
    **dict.fromkeys(("eos_token", "stop_sequence"), StopReason.END_OF_TURN),  # Hugging Face's TGI
    "length": StopReason.MAX_OUTPUT_TOKENS,
    "model_length": StopReason.CONTEXT_LENGTH,  # Mistral's
    "content_filter": StopReason.CONTENT_FILTER,
}
"""What the reasons to finish mean. With any other the endpoint has failed: ``error``, ``abort``
(vLLM's, SGLang's), ``insufficient_system_resource`` (DeepSeek's), and those of days to come."""

_IMPOSSIBLE = -9999.0
"""OpenAI's logarithm of zero, which JSON has no number for."""


@dataclass(frozen=True)
class ChatUsage:
    """What a request took, in tokens; 0 where the endpoint does not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those that were not computed again."""
    reasoning_tokens: int = 0
    """Of the completion, those that were thoughts."""


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call; what it does not say is empty."""

    index: int | None
    id: str
    name: str
    arguments: str

    @property
    def is_arguments_only(self) -> bool:
        """Whether nothing tells which call it belongs to, but perhaps the index."""
        return bool(self.arguments) and not self.name and not self.id


@dataclass(frozen=True)
class Chunk:
    """What a chunk says; what it does not say is empty."""

    thought: str = ""
    text: str = ""
    """Of the message, or of a refusal: both are for the reader."""
    logprobs: tuple[Logprob, ...] = ()
    """Of the text's tokens."""
    pieces: tuple[CallPiece, ...] = ()
    finish_reason: str | None = None
    """Why nothing more is said, in the endpoint's word."""
    usage: ChatUsage | None = None
    time_info: Mapping[str, float] | None = None
    """Cerebras' times, in seconds."""

    @property
    def num_bytes(self) -> int:
        """How long all that it says is."""
        called = "".join(piece.name + piece.arguments for piece in self.pieces)
        return len(f"{self.thought}{self.text}{called}".encode())


# --- On the wire ---------------------------------------------------------------------------------


class _Function(Struct):
    name: str | None = None
    arguments: str | JsonObject | None = None


class _Piece(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(Struct):
    content: str | list[Any] | None = None
    reasoning: str | list[Any] | JsonObject | None = None
    reasoning_content: str | list[Any] | None = None
    refusal: str | None = None
    tool_calls: list[_Piece] | None = None
    function_call: _Function | None = None


class _Choice(Struct):
    index: int | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    time_info: Any = None


class _TopToken(Struct):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class _Token(_TopToken):
    top_logprobs: list[_TopToken] | None = None


class _Logprobs(Struct):
    content: list[_Token] | None = None


# --- Reading it ----------------------------------------------------------------------------------


def read_chunk(chunk: JsonObject, *, wants_logprobs: bool = False) -> Chunk:
    """Return what ``chunk`` says.

    Raises:
        EngineError: it is no chunk of a chat completion.
    """
    try:
        return _chunk(msgspec.convert(chunk, _Chunk), wants_logprobs)
    except (msgspec.ValidationError, OverflowError) as error:
        raise EngineError(f"expected a chunk of a chat completion: {error}"[:300]) from None
    except RecursionError:
        raise EngineError("expected a chunk of a chat completion: nested too deeply") from None


def says_something(chunk: JsonObject) -> bool:
    """Tell whether ``chunk`` says anything that a client would be given, or that the turn is over.

    Raises:
        EngineError: as ``read_chunk``.
        EndpointError: it only says that the endpoint has failed.
    """
    said = read_chunk(chunk)
    has_words = bool(said.thought or said.text.strip() or said.pieces)
    return has_words or stop_reason(said) is not None


def stop_reason(said: Chunk) -> StopReason | None:
    """Return why nothing more is said; None where more may be.

    Raises:
        EndpointError: the endpoint has failed.
    """
    if said.finish_reason is None:
        return None
    if said.finish_reason not in STOP_REASONS:
        message = f"the endpoint's answer ended with {said.finish_reason[:80]!r}"
        raise EndpointError(message, is_transient=True)
    return STOP_REASONS[said.finish_reason]


def _chunk(wire: _Chunk, wants_logprobs: bool) -> Chunk:
    usage, time_info = _usage(wire.usage), _time_info(wire.time_info)
    if wire.choices is None:
        if wire.usage is None:
            raise EngineError("expected a chunk of a chat completion: it has no choices, nor usage")
        return Chunk(usage=usage, time_info=time_info)
    choice = _first(wire.choices)
    delta = choice.delta or _Delta()
    thought, text = _said(delta)
    pieces = tuple(_pieces(delta))
    # The tokens of thoughts and calls are not told apart from those of the text.
    is_text_only = not thought and not pieces and (delta.content is not None or delta.refusal)
    logprobs = choice.logprobs if wants_logprobs and is_text_only else None
    return Chunk(
        thought=thought,
        text=text,
        logprobs=() if logprobs is None else tuple(_logprobs(logprobs)),
        pieces=pieces,
        finish_reason=choice.finish_reason or None,
        usage=usage,
        time_info=time_info,
    )


def _first(choices: Iterable[_Choice]) -> _Choice:
    numbered = enumerate(choices)
    found = (choice for i, choice in numbered if (i if choice.index is None else choice.index) == 0)
    return next(found, _Choice())


def _said(delta: _Delta) -> tuple[str, str]:
    """Return the thought and the text of ``delta``. Some endpoints write the same thought twice,
    under both names, and Mistral's puts thoughts among the parts of the content."""
    thought = _text_in(delta.reasoning) or _text_in(delta.reasoning_content)
    if isinstance(delta.content, list):
        thoughts = [part for part in delta.content if _is_thought(part)]
        thought += _text_in(thoughts)
        text = _text_in([part for part in delta.content if not _is_thought(part)])
    else:
        text = _text_in(delta.content)
    return thought, text + _text_in(delta.refusal)


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")


def _text_in(value: Any) -> str:
    """Return the text of a string, of a part, or of a list of them."""
    match value:
        case str():
            return well_formed(value)
        case list():
            return "".join(map(_text_in, value))
        case {"text": inner} | {"thinking": inner} | {"content": inner}:
            return _text_in(inner)
        case _:
            return ""


def _pieces(delta: _Delta) -> Iterable[CallPiece]:
    for wire in delta.tool_calls or ():
        piece = _piece(wire.index, wire.id, wire.function)
        if piece.id or piece.name or piece.arguments:
            yield piece
    if delta.function_call is not None:
        yield _piece(LEGACY_INDEX, None, delta.function_call)


def _piece(index: int | None, call_id: str | None, function: _Function | None) -> CallPiece:
    function = function or _Function()
    arguments = function.arguments
    if isinstance(arguments, dict):
        arguments = encoded(arguments).decode()
    return CallPiece(
        index,
        well_formed(call_id or ""),
        well_formed(function.name or ""),
        well_formed(arguments or ""),
    )


def _logprobs(value: Any) -> Iterable[Logprob]:
    for token in msgspec.convert(value, _Logprobs).content or ():
        top = tuple(TopLogprob(*_spelled(other)) for other in token.top_logprobs or ())
        yield Logprob(*_spelled(token), top_logprobs=top)


def _spelled(token: _TopToken) -> tuple[str, float, tuple[int, ...]]:
    text = well_formed(token.token)
    logprob = _IMPOSSIBLE if token.logprob is None else token.logprob
    return text, logprob, tuple(text.encode() if token.bytes is None else token.bytes)


# --- The books: what cannot be read of them is no reason to end a run ----------------------------


def _usage(value: Any) -> ChatUsage | None:
    """Return what was counted, if anything was."""
    if not isinstance(value, dict) or not any(
        _count(value, name) for name in ("prompt_tokens", "completion_tokens")
    ):
        return None
    prompt, completion = value.get("prompt_tokens_details"), value.get("completion_tokens_details")
    return ChatUsage(
        _count(value, "prompt_tokens"),
        _count(value, "completion_tokens"),
        _count(prompt, "cached_tokens") or _count(value, "prompt_cache_hit_tokens"),  # DeepSeek's
        _count(completion, "reasoning_tokens"),
    )


def _count(value: Any, name: str) -> int:
    count = value.get(name) if isinstance(value, dict) else None
    return count if _is_number(count) and isinstance(count, int) and count > 0 else 0


def _time_info(value: Any) -> Mapping[str, float] | None:
    if not isinstance(value, dict):
        return None
    return {name: number for name, number in value.items() if _is_number(number)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
