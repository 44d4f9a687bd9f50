"""A conversation as turns, and a turn as text.

Items come one by one; a model sees turns. Where a chat template has no place for tools, they are
told in text: calls and their outputs the way Hermes 2 Pro introduced and Qwen 2.5 took over, with
``<tool_call>`` and ``<tool_response>``, and what can be called as one-line signatures. Those are
our own choice: small models pick the right tool about twice as often from them as from JSON
schemas, at a third of the tokens.

Tools that take free text are told in text always: no chat template has a place for them. Their
calls name the tool in JSON, and the rest, up to the end marker, is the input as it is.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    CustomToolCall,
    FunctionCall,
    InputItem,
    ItemReference,
    Message,
    ReasoningItem,
    UnknownItem,
)
from protocol.tools import CallableTool, CustomTool, FunctionTool
from sampler.recorded_turn import Call, Item, RecordedTurn
from sampler.tool_calls import BEGIN, END, INPUT_END, call_head, custom_call_head


class ConversationError(ValueError):
    """A conversation that cannot be laid out as the model's chat template wants it."""


@dataclass(frozen=True)
class Conversation:
    """What a prompt is made of."""

    items: Sequence[Item]
    instructions: str | None = None
    tools: Sequence[CallableTool] = ()
    """By the names that the model knows them by."""
    enable_thinking: bool | None = None
    """Whether the model is to think before it speaks; None leaves it to the chat template."""

    def after(self, turn: RecordedTurn) -> "Conversation":
        """Return what this has become once the model has said ``turn``."""
        return replace(self, items=(*self.items, turn))


@dataclass(frozen=True)
class ToolOutput:
    """What one call returned."""

    call: Call
    text: str


@dataclass(frozen=True)
class Turn:
    """Consecutive items of one speaker: a message, or a model's text and calls, or tool outputs."""

    role: str
    text: str = ""
    calls: tuple[Call, ...] = ()
    outputs: tuple[ToolOutput, ...] = ()


def num_characters(item: Item) -> int:
    """Return how long the text is that ``item`` brings. What was sampled here has its ids."""
    match item:
        case Message():
            return len(item.text)
        case FunctionCall():
            return len(item.arguments)
        case CustomToolCall():
            return len(item.input)
        case CallOutput():
            return len(item.output)
        case Compaction():
            return len(item.summary)
        case ReasoningItem() | ItemReference() | AdditionalTools() | UnknownItem() | RecordedTurn():
            return 0
        case _:
            assert_never(item)


def turns_of(conversation: Conversation) -> list[Turn]:
    """Group items into turns: the instructions first, outputs right after the turn of their calls.

    Templates place an output by the call it answers, so whatever came in between comes after it.

    Raises:
        ConversationError: an output answers no call.
    """
    instructions = conversation.instructions
    head = [Turn("system", instructions)] if instructions else []
    return _with_outputs([*head, *_spoken_turns(conversation.items)], conversation.items)


def turns_after(calls: Sequence[Call], items: Sequence[InputItem]) -> list[Turn]:
    """Group ``items`` into the turns that follow one which ended in ``calls``.

    Raises:
        ConversationError: an output answers neither these calls nor one among the items.
    """
    sampled = Turn("assistant", calls=tuple(calls))
    return _with_outputs([sampled, *_spoken_turns(items)], items)[1:]


def _spoken_turns(items: Iterable[Item]) -> list[Turn]:
    """Return what is said and called; an output leaves an empty turn, which ends the one before."""
    turns: list[Turn] = []
    for item in items:
        match item:
            case Message(role="assistant"):
                turn = _open_turn(turns, "assistant")
                turns[-1] = replace(turn, text=turn.text + item.text)
            case Message():
                turns.append(Turn("system" if item.role == "developer" else item.role, item.text))
            case Compaction():
                turns.append(Turn("user", summary_text(item)))
            case FunctionCall() | CustomToolCall():
                turn = _open_turn(turns, "assistant")
                turns[-1] = replace(turn, calls=(*turn.calls, item))
            case CallOutput():
                _open_turn(turns, "tool")
            case ReasoningItem() | ItemReference() | AdditionalTools() | UnknownItem():
                pass  # nothing of it is for the model to read
            case RecordedTurn():
                raise AssertionError("what was sampled is never laid out again")
            case _:
                assert_never(item)
    return turns


def _open_turn(turns: list[Turn], role: str) -> Turn:
    """Return the last turn, after beginning one if the last is not ``role``'s."""
    if not turns or turns[-1].role != role:
        turns.append(Turn(role))
    return turns[-1]


def _with_outputs(turns: Sequence[Turn], items: Iterable[Item]) -> list[Turn]:
    """Return ``turns``, each followed by the outputs among ``items`` that answer its calls."""
    outputs = {item.call_id: item.output for item in items if isinstance(item, CallOutput)}
    answered: list[Turn] = []
    for turn in turns:
        if turn.role != "tool":
            answered.append(turn)
        given = tuple(
            ToolOutput(call, outputs.pop(call.call_id))
            for call in turn.calls
            if call.call_id in outputs
        )
        if given:
            answered.append(Turn("tool", outputs=given))
    if outputs:
        raise ConversationError(f"the output of {next(iter(outputs))!r} answers no call")
    return answered


def summary_text(compaction: Compaction) -> str:
    """Return how a model is told what was said before.

    A user tells it: many templates take a system message at the beginning only, and a summary is
    made of what users and tools said, whose words should not become orders of the system.
    """
    return f"Summary of the conversation so far:\n{compaction.summary}"


# --- Turns as text -------------------------------------------------------------------------------


def role_of(turn: Turn) -> str:
    """Return whose turn it is where there is no role for tools."""
    return "user" if turn.role == "tool" else turn.role


def text_of(turn: Turn) -> str:
    """Return the whole turn as text, its calls and outputs included."""
    if turn.role == "tool":
        return "\n".join(f"<tool_response>\n{o.text}\n</tool_response>" for o in turn.outputs)
    return turn.text + "\n".join(map(call_text, turn.calls))


def call_text(call: Call) -> str:
    """Return the text in which the model makes ``call``."""
    match call:
        case FunctionCall():
            return f"{call_head(call.qualified_name)}{call.arguments or '{}'}}}\n{END}"
        case CustomToolCall():
            return f"{custom_call_head(call.qualified_name)}{call.input}{INPUT_END}"
        case _:
            assert_never(call)


# --- Tools as text -------------------------------------------------------------------------------


def with_tools_told(turns: Sequence[Turn], tools: Sequence[CallableTool]) -> list[Turn]:
    """Add to the system turn what the model needs to know to call ``tools``."""
    if not tools:
        return list(turns)
    has_system = bool(turns) and turns[0].role == "system"
    system = turns[0] if has_system else Turn("system")
    told = f"{system.text}\n\n{_told(tools)}".lstrip()
    return [replace(system, text=told), *turns[1 if has_system else 0 :]]


def _told(tools: Sequence[CallableTool]) -> str:
    functions = [_signature(tool) for tool in tools if isinstance(tool, FunctionTool)]
    free_form = [_title(tool) for tool in tools if isinstance(tool, CustomTool)]
    parts = []
    if functions:
        parts += ["\n".join(["You can call these tools:", *functions]), _HOW_TO_CALL]
    if free_form:
        parts += ["\n".join(["You can call these tools with free text:", *free_form])]
        parts += [_HOW_TO_CALL_WITH_TEXT]
    return "\n\n".join(parts)


_HOW_TO_CALL = f"""To call a tool, write:
{BEGIN}
{{"name": "tool name", "arguments": {{"argument": "value"}}}}
{END}"""

_HOW_TO_CALL_WITH_TEXT = f"""To call a tool with free text, write:
{BEGIN}
{{"name": "tool name"}}
free text
{END}"""


def _signature(function: FunctionTool) -> str:
    """Return one line such as ``get_weather(city: string): Current weather in a city``.

    What of the schema is none is not told: a function that is not strict may have any.
    """
    schema = function.parameters or {}
    required = schema.get("required")
    if not isinstance(required, list):
        required = []
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}: {_type_of(kind)}"
        for name, kind in properties.items()
    )
    notes = "".join(
        f" {name}: {kind['description']}."
        for name, kind in properties.items()
        if isinstance(kind, dict) and kind.get("description")
    )
    return f"{function.name}({arguments}): {function.description or ''}{notes}".rstrip(": ")


def _type_of(schema: Any) -> str:
    """Return a type name where one says it all, else the JSON schema itself."""
    if isinstance(schema, dict) and set(schema) <= {"type", "description", "title"}:
        return str(schema.get("type", "any"))
    return json.dumps(schema)


def _title(tool: CustomTool) -> str:
    """Return one line such as ``apply_patch: Edit files``."""
    return f"{tool.name}: {tool.description or ''}".rstrip(": ")
