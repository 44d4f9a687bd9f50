"""Items: what goes into a response and what comes out of it.

Input is normalised here, once: whatever mixture of strings, part lists and missing ``type`` members
a client sends, the rest of the program sees three plain structs. Output items are the structs that
go on the wire.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from protocol import errors

JsonObject: TypeAlias = dict[str, Any]
Role: TypeAlias = Literal["user", "assistant", "system", "developer"]
CallId: TypeAlias = Annotated[str, Meta(min_length=1)]
T = TypeVar("T")


# --- Input ---------------------------------------------------------------------------------------


class Message(Struct, frozen=True):
    """A message, its content joined to one string."""

    role: Role
    text: str


class FunctionCall(Struct, frozen=True):
    """A call the model made earlier, as the client echoes it."""

    call_id: CallId
    name: str
    arguments: str


class FunctionCallOutput(Struct, frozen=True):
    """What the client's tool answered, its parts joined to one string."""

    call_id: CallId
    output: str


class UnknownItem(Struct, frozen=True):
    """An item of a kind the model cannot see: tolerated, never rendered."""

    type: str


InputItem: TypeAlias = Message | FunctionCall | FunctionCallOutput | UnknownItem
Content: TypeAlias = str | list[JsonObject]


class _WireMessage(Struct):
    role: Role
    content: Content


class _WireOutput(Struct):
    call_id: CallId
    output: Content


class _WireReference(Struct):
    id: str


def convert(value: Any, type_: type[T], root: str = "") -> T:
    """Validate ``value``, which stands at the path ``root`` of the request, as ``type_``.

    Raises:
        ProtocolError: with the path of the offending member as its ``param``.
    """
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise errors.from_validation(error, root) from None


def without_nulls(value: JsonObject) -> JsonObject:
    """Return ``value`` without its null members: for an optional member, null means absent."""
    return {key: member for key, member in value.items() if member is not None}


def parse_items(value: Any, param: str = "input") -> list[InputItem]:
    """Normalise an ``input`` (OpenAI reference, create a response); a string is one user message.

    Ids and statuses on items are read over: Codex invents ids for its own items, so an id on an
    input item refers to nothing.
    """
    if isinstance(value, str):
        return [Message("user", value)]
    items = convert(value, list[JsonObject], param)
    return [_parse_item(without_nulls(item), f"{param}[{i}]") for i, item in enumerate(items)]


def _parse_item(item: JsonObject, param: str) -> InputItem:
    match _item_type(item, param):
        case "message":
            message = convert(item, _WireMessage, param)
            return Message(message.role, _joined(message.content, f"{param}.content"))
        case "function_call":
            return convert(item, FunctionCall, param)
        case "function_call_output":
            answer = convert(item, _WireOutput, param)
            return FunctionCallOutput(answer.call_id, _joined(answer.output, f"{param}.output"))
        case "item_reference":
            raise errors.item_not_found(convert(item, _WireReference, param).id, param)
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


def _joined(content: Content, param: str) -> str:
    """Join the parts with nothing between them: we add no characters the peer did not send."""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part_text(part: JsonObject, param: str) -> str:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return _text_member(part, "text", param)
        case "refusal":
            return _text_member(part, "refusal", param)
        case ("input_image" | "input_file" | "input_audio" | "input_video") as media:
            raise errors.unsupported_content(media, param)
        case None:
            raise errors.missing_required_parameter(f"{param}.type")
        case other:
            raise errors.unexpected_value(f"{param}.type", other, "a text part")


def _text_member(part: JsonObject, name: str, param: str) -> str:
    if part.get(name) is None:
        raise errors.missing_required_parameter(f"{param}.{name}")
    return convert(part[name], str, f"{param}.{name}")


def check_calls_are_answered(items: Sequence[InputItem], param: str = "input") -> None:
    """Check that every call has its one output after it, and every output its call before it.

    Chat templates place an output by the call it answers; one without the other cannot be rendered.
    The OpenAI API refuses both with the messages used here.
    """
    called: set[str] = set()
    answered: set[str] = set()
    for i, item in enumerate(items):
        match item:
            case FunctionCall(call_id=call_id):
                _add_once(called, call_id, f"{param}[{i}].call_id")
            case FunctionCallOutput(call_id=call_id):
                if call_id not in called:
                    raise errors.orphan_output(call_id)
                _add_once(answered, call_id, f"{param}[{i}].call_id")
            case _:
                pass
    if unanswered := sorted(called - answered):
        raise errors.unanswered_call(unanswered[0])


def _add_once(seen: set[str], call_id: str, param: str) -> None:
    if call_id in seen:
        raise errors.duplicate_call_id(call_id, param)
    seen.add(call_id)


# --- Output --------------------------------------------------------------------------------------


Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """A part of a message. The Python SDK's types want both lists, even though they are empty."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """Text the model wrote."""

    id: str
    status: Status
    content: tuple[OutputText, ...] = ()
    role: Literal["assistant"] = "assistant"


class OutputFunctionCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call the model made; ``call_id`` is what its output names, ``id`` is the item's own."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem: TypeAlias = OutputMessage | OutputFunctionCall
