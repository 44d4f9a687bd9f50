"""Input items: what a conversation is made of.

Input is normalised here, once: whatever mixture of strings, part lists and missing ``type`` members
a client sends, the rest of the program sees a few plain structs.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from protocol import errors
from protocol.sealed import unseal
from protocol.tools import CallableTool, Tool, callable_tools, parse_tools, qualified
from protocol.validation import JsonObject, convert, without_nulls

Role: TypeAlias = Literal["user", "assistant", "system", "developer"]
CallId: TypeAlias = Annotated[str, Meta(min_length=1)]


# --- The items -----------------------------------------------------------------------------------


class _Item(Struct, frozen=True, tag_field="kind", tag=True):
    """Tagged by its class, so that a conversation can be stored and read back."""


class Message(_Item, frozen=True):
    """A message, its content joined to one string; only the assistant's keep their id."""

    role: Role
    text: str
    id: str | None = None


class FunctionCall(_Item, frozen=True):
    """A call the model made earlier, as the client echoes it."""

    call_id: CallId
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None

    @property
    def qualified_name(self) -> str:
        """The name that the model knows the tool by."""
        return qualified(self.namespace, self.name)


class CustomToolCall(_Item, frozen=True):
    """A call of a free-form tool."""

    call_id: CallId
    name: str
    input: str
    namespace: str | None = None
    id: str | None = None

    @property
    def qualified_name(self) -> str:
        """The name that the model knows the tool by."""
        return qualified(self.namespace, self.name)


class CallOutput(_Item, frozen=True):
    """What the client's tool answered, its parts joined to one string."""

    call_id: CallId
    output: str


class ReasoningItem(_Item, frozen=True):
    """What a model thought before it spoke."""

    text: str
    id: str | None = None


class Compaction(_Item, frozen=True):
    """A summary in the place of what was said before."""

    summary: str
    id: str | None = None


class ItemReference(_Item, frozen=True):
    """An item that this server made, by its id; ``param`` is where it stands in the request."""

    id: str
    param: str


class AdditionalTools(_Item, frozen=True):
    """Tools that are declared within the input."""

    tools: tuple[Tool, ...]


class UnknownItem(_Item, frozen=True):
    """An item of a kind the model cannot see: tolerated, never rendered."""

    type: str


InputItem: TypeAlias = (
    Message
    | FunctionCall
    | CustomToolCall
    | CallOutput
    | ReasoningItem
    | Compaction
    | ItemReference
    | AdditionalTools
    | UnknownItem
)


# --- Reading them --------------------------------------------------------------------------------


class _WireMessage(Struct):
    role: Role
    content: str | list[JsonObject]
    id: str | None = None


class _WireFunctionCall(Struct):
    call_id: CallId
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None


class _WireCustomToolCall(Struct):
    call_id: CallId
    name: str
    input: str
    namespace: str | None = None
    id: str | None = None


class _WireOutput(Struct):
    call_id: CallId
    output: str | list[Any] | JsonObject


class _WireReasoning(Struct):
    content: list[JsonObject] = []
    summary: list[JsonObject] = []
    encrypted_content: str = ""
    id: str | None = None


class _WireCompaction(Struct):
    encrypted_content: str
    id: str | None = None


class _WireReference(Struct):
    id: str


class _WireAdditionalTools(Struct):
    tools: list[JsonObject]


def parse_items(value: Any, param: str = "input") -> list[InputItem]:
    """Normalise an ``input`` (OpenAI reference, create a response); a string is one user message.

    Ids on what the client's side said are read over: Codex invents them, so they refer to nothing.
    A call that the history marks as cut short and does not answer is not seen either: nobody ran
    it, so nobody can say what came of it.
    """
    if isinstance(value, str):
        return [Message("user", value)]
    wire = [without_nulls(item) for item in convert(value, list[JsonObject], param)]
    items = [_parse_item(item, f"{param}[{i}]") for i, item in enumerate(wire)]
    answered = {item.call_id for item in items if isinstance(item, CallOutput)}
    return [
        UnknownItem(source["type"]) if _is_left_open(item, source, answered) else item
        for item, source in zip(items, wire, strict=True)
    ]


def _is_left_open(item: InputItem, source: JsonObject, answered: set[str]) -> bool:
    return (
        isinstance(item, FunctionCall | CustomToolCall)
        and source.get("status") == "incomplete"
        and item.call_id not in answered
    )


def _parse_item(item: JsonObject, param: str) -> InputItem:
    match _item_type(item, param):
        case "message":
            return _parse_message(item, param)
        case "function_call":
            call = convert(item, _WireFunctionCall, param)
            return FunctionCall(call.call_id, call.name, call.arguments, call.namespace, call.id)
        case "custom_tool_call":
            custom = convert(item, _WireCustomToolCall, param)
            return CustomToolCall(
                custom.call_id, custom.name, custom.input, custom.namespace, custom.id
            )
        case "function_call_output" | "custom_tool_call_output":
            answer = convert(item, _WireOutput, param)
            return CallOutput(answer.call_id, _output_text(answer.output, f"{param}.output"))
        case "reasoning":
            return _parse_reasoning(item, param)
        case "compaction" | "compaction_summary":
            return _parse_compaction(item, param)
        case "item_reference":
            return ItemReference(convert(item, _WireReference, param).id, param)
        case "additional_tools":
            tools = convert(item, _WireAdditionalTools, param).tools
            return AdditionalTools(tuple(parse_tools(tools, f"{param}.tools")))
        case other:
            return UnknownItem(other)


def _item_type(item: JsonObject, param: str) -> str:
    """Return the type, guessing it where the OpenAI schema makes it optional."""
    if "type" in item:
        return convert(item["type"], str, f"{param}.type")
    if "role" in item:
        return "message"
    if "id" in item:
        return "item_reference"
    raise errors.missing_required_parameter(f"{param}.type")


def _parse_message(item: JsonObject, param: str) -> Message:
    message = convert(item, _WireMessage, param)
    text = _content_text(message.content, f"{param}.content")
    return Message(message.role, text, message.id if message.role == "assistant" else None)


def _parse_reasoning(item: JsonObject, param: str) -> ReasoningItem:
    """Take the fullest text there is; what another server has sealed is a thought without words."""
    wire = convert(item, _WireReasoning, param)
    text = _thought(wire.content) or _thought(wire.summary)
    if not text and wire.encrypted_content:
        try:
            text = unseal(wire.encrypted_content)
        except ValueError:
            text = ""
    return ReasoningItem(text, wire.id)


def _thought(parts: list[JsonObject]) -> str:
    return "".join(text for part in parts if isinstance(text := part.get("text"), str))


def _parse_compaction(item: JsonObject, param: str) -> Compaction:
    """Without its text the conversation has lost its beginning, so that is an error."""
    wire = convert(item, _WireCompaction, param)
    try:
        return Compaction(unseal(wire.encrypted_content), wire.id)
    except ValueError as error:
        raise errors.invalid_value(f"{param}.encrypted_content", str(error)) from None


# --- Their content -------------------------------------------------------------------------------


def _content_text(content: str | list[JsonObject], param: str) -> str:
    """Join the parts with nothing between them: we add no characters the peer did not send."""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part_text(part: JsonObject, param: str) -> str:
    text = _known_part_text(part, param)
    if text is not None:
        return text
    if part.get("type") is None:
        raise errors.missing_required_parameter(f"{param}.type")
    raise errors.unexpected_value(f"{param}.type", part["type"], "a text part")


def _output_text(output: Any, param: str) -> str:
    """Join the parts; what is not a known part is data of the tool, which the model reads as JSON.

    A tool's answer was not written by whoever made the request, so its shape is no reason to
    refuse that.
    """
    if isinstance(output, str):
        return output
    if isinstance(output, list):
        return "".join(_output_part_text(part, f"{param}[{i}]") for i, part in enumerate(output))
    return _json_text(output)


def _output_part_text(part: Any, param: str) -> str:
    text = _known_part_text(part, param) if isinstance(part, dict) else None
    return _json_text(part) if text is None else text


def _json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _known_part_text(part: JsonObject, param: str) -> str | None:
    """Return the text of a part, or None where parts of its kind are not known."""
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return _text_member(part, "text", param)
        case "refusal":
            return _text_member(part, "refusal", param)
        case ("input_image" | "input_file" | "input_audio" | "input_video") as media:
            raise errors.unsupported_content(media, param)
        case _:
            return None


def _text_member(part: JsonObject, name: str, param: str) -> str:
    if part.get(name) is None:
        raise errors.missing_required_parameter(f"{param}.{name}")
    return convert(part[name], str, f"{param}.{name}")


# --- What a whole conversation says --------------------------------------------------------------


def tools_in_effect(tools: Iterable[Tool], items: Iterable[object]) -> list[CallableTool]:
    """Return what the model may call: ``tools``, and those that a conversation's items declare.

    A declaration replaces an earlier one of the same name, as Codex repeats its own.
    """
    declared = [tool for item in items if isinstance(item, AdditionalTools) for tool in item.tools]
    by_name = {tool.name: tool for tool in callable_tools([*tools, *declared])}
    return list(by_name.values())


def check_calls_are_answered(items: Sequence[InputItem], param: str = "input") -> None:
    """Check that every call has its one output after it, and every output its call before it.

    Chat templates place an output by the call it answers; one without the other cannot be rendered.
    The OpenAI API refuses both with the messages used here. It is the whole conversation that
    counts, with what was said before this request, so the error names no item of the request.

    Raises:
        ProtocolError: with ``param``, which is where the conversation goes on in the request.
    """
    called: set[str] = set()
    answered: set[str] = set()
    for item in items:
        match item:
            case FunctionCall(call_id=call_id) | CustomToolCall(call_id=call_id):
                _add_once(called, call_id, param)
            case CallOutput(call_id=call_id):
                if call_id not in called:
                    raise errors.orphan_output(call_id, param)
                _add_once(answered, call_id, param)
            case _:
                pass
    if unanswered := sorted(called - answered):
        raise errors.unanswered_call(unanswered[0], param)


def _add_once(seen: set[str], call_id: str, param: str) -> None:
    if call_id in seen:
        raise errors.duplicate_call_id(call_id, param)
    seen.add(call_id)
