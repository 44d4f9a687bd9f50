"""Output items: what a model said, as the structs that go on the wire.

Types and members are those of the OpenAI reference, the response object. Every item has a
``status``, as Open Responses 2026-04-24 wants it, also where OpenAI's types know none.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias, assert_never

from msgspec import UNSET, Struct, UnsetType

from protocol.items import (
    Compaction,
    CustomToolCall,
    FunctionCall,
    Message,
    ReasoningItem,
)
from protocol.sealed import seal, unseal

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


# --- Messages ------------------------------------------------------------------------------------


class TopLogprob(Struct, frozen=True):
    """A token that could have been sampled; ``bytes`` because a token may be half a character."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class Logprob(Struct, frozen=True):
    """The token that was sampled, and the most likely ones at its place."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...] = ()


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """A part of a message. The Python SDK's types want both lists, even where they are empty."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[Logprob, ...] = ()


class OutputRefusal(Struct, frozen=True, tag_field="type", tag="refusal"):
    """A part of a message in which the model declines."""

    refusal: str


MessagePart: TypeAlias = OutputText | OutputRefusal


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """What the model says to the user."""

    id: str
    status: Status
    content: tuple[MessagePart, ...] = ()
    role: Literal["assistant"] = "assistant"


# --- Calls ---------------------------------------------------------------------------------------


class OutputFunctionCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call the model made; ``call_id`` is what its output names, ``id`` is the item's own."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | UnsetType = UNSET


class OutputCustomToolCall(Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a free-form tool."""

    id: str
    call_id: str
    name: str
    input: str
    status: Status
    namespace: str | UnsetType = UNSET


OutputCall: TypeAlias = OutputFunctionCall | OutputCustomToolCall


# --- Reasoning and compaction --------------------------------------------------------------------


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """The model's thoughts in its own words."""

    text: str


class SummaryText(Struct, frozen=True, tag_field="type", tag="summary_text"):
    """A part of a summary of the model's thoughts."""

    text: str


class OutputReasoning(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """What the model thought. The sealed text is there if the client asked for it."""

    id: str
    status: Status
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] = ()
    encrypted_content: str | UnsetType = UNSET


class OutputCompaction(Struct, frozen=True, tag_field="type", tag="compaction"):
    """A sealed summary, which stands for all that was said before it."""

    id: str
    encrypted_content: str
    status: Status
    created_by: None = None  # Open Responses wants the member, OpenAI's types know it


OutputItem: TypeAlias = (
    OutputMessage | OutputFunctionCall | OutputCustomToolCall | OutputReasoning | OutputCompaction
)


ModelItem: TypeAlias = Message | FunctionCall | CustomToolCall | ReasoningItem | Compaction
"""The same as input; its messages are the assistant's."""


def as_input(item: OutputItem) -> ModelItem:
    """Return ``item`` as the model sees it when the conversation goes on; its id is kept."""
    match item:
        case OutputMessage():
            return Message("assistant", "".join(map(_said, item.content)), item.id)
        case OutputFunctionCall():
            return FunctionCall(
                item.call_id, item.name, item.arguments, item.namespace or None, item.id
            )
        case OutputCustomToolCall():
            return CustomToolCall(
                item.call_id, item.name, item.input, item.namespace or None, item.id
            )
        case OutputReasoning():
            thoughts = item.content or item.summary
            return ReasoningItem("".join(thought.text for thought in thoughts), item.id)
        case _:
            return Compaction(unseal(item.encrypted_content), item.id)


def as_output(item: ModelItem, ids: Callable[[str], str]) -> OutputItem:
    """Return what a model said as it stands on the wire; ``as_input`` undoes it.

    Args:
        item: said earlier, and whole.
        ids: makes a fresh id from a prefix, where the item has none.
    """
    match item:
        case Message():
            return OutputMessage(item.id or ids("msg"), "completed", (OutputText(item.text),))
        case FunctionCall(call_id, name, arguments):
            namespace = item.namespace or UNSET
            return OutputFunctionCall(
                item.id or ids("fc"), call_id, name, arguments, "completed", namespace
            )
        case CustomToolCall(call_id, name, input_):
            namespace = item.namespace or UNSET
            return OutputCustomToolCall(
                item.id or ids("ctc"), call_id, name, input_, "completed", namespace
            )
        case ReasoningItem():
            thoughts = (ReasoningText(item.text),)
            return OutputReasoning(item.id or ids("rs"), "completed", content=thoughts)
        case Compaction():
            return OutputCompaction(item.id or ids("cmp"), seal(item.summary), "completed")
        case _:
            assert_never(item)


def _said(part: MessagePart) -> str:
    return part.text if isinstance(part, OutputText) else part.refusal
