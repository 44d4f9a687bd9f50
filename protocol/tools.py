"""Tools and the choice among them."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from protocol import errors
from protocol.items import JsonObject, convert, without_nulls

ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]

MAX_NESTING = 64
"""How deep a tool definition may nest. What is echoed must be writable again, and the JSON writer's
limit is Python's recursion limit."""


class FunctionTool(Struct, frozen=True, tag_field="type", tag="function"):
    """A function the model may call.

    Open Responses 2026-04-24 wants all five members in the echo, so none is ever left out.
    """

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class OpaqueTool(Struct, frozen=True):
    """A tool of a kind that is not offered to the model, kept verbatim for the echo.

    Codex declares at least one such tool in every request, so they are never an error.
    """

    definition: JsonObject


Tool: TypeAlias = FunctionTool | OpaqueTool


def parse_tools(value: Any, param: str = "tools") -> list[Tool]:
    """Validate a ``tools`` list (OpenAI reference, create a response); null is an empty list."""
    if value is None:
        return []
    tools = [
        _parse_tool(definition, f"{param}[{i}]")
        for i, definition in enumerate(convert(value, list[JsonObject], param))
    ]
    _check_names_are_unique(tools, param)
    return tools


def _parse_tool(definition: JsonObject, param: str) -> Tool:
    _check_nesting(definition, param, MAX_NESTING)
    if definition.get("type") is None:
        raise errors.missing_required_parameter(f"{param}.type")
    if convert(definition["type"], str, f"{param}.type") != "function":
        return OpaqueTool(definition)
    tool = convert(without_nulls(definition), FunctionTool, param)
    schema_type = (tool.parameters or {}).get("type", "object")
    if schema_type != "object":
        raise errors.unexpected_value(f"{param}.parameters.type", schema_type, "'object'")
    return tool


def _check_nesting(value: Any, param: str, levels: int) -> None:
    if levels == 0:
        raise errors.invalid_value(param, f"expected at most {MAX_NESTING} levels of nesting")
    members = value.values() if isinstance(value, dict) else value
    for member in members:
        if isinstance(member, dict | list):
            _check_nesting(member, param, levels - 1)


def _check_names_are_unique(tools: Iterable[Tool], param: str) -> None:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            if tool.name in seen:
                raise errors.unexpected_value(f"{param}[{i}].name", tool.name, "a name used once")
            seen.add(tool.name)


def function_tools(tools: Iterable[Tool]) -> list[FunctionTool]:
    """Return the tools that the model sees."""
    return [tool for tool in tools if isinstance(tool, FunctionTool)]


def echo_tools(tools: Iterable[Tool]) -> tuple[FunctionTool | JsonObject, ...]:
    """Return ``tools`` as a response repeats them."""
    return tuple(tool.definition if isinstance(tool, OpaqueTool) else tool for tool in tools)


class ToolChoiceMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    FUNCTION = "function"


class ToolChoice(Struct, frozen=True):
    """Whether the model may, must not or must call, and which function if only one will do."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None  # set if and only if the mode is FUNCTION

    @property
    def is_forced(self) -> bool:
        """True if the next thing sampled has to be a call."""
        return self.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.FUNCTION)

    def echo(self) -> str | JsonObject:
        """Return the choice as a response repeats it."""
        if self.mode is ToolChoiceMode.FUNCTION:
            return {"type": "function", "name": self.name}
        return self.mode.value


class _NamedFunction(Struct):
    name: str


def parse_tool_choice(value: Any, tools: Sequence[Tool], param: str = "tool_choice") -> ToolChoice:
    """Validate a ``tool_choice`` against ``tools``; null is ``auto``.

    A choice that cannot be honoured is an error, never a silent ``auto``: the client would wait for
    a call that need not come.
    """
    match value:
        case None:
            return ToolChoice()
        case "auto" | "none":
            return ToolChoice(ToolChoiceMode(value))
        case "required":
            if not function_tools(tools):
                raise errors.invalid_value(param, "'required' needs a function among the tools")
            return ToolChoice(ToolChoiceMode.REQUIRED)
        case {"type": "function"}:
            return _parse_named_function(value, tools, param)
        case {"type": str(other)}:
            raise errors.unsupported_parameter(param, f"no choice of type {other[:80]!r}")
        case _:
            raise errors.unexpected_value(param, value, "'auto', 'none', 'required' or a function")


def _parse_named_function(value: JsonObject, tools: Sequence[Tool], param: str) -> ToolChoice:
    name = convert(without_nulls(value), _NamedFunction, param).name
    names = [tool.name for tool in function_tools(tools)]
    if name not in names:
        raise errors.unexpected_value(f"{param}.name", name, "the name of a function in `tools`")
    return ToolChoice(ToolChoiceMode.FUNCTION, name)
