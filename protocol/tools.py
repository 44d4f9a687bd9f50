"""Tools and the choice among them.

A client declares functions, free-form (custom) tools, namespaces of both, and tools that a hosted
server would run. The model sees the first two kinds only, under names that are unique: a tool in a
namespace is known to it as ``namespace.name``. Tool names have no dot, so that is exact.
"""

from collections.abc import Iterable
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from protocol import errors
from protocol.validation import JsonObject, convert, without_nulls

ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
NamespaceName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]


# --- Tools ---------------------------------------------------------------------------------------


class _Tool(Struct, frozen=True, tag_field="type"):
    """Tagged by its kind, so that a conversation which declares tools can be stored."""


class FunctionTool(_Tool, frozen=True, tag="function"):
    """A function the model may call.

    Open Responses 2026-04-24 wants all five members in the echo, so none is ever left out.
    """

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class CustomFormat(Struct, frozen=True):
    """What the input of a free-form tool looks like; ``text`` is any text."""

    syntax: Literal["text", "lark", "regex"] = "text"
    definition: str = ""


class CustomTool(_Tool, frozen=True, tag="custom"):
    """A tool that takes free-form text; ``definition`` is the verbatim declaration."""

    name: ToolName
    description: str | None = None
    format: CustomFormat = CustomFormat()
    definition: JsonObject = {}


CallableTool: TypeAlias = FunctionTool | CustomTool

_CALLABLE = ("function", "custom")


class NamespaceTool(_Tool, frozen=True, tag="namespace"):
    """Callable tools under a common name; those of other kinds are in the ``definition`` only."""

    name: NamespaceName
    tools: tuple[CallableTool, ...]
    definition: JsonObject


class OpaqueTool(_Tool, frozen=True, tag="opaque"):
    """A tool of a kind that is not offered to the model, kept verbatim for the echo.

    Codex declares at least one such tool in every request, so they are never an error.
    """

    definition: JsonObject


Tool: TypeAlias = FunctionTool | CustomTool | NamespaceTool | OpaqueTool


def qualified(namespace: str | None, name: str) -> str:
    """Return the name that the model knows a tool by."""
    return name if namespace is None else f"{namespace}.{name}"


def split_name(name: str) -> tuple[str | None, str]:
    """Return the namespace, if there is one, and the name in it: the inverse of ``qualified``."""
    namespace, dot, name = name.rpartition(".")
    return (namespace if dot else None), name


def callable_tools(tools: Iterable[Tool]) -> list[CallableTool]:
    """Return the tools that the model sees, by their qualified names."""
    seen: list[CallableTool] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            seen += [
                msgspec.structs.replace(inner, name=qualified(tool.name, inner.name))
                for inner in tool.tools
            ]
        elif not isinstance(tool, OpaqueTool):
            seen.append(tool)
    return seen


def grammar_paths(tools: Iterable[Tool], root: str = "tools") -> dict[str, str]:
    """Return where a request says what the input of each callable tool looks like, by the tool's
    qualified name."""
    paths: dict[str, str] = {}
    for i, tool in enumerate(tools):
        path = f"{root}[{i}]"
        if isinstance(tool, NamespaceTool):
            kinds = [inner.get("type") for inner in tool.definition.get("tools") or ()]
            places = [j for j, kind in enumerate(kinds) if kind in _CALLABLE]
            for j, inner in zip(places, tool.tools, strict=True):
                name = qualified(tool.name, inner.name)
                paths[name] = f"{path}.tools[{j}].{_grammar_member(inner)}"
        elif not isinstance(tool, OpaqueTool):
            paths[tool.name] = f"{path}.{_grammar_member(tool)}"
    return paths


def _grammar_member(tool: CallableTool) -> str:
    return "parameters" if isinstance(tool, FunctionTool) else "format"


def echo_tools(tools: Iterable[Tool]) -> tuple[FunctionTool | JsonObject, ...]:
    """Return ``tools`` as a response repeats them: verbatim, but functions with all members."""
    return tuple(tool if isinstance(tool, FunctionTool) else tool.definition for tool in tools)


def tools_digest(value: Any) -> bytes:
    """Return a digest of a ``tools`` value as it came, by which the same tools are known again.

    Clients send all their tools with every request, up to 18 kB of them. White space makes no
    difference here. The order of members does: it shows in what the model reads.
    """
    return blake2b(msgspec.json.encode(value), digest_size=16).digest()


class _AnyText(Struct, tag_field="type", tag="text"):
    pass


class _Grammar(Struct, tag_field="type", tag="grammar"):
    syntax: Literal["lark", "regex"]
    definition: str


class _WireCustomTool(Struct):
    name: ToolName
    description: str | None = None
    format: _AnyText | _Grammar | None = None


class _WireNamespace(Struct):
    name: NamespaceName
    tools: list[JsonObject] = []


def parse_tools(value: Any, param: str = "tools") -> list[Tool]:
    """Validate a ``tools`` list (OpenAI reference, create a response); null is an empty list."""
    if value is None:
        return []
    definitions = convert(value, list[JsonObject], param)
    tools = [_parse_tool(definition, f"{param}[{i}]") for i, definition in enumerate(definitions)]
    _check_names_are_unique(tools, param)
    return tools


def _parse_tool(definition: JsonObject, param: str) -> Tool:
    match _tool_type(definition, param):
        case "function":
            return _parse_function(definition, param)
        case "custom":
            return _parse_custom(definition, param)
        case "namespace":
            return _parse_namespace(definition, param)
        case _:
            return OpaqueTool(definition)


def _tool_type(definition: JsonObject, param: str) -> str:
    if definition.get("type") is None:
        raise errors.missing_required_parameter(f"{param}.type")
    return convert(definition["type"], str, f"{param}.type")


def _parse_function(definition: JsonObject, param: str) -> FunctionTool:
    tool = convert(without_nulls(definition), FunctionTool, param)
    schema_type = (tool.parameters or {}).get("type", "object")
    if schema_type != "object":
        raise errors.unexpected_value(f"{param}.parameters.type", schema_type, "'object'")
    return tool


def _parse_custom(definition: JsonObject, param: str) -> CustomTool:
    tool = convert(without_nulls(definition), _WireCustomTool, param)
    match tool.format:
        case _Grammar(syntax=syntax, definition=grammar):
            text_format = CustomFormat(syntax, grammar)
        case _:
            text_format = CustomFormat()
    return CustomTool(tool.name, tool.description, text_format, definition)


def _parse_namespace(definition: JsonObject, param: str) -> NamespaceTool:
    namespace = convert(without_nulls(definition), _WireNamespace, param)
    inner = [
        _parse_function(tool, path) if kind == "function" else _parse_custom(tool, path)
        for i, tool in enumerate(namespace.tools)
        if (kind := _tool_type(tool, path := f"{param}.tools[{i}]")) in _CALLABLE
    ]
    return NamespaceTool(namespace.name, tuple(inner), definition)


def _check_names_are_unique(tools: Iterable[Tool], param: str) -> None:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        for name in (inner.name for inner in callable_tools([tool])):
            if name in seen:
                raise errors.unexpected_value(f"{param}[{i}].name", name, "a name used once")
            seen.add(name)


# --- The choice among them -----------------------------------------------------------------------


class ToolChoiceMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(Struct, frozen=True):
    """Whether the model may, must not or must call, and which tools it may call at all."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    names: tuple[str, ...] | None = None
    """The only tools that may be called, by their qualified names; None is all of them."""
    echoed: str | JsonObject = "auto"
    """The choice as it came."""

    @property
    def is_forced(self) -> bool:
        """True if the next thing sampled has to be a call."""
        return self.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)

    def echo(self) -> str | JsonObject:
        """Return the choice as a response repeats it."""
        return self.echoed


class _NamedTool(Struct):
    name: str
    namespace: str | None = None


class _AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[JsonObject]


def parse_tool_choice(value: Any, param: str = "tool_choice") -> ToolChoice:
    """Read a ``tool_choice``; null is ``auto``. Which tools there are is not looked at here.

    A choice that cannot be honoured is an error, never a silent ``auto``: the client would wait for
    a call that need not come.
    """
    match value:
        case None:
            return ToolChoice()
        case "auto" | "none" | "required":
            return ToolChoice(ToolChoiceMode(value), echoed=value)
        case {"type": "function" | "custom"}:
            return ToolChoice(ToolChoiceMode.NAMED, _names(value, param), value)
        case {"type": "allowed_tools"}:
            mode = ToolChoiceMode(_allowed_tools(value, param)[0].mode)
            return ToolChoice(mode, _names(value, param), value)
        case {"type": str(other)}:
            raise errors.unsupported_parameter(param, f"no choice of type {other[:80]!r}")
        case _:
            raise errors.unexpected_value(param, value, "'auto', 'none', 'required' or an object")


def check_tool_choice(
    choice: ToolChoice, tools: Iterable[Tool], param: str = "tool_choice"
) -> None:
    """Check that ``choice`` can be honoured with ``tools``, which are all that the model sees.

    It is a step of its own because tools may be declared in the input of an earlier response.

    Raises:
        ProtocolError: a tool is named that is not there, or a call is required and none possible.
    """
    known = {tool.name for tool in callable_tools(tools)}
    for path, name in _references(choice.echoed, param):
        if name not in known:
            raise errors.unexpected_value(path, name, "the name of a tool that can be called")
    if choice.is_forced and not (known if choice.names is None else choice.names):
        raise errors.invalid_value(param, "'required' needs a tool that can be called")


def _names(value: JsonObject, param: str) -> tuple[str, ...]:
    return tuple(name for _, name in _references(value, param))


def _references(value: str | JsonObject, param: str) -> list[tuple[str, str]]:
    """Return the tools that a choice names: where, and by which qualified name."""
    if isinstance(value, str):
        return []
    if value["type"] != "allowed_tools":
        return [(f"{param}.name", _qualified_name(value, param))]
    allowed, root = _allowed_tools(value, param)
    return [
        (f"{path}.name", _qualified_name(entry, path))
        for i, entry in enumerate(allowed.tools)
        if _is_callable_type(_tool_type(entry, path := f"{root}.tools[{i}]"), path)
    ]


def _qualified_name(value: JsonObject, param: str) -> str:
    tool = convert(without_nulls(value), _NamedTool, param)
    return qualified(tool.namespace, tool.name)


def _allowed_tools(value: JsonObject, param: str) -> tuple[_AllowedTools, str]:
    """Return the allowed tools and their path: flat (Responses) or nested (Chat Completions)."""
    if value.get("allowed_tools") is not None:
        value, param = value["allowed_tools"], f"{param}.allowed_tools"
    return convert(value, _AllowedTools, param), param


def _is_callable_type(tool_type: str, param: str) -> bool:
    """Hosted tools are never called, so allowing one changes nothing."""
    if tool_type == "namespace":
        raise errors.unsupported_parameter(param, "expected the tools of a namespace one by one")
    return tool_type in _CALLABLE
