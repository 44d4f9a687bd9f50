"""What a client may ask for: a response, or that one goes on.

A member that only tunes or labels may be accepted without effect. A member that constrains or
changes what the answer means may not: to ignore it silently would be a lie, so what this server
cannot do is refused by name. Members that nobody knows are ignored where clients send many, in a
create and an append; an inject and a steer are small and say exactly what they say.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from protocol import errors
from protocol.errors import ProtocolError
from protocol.items import (
    AdditionalTools,
    CallOutput,
    CustomToolCall,
    FunctionCall,
    InputItem,
    Message,
    ReasoningItem,
    UnknownItem,
    parse_items,
)
from protocol.tools import (
    Tool,
    ToolChoice,
    ToolName,
    check_tool_choice,
    parse_tool_choice,
    parse_tools,
    tools_digest,
)
from protocol.validation import JsonObject, convert, without_nulls

Transport: TypeAlias = Literal["http", "websocket"]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
PositiveInt: TypeAlias = Annotated[int, Meta(ge=1)]
StreamId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,256}\Z")]

LOGPROBS = "message.output_text.logprobs"
"""The entry of ``include`` that asks for log probabilities."""


# --- response.create -----------------------------------------------------------------------------


class ReasoningOptions(Struct, frozen=True):
    """Wishes about reasoning, repeated in the response (Open Responses wants both members).

    The effort is any string: some client always knows one more of them.
    """

    effort: str | None = None
    summary: str | None = None


class TextFormatKind(StrEnum):
    TEXT = "text"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"


class TextFormat(Struct, frozen=True):
    """What the text of the answer has to be; all but ``kind`` belongs to a schema."""

    kind: TextFormatKind = TextFormatKind.TEXT
    name: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None

    def echo(self) -> JsonObject:
        """Return the format as a response repeats it."""
        if self.kind is not TextFormatKind.JSON_SCHEMA:
            return {"type": self.kind.value}
        return {
            "type": self.kind.value,
            "name": self.name,
            "description": self.description,
            "schema": self.schema,
            "strict": bool(self.strict),
        }


class _Options(Struct, frozen=True, kw_only=True):
    """The members that stand for themselves, with the defaults of the OpenAI reference."""

    instructions: str | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool = True
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    max_output_tokens: PositiveInt | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None  # our extension
    truncation: Literal["auto", "disabled"] = "disabled"
    reasoning: ReasoningOptions | None = None
    include: list[str] = []
    stream: bool = False
    store: bool = True
    background: bool = False
    generate: bool = True
    """False: prepare for what comes next, and sample nothing."""
    metadata: Metadata = {}
    # From here on: repeated in the response or ignored, without effect on what is sampled.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str = "default"
    max_tool_calls: PositiveInt | None = None


class CreateParams(_Options, frozen=True, kw_only=True):
    """A validated ``response.create`` or ``POST /v1/responses`` (OpenAI reference)."""

    model: str
    input: list[InputItem]
    input_json: list[JsonObject]
    """The input as it came, for whoever asks for a stored response's input items."""
    tools: list[Tool]
    tools_digest: bytes
    tool_choice: ToolChoice
    """As asked. What it comes to is for ``resolve_tool_choice`` to say."""
    text_format: TextFormat = TextFormat()
    verbosity: str | None = None
    compact_threshold: int | None = None
    """Compact the conversation when it is longer than this, in tokens."""
    include_obfuscation: bool = False
    """Unlike upstream off unless asked for: it hides lengths from a network, where there is one."""

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer's tokens are to come with their log probabilities."""
        return self.top_logprobs > 0 or LOGPROBS in self.include


class _PlainFormat(Struct, tag_field="type", tag="text"):
    pass


class _JsonFormat(Struct, tag_field="type", tag="json_object"):
    pass


class _SchemaFormat(Struct, tag_field="type", tag="json_schema"):
    name: ToolName
    schema: JsonObject
    strict: bool | None = None
    description: str | None = None


class _TextOptions(Struct, frozen=True):
    format: _PlainFormat | _JsonFormat | _SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _StreamOptions(Struct, frozen=True):
    include_obfuscation: bool | None = None


class _CacheOptions(Struct, frozen=True):
    prewarm: bool | None = None


class _Nested(Struct, kw_only=True):
    """The members that are read and put elsewhere."""

    text: _TextOptions = _TextOptions()
    stream_options: _StreamOptions = _StreamOptions()
    prompt_cache_options: _CacheOptions = _CacheOptions()
    context_management: list[JsonObject] = []


class _Compaction(Struct):
    compact_threshold: Annotated[int, Meta(ge=1000)] | None = None


def parse_create(
    body: JsonObject, *, transport: Transport, default_model: str | None = None
) -> CreateParams:
    """Validate a create body. Over WebSocket every response is streamed, whatever it says.

    What only the whole conversation can tell is left to whoever has it: that every call has its
    output (``check_calls_are_answered``) and that the tool choice can be honoured
    (``resolve_tool_choice``).

    Raises:
        ProtocolError: at the first member that is wrong; its path is the error's ``param``.
    """
    body = without_nulls(body)
    options = convert(body, _Options)
    nested = convert(body, _Nested)
    _refuse_what_cannot_be_kept(body, options, transport)
    generate = options.generate and not nested.prompt_cache_options.prewarm
    may_be_empty = options.previous_response_id is not None or not generate
    return CreateParams(
        **msgspec.structs.asdict(options)
        | {
            "generate": generate,
            "model": _model(body, default_model),
            "input": _optional_input(body) if may_be_empty else _visible_input(body),
            "input_json": input_json(body.get("input", [])),
            "tools": parse_tools(body.get("tools")),
            "tools_digest": tools_digest(body.get("tools")),
            "tool_choice": parse_tool_choice(body.get("tool_choice")),
            "text_format": _text_format(nested.text),
            "verbosity": nested.text.verbosity,
            "compact_threshold": _compact_threshold(nested.context_management),
            "include_obfuscation": bool(nested.stream_options.include_obfuscation),
            "stream": options.stream or transport == "websocket",
        }
    )


def _refuse_what_cannot_be_kept(body: JsonObject, options: _Options, transport: Transport) -> None:
    in_background = options.background
    for param, is_asked, why in (
        ("conversation", "conversation" in body, "conversations are not stored"),
        ("prompt", "prompt" in body, "prompts are not stored"),
        ("background", in_background and transport == "websocket", "not over WebSocket"),
        ("background", in_background and not options.store, "needs `store`, to be found again"),
    ):
        if is_asked:
            raise errors.unsupported_parameter(param, why)


def _model(body: JsonObject, default: str | None) -> str:
    model = convert(body.get("model", default or ""), str, "model")
    if not model:
        raise errors.missing_required_parameter("model")
    return model


def _optional_input(body: JsonObject) -> list[InputItem]:
    return parse_items(body.get("input", []))


def _nonempty_input(body: JsonObject) -> list[InputItem]:
    if body.get("input") in (None, []):
        raise errors.missing_required_parameter("input")
    return parse_items(body["input"])


def _visible_input(body: JsonObject) -> list[InputItem]:
    items = _nonempty_input(body)
    if all(isinstance(item, UnknownItem | AdditionalTools | ReasoningItem) for item in items):
        raise errors.invalid_value("input", "expected an item that the model can answer")
    return items


def input_json(value: Any) -> list[JsonObject]:
    """Return a validated ``input`` as the items it stands for."""
    if isinstance(value, list):
        return value
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]


def _text_format(text: _TextOptions) -> TextFormat:
    match text.format:
        case _SchemaFormat(name, schema, strict, description):
            return TextFormat(TextFormatKind.JSON_SCHEMA, name, schema, strict, description)
        case _JsonFormat():
            return TextFormat(TextFormatKind.JSON_OBJECT)
        case _:
            return TextFormat()


def _compact_threshold(entries: list[JsonObject]) -> int | None:
    """Return the threshold of the last entry that has one. Without one, the choice is ours."""
    threshold = None
    for i, entry in enumerate(entries):
        if entry.get("type") == "compaction":
            found = convert(entry, _Compaction, f"context_management[{i}]").compact_threshold
            threshold = threshold if found is None else found
    return threshold


def resolve_tool_choice(params: CreateParams, tools: Iterable[Tool]) -> ToolChoice:
    """Return the tool choice of ``params``, which can be honoured with ``tools``.

    Args:
        params: a create.
        tools: all that the model sees: those of ``params``, and those that items of the
            conversation declare, whichever request brought them.

    Raises:
        ProtocolError: a tool is named that is not there, or a call is required and none possible.
    """
    check_tool_choice(params.tool_choice, tools)
    return params.tool_choice


def parse_input_tokens(body: JsonObject, *, default_model: str | None = None) -> CreateParams:
    """Validate a ``POST /v1/responses/input_tokens``: a create that samples nothing."""
    return parse_create(body | {"generate": False}, transport="http", default_model=default_model)


class CompactParams(Struct, frozen=True):
    """A validated ``POST /v1/responses/compact`` (OpenAI reference)."""

    model: str
    input: list[InputItem]
    previous_response_id: str | None
    instructions: str | None


class _CompactOptions(Struct):
    previous_response_id: str | None = None
    instructions: str | None = None


def parse_compact(body: JsonObject, *, default_model: str | None = None) -> CompactParams:
    """Validate a compact body: what to compact is in its input, in an earlier response, or both."""
    body = without_nulls(body)
    options = convert(body, _CompactOptions)
    return CompactParams(
        _model(body, default_model),
        _nonempty_input(body) if options.previous_response_id is None else _optional_input(body),
        options.previous_response_id,
        options.instructions,
    )


# --- The lane ------------------------------------------------------------------------------------


def parse_stream_id(frame: JsonObject) -> str | None:
    """Return the name of the lane that a frame belongs to; the default lane has none."""
    try:
        return msgspec.convert(frame.get("stream_id"), StreamId | None)
    except msgspec.ValidationError:
        raise errors.invalid_stream_id() from None


# --- response.append -----------------------------------------------------------------------------


class AppendParams(Struct, frozen=True):
    """A validated ``response.append``: new items, and our extension of a choice for the segment."""

    input: list[InputItem]
    input_json: list[JsonObject]
    tool_choice: ToolChoice | None


class ResolvedAppend(Struct, frozen=True):
    """What an append adds to a suspended response."""

    outputs: dict[str, str]  # by call_id
    messages: list[Message]


def parse_append(frame: JsonObject, tools: Iterable[Tool]) -> AppendParams:
    """Validate a ``response.append`` frame (Codex 0.87 to 0.107) for a response with ``tools``.

    That it may say a ``stream_id`` is our extension.
    """
    frame = without_nulls(frame)
    items = _nonempty_input(frame)
    choice = parse_tool_choice(frame["tool_choice"]) if "tool_choice" in frame else None
    if choice is not None:
        check_tool_choice(choice, tools)
    return AppendParams(items, input_json(frame["input"]), choice)


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
            case CallOutput(call_id=call_id, output=output):
                if call_id not in sampled_call_ids:
                    raise errors.unknown_call_id(call_id, param)
                if call_id in answered or call_id in outputs or call_id not in awaited:
                    raise errors.duplicate_call_id(call_id, param)
                outputs[call_id] = output
            case FunctionCall(call_id=call_id) | CustomToolCall(call_id=call_id):
                if call_id not in sampled_call_ids:
                    raise errors.unknown_call_id(call_id, param)
            case Message(role="user" | "system" | "developer"):
                messages.append(item)
            case AdditionalTools():
                raise errors.unsupported_parameter(f"input[{i}]", "a response keeps its tools")
            case _:
                pass
    return ResolvedAppend(outputs, messages)


# --- response.inject and response.steer ----------------------------------------------------------


class InjectParams(Struct, frozen=True):
    """A validated ``response.inject`` (OpenAI reference, WebSocket events)."""

    response_id: str
    outputs: list[CallOutput]
    raw_input: Any
    """The input as it came: what is not committed is returned to the last byte."""


class SteerParams(Struct, frozen=True):
    """A validated ``response.steer`` (OpenAI reference, WebSocket events)."""

    previous_response_id: str
    messages: list[Message]
    raw_input: Any


class _InjectFrame(Struct, forbid_unknown_fields=True):
    type: str
    response_id: str
    input: list[JsonObject]


class _SteerFrame(Struct, forbid_unknown_fields=True):
    type: str
    previous_response_id: str
    input: str | list[JsonObject]


def parse_inject(frame: JsonObject) -> InjectParams:
    """Validate a ``response.inject`` frame: outputs of calls, and nothing besides."""
    inject = convert(frame, _InjectFrame)
    items = _nonempty_input(frame)
    outputs = [item for item in items if isinstance(item, CallOutput)]
    if len(outputs) < len(items):
        raise errors.invalid_value("input", "expected outputs of calls only")
    return InjectParams(inject.response_id, outputs, inject.input)


def parse_steer(frame: JsonObject) -> SteerParams:
    """Validate a ``response.steer`` frame: what a user says, and nothing besides.

    Raises:
        ProtocolError: ``invalid_input``, whatever is wrong.
    """
    try:
        return _parse_steer(frame)
    except ProtocolError as error:
        raise errors.invalid_input(error.message, error.param) from None


def _parse_steer(frame: JsonObject) -> SteerParams:
    steer = convert(frame, _SteerFrame)
    items = _nonempty_input(frame)
    messages = [item for item in items if isinstance(item, Message) and item.role == "user"]
    if len(messages) < len(items):
        raise errors.invalid_value("input", "expected messages of the user only")
    return SteerParams(steer.previous_response_id, messages, steer.input)
