"""What a client may ask for: a response, or the continuation of a suspended one.

A member that only tunes or labels may be accepted without effect. A member that constrains or
changes what the answer means may not: to ignore it silently would be a lie, so what this server
cannot do is refused by name. Members that nobody knows are ignored; clients send many.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from protocol import errors
from protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    JsonObject,
    Message,
    UnknownItem,
    check_calls_are_answered,
    convert,
    parse_items,
    without_nulls,
)
from protocol.tools import Tool, ToolChoice, parse_tool_choice, parse_tools

Transport: TypeAlias = Literal["http", "websocket"]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
PositiveInt: TypeAlias = Annotated[int, Meta(ge=1)]


# --- response.create -----------------------------------------------------------------------------


class Reasoning(Struct, frozen=True):
    """Wishes about reasoning, repeated in the response (Open Responses wants both members)."""

    effort: str | None = None
    summary: str | None = None


class _Options(Struct, frozen=True, kw_only=True):
    """The members that stand for themselves, with the defaults of the OpenAI reference."""

    instructions: str | None = None
    parallel_tool_calls: bool = True
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    max_output_tokens: PositiveInt | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None  # our extension
    stream: bool = False
    metadata: Metadata = {}
    # From here on: repeated in the response or ignored, without effect on what is sampled.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str = "default"
    truncation: Literal["auto", "disabled"] = "disabled"
    reasoning: Reasoning | None = None
    include: list[str] = []
    store: bool = True
    max_tool_calls: PositiveInt | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0


class CreateParams(_Options, frozen=True, kw_only=True):
    """A validated ``response.create`` or ``POST /v1/responses`` (OpenAI reference)."""

    model: str
    input: list[InputItem]
    tools: list[Tool]
    tool_choice: ToolChoice
    verbosity: str | None = None


class _TextOptions(Struct, frozen=True):
    format: JsonObject | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _Refusable(Struct, frozen=True, kw_only=True):
    """The members that are refused unless they ask for nothing."""

    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    stream_id: Any = None
    background: bool = False
    generate: bool = True
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    text: _TextOptions = _TextOptions()
    prompt_cache_options: JsonObject = {}


def parse_create(
    body: JsonObject, *, transport: Transport, default_model: str | None = None
) -> CreateParams:
    """Validate a create body. Over WebSocket every response is streamed, whatever it says.

    Raises:
        ProtocolError: at the first member that is wrong; its path is the error's ``param``.
    """
    body = without_nulls(body)
    refusable = convert(body, _Refusable)
    _refuse_what_cannot_be_kept(refusable)
    options = convert(body, _Options)
    tools = parse_tools(body.get("tools"))
    return CreateParams(
        **msgspec.structs.asdict(options)
        | {
            "model": _model(body, default_model),
            "input": _input(body),
            "tools": tools,
            "tool_choice": parse_tool_choice(body.get("tool_choice"), tools),
            "stream": options.stream or transport == "websocket",
            "verbosity": refusable.text.verbosity,
        }
    )


def _model(body: JsonObject, default: str | None) -> str:
    model = convert(body.get("model", default or ""), str, "model")
    if not model:
        raise errors.missing_required_parameter("model")
    return model


def _input(body: JsonObject) -> list[InputItem]:
    items = _parse_nonempty_input(body)
    if all(isinstance(item, UnknownItem) for item in items):
        raise errors.invalid_value("input", "expected an item that the model can see")
    check_calls_are_answered(items)
    return items


def _parse_nonempty_input(body: JsonObject) -> list[InputItem]:
    if body.get("input") in (None, []):
        raise errors.missing_required_parameter("input")
    return parse_items(body["input"])


def _refuse_what_cannot_be_kept(asked: _Refusable) -> None:
    if asked.previous_response_id is not None:
        raise errors.previous_response_not_found(asked.previous_response_id)
    for param, is_asked, why in (
        ("conversation", asked.conversation is not None, "conversations are not stored"),
        ("prompt", asked.prompt is not None, "prompts are not stored"),
        ("stream_id", asked.stream_id is not None, "a connection has one lane"),
        ("background", asked.background, "responses end with their request"),
        ("generate", not asked.generate, "every create samples"),
        (
            "prompt_cache_options.prewarm",
            asked.prompt_cache_options.get("prewarm") is True,
            "every create samples",
        ),
        ("top_logprobs", asked.top_logprobs > 0, "log probabilities are not returned"),
        (
            "text.format",
            (asked.text.format or {"type": "text"}).get("type") != "text",
            "only {'type': 'text'}",
        ),
    ):
        if is_asked:
            raise errors.unsupported_parameter(param, why)


# --- response.append -----------------------------------------------------------------------------


class AppendParams(Struct, frozen=True):
    """A validated ``response.append``: new items, and our extension of a choice for the segment."""

    input: list[InputItem]
    tool_choice: ToolChoice | None


class ResolvedAppend(Struct, frozen=True):
    """What an append adds to a suspended response."""

    outputs: dict[str, str]  # by call_id
    messages: list[Message]


def parse_append(frame: JsonObject, tools: Sequence[Tool]) -> AppendParams:
    """Validate a ``response.append`` frame (Codex 0.87 to 0.107) for a response with ``tools``."""
    frame = without_nulls(frame)
    if "stream_id" in frame:
        raise errors.unsupported_parameter("stream_id", "a connection has one lane")
    items = _parse_nonempty_input(frame)
    choice = frame.get("tool_choice")
    return AppendParams(items, None if choice is None else parse_tool_choice(choice, tools))


def resolve_append(
    items: Sequence[InputItem],
    awaited: Collection[str],
    answered: Mapping[str, str],
    sampled_call_ids: Collection[str],
) -> ResolvedAppend:
    """Sort out what is new in ``items``; nothing is changed here, so an error changes nothing.

    Codex up to 0.99 echoes what the model wrote. Echoes are dropped: calls by their ``call_id``,
    since other clients write the arguments anew, and the assistant's messages and reasoning
    altogether, since only the model speaks for the assistant inside a response.

    Args:
        items: the ``input`` of the append.
        awaited: calls whose outputs the suspended response waits for.
        answered: outputs that earlier appends of this suspension brought.
        sampled_call_ids: every call that this response made.
    """
    outputs: dict[str, str] = {}
    messages: list[Message] = []
    for i, item in enumerate(items):
        param = f"input[{i}].call_id"
        match item:
            case FunctionCallOutput(call_id=call_id, output=output):
                if call_id not in sampled_call_ids:
                    raise errors.unknown_call_id(call_id, param)
                if call_id in answered or call_id in outputs or call_id not in awaited:
                    raise errors.duplicate_call_id(call_id, param)
                outputs[call_id] = output
            case FunctionCall(call_id=call_id) if call_id not in sampled_call_ids:
                raise errors.unknown_call_id(call_id, param)
            case Message(role="user" | "system" | "developer"):
                messages.append(item)
            case _:
                pass
    return ResolvedAppend(outputs, messages)
