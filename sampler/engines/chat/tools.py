"""Tools as chat-completions endpoints know them.

There all tools are functions, and their names have no dots. So a free-form tool is declared as a
function of one string, and a name that an endpoint would refuse is replaced by one that it takes.
"""

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import assert_never

from protocol.items import CustomToolCall, FunctionCall
from protocol.tools import CallableTool, CustomTool, FunctionTool
from protocol.validation import JsonObject
from sampler.engines.chat.dialect import ChatDialect
from sampler.engines.chat.json_text import encoded, object_in
from sampler.params import Constraint
from sampler.recorded_turn import Call

# --- Names ---------------------------------------------------------------------------------------

_MAX_LENGTH = 64
_DIGEST_BYTES = 5
_TAKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{_MAX_LENGTH}}}")
_REPLACED = re.compile(rf".*_[0-9a-f]{{{2 * _DIGEST_BYTES}}}")
_REFUSED_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")


def sent_name(name: str) -> str:
    """Return the name by which an endpoint knows the tool of the qualified name ``name``.

    It depends on nothing else: what was sent once stays as it is, whichever tools there are later.
    A name that is replaced gets a digest at its end, and so does one that merely looks like it; so
    two names become the same only where their digests of 40 bits do.
    """
    if _TAKEN.fullmatch(name) and not _REPLACED.fullmatch(name):
        return name
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
    readable = _REFUSED_CHARACTER.sub("_", name)[: _MAX_LENGTH - len(digest) - 1]
    return f"{readable}_{digest}"


class ToolNames:
    """The tools of a run, found by the names that an endpoint knows them by."""

    def __init__(self, tools: Iterable[CallableTool]) -> None:
        """Know ``tools``, which have their qualified names."""
        by_name = {tool.name: tool for tool in tools}
        self._names = {sent_name(name): name for name in by_name}
        self._custom = {name for name, tool in by_name.items() if isinstance(tool, CustomTool)}

    def qualified(self, sent: str) -> str:
        """Return the qualified name of the tool known as ``sent``; a name that nobody declared is
        its own."""
        return self._names.get(sent, sent)

    def is_custom(self, name: str) -> bool:
        """Tell whether the tool of the qualified name ``name`` is a free-form one."""
        return name in self._custom


# --- Declarations --------------------------------------------------------------------------------

_INPUT = "input"
_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}


def tools_json(tools: Sequence[CallableTool], dialect: ChatDialect) -> bytes:
    """Return ``tools`` as the array that a request declares them in."""
    functions = [tool for tool in tools if isinstance(tool, FunctionTool)]
    all_strict = bool(functions) and all(tool.strict for tool in functions)
    keeps_strict = dialect.mixes_strict or all_strict
    return encoded(
        [
            {"type": "function", "function": _declaration(tool, keeps_strict, all_strict)}
            for tool in tools
        ]
    )


def _declaration(tool: CallableTool, keeps_strict: bool, all_strict: bool) -> JsonObject:
    match tool:
        case FunctionTool():
            description, parameters = tool.description, tool.parameters
            strict = tool.strict if keeps_strict else None
        case CustomTool():
            description, parameters = _told(tool), _TEXT_PARAMETERS
            strict = True if all_strict else None
        case _:
            assert_never(tool)
    members = {
        "name": sent_name(tool.name),
        "description": description,
        "parameters": _NO_PARAMETERS if parameters is None else parameters,
        "strict": strict,
    }
    return {name: member for name, member in members.items() if member is not None}


_TEXT_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "The text, as it is."}},
    "required": [_INPUT],
    "additionalProperties": False,
}


def _told(tool: CustomTool) -> str:
    parts = [tool.description or "", f"Takes free text, which is the whole of `{_INPUT}`."]
    match tool.format.syntax:
        case "lark":
            parts.append(f"The text has to match this Lark grammar:\n{tool.format.definition}")
        case "regex":
            parts.append(
                f"The text has to match this regular expression:\n{tool.format.definition}"
            )
        case "text":
            pass
        case _:
            assert_never(tool.format.syntax)
    return "\n\n".join(part for part in parts if part)


# --- Arguments -----------------------------------------------------------------------------------


def arguments_of(call: Call) -> str:
    """Return the arguments of ``call`` as an endpoint gets them back: those that were sampled."""
    match call:
        case FunctionCall():
            return call.arguments or "{}"
        case CustomToolCall():
            return f'{{"{_INPUT}": {encoded(call.input).decode()}}}'
        case _:
            assert_never(call)


def input_in(arguments: str) -> str:
    """Return the free text in ``arguments``, which are all of it where they are not as declared."""
    text = (object_in(arguments) or {}).get(_INPUT)
    return text if isinstance(text, str) else arguments


# --- The choice among them -----------------------------------------------------------------------


def choice_members(
    tools: Sequence[CallableTool], constraint: Constraint, dialect: ChatDialect
) -> dict[str, object]:
    """Return what a request says of a turn's choice among ``tools``, of which there are some."""
    if not constraint.allows_calls:
        return {"tool_choice": "none"}
    choice = _choice(tools, constraint, dialect)
    members: dict[str, object] = {"tool_choice": choice}
    if constraint.max_calls == 1:
        members["parallel_tool_calls"] = False
    return members


def tools_to_declare(
    tools: Sequence[CallableTool], constraint: Constraint, dialect: ChatDialect
) -> Sequence[CallableTool]:
    """Return those of ``tools`` to declare for a turn: all of them, since what comes behind stays
    cached then, unless nothing else says that only some may be called."""
    if not constraint.allows_calls or _is_all(tools, constraint):
        return tools
    can_say = _names_one(constraint) or dialect.takes_allowed_tools
    return tools if can_say else constraint.tools


def _choice(
    tools: Sequence[CallableTool], constraint: Constraint, dialect: ChatDialect
) -> str | JsonObject:
    mode = "required" if constraint.is_forced else "auto"
    is_all = _is_all(tools, constraint)
    if _names_one(constraint) and (not is_all or constraint.max_calls == 1):
        return _named(constraint.tools[0])
    if is_all or not dialect.takes_allowed_tools:
        return mode
    allowed = {"mode": mode, "tools": [_named(tool) for tool in constraint.tools]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _names_one(constraint: Constraint) -> bool:
    return constraint.is_forced and len(constraint.tools) == 1


def _is_all(tools: Sequence[CallableTool], constraint: Constraint) -> bool:
    return {tool.name for tool in constraint.tools} >= {tool.name for tool in tools}


def _named(tool: CallableTool) -> JsonObject:
    return {"type": "function", "function": {"name": sent_name(tool.name)}}
