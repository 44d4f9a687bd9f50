"""Traces of agent runs: what the model said, turn by turn, and what came back from its tools.

A trace is replayed by having the model say the same again (``sampler.replay``). A file holds one
JSON object a line (JSON Lines). A line of type ``trace`` begins a trace, with what its request
says; each line of type ``turn`` that follows is a turn of the model, with the outputs of its calls.
A run goes on for as long as the model calls: so do all turns but the last one, which does not.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from protocol import errors
from protocol.items import CustomToolCall, FunctionCall, InputItem, Message, parse_items
from protocol.tools import CallableTool, CustomTool, callable_tools, parse_tools, split_name
from protocol.validation import JsonObject
from sampler.conversation import Turn, text_of
from sampler.recorded_turn import Call
from sampler.tool_calls import Arguments, CallBegan, Parsed, Text, TurnParser


class TraceError(ValueError):
    """A file that does not hold traces; says in which line, and where in it."""

    def __init__(self, path: Path, line: int, message: str, member: str = "") -> None:
        super().__init__(f"{path}:{line}: {f'{member}: ' if member else ''}{message}")
        self.path = path
        self.line = line
        """Counted from 1."""
        self.member = member
        """Such as ``calls[0].arguments``; empty where it is the line as a whole."""


class _Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is written without the members that say nothing, and read without any others."""


class TraceCall(_Record, frozen=True, kw_only=True):
    """A call that the model made, and what came of it."""

    name: str
    """As the model knows the tool: with the namespace, if there is one."""
    arguments: str | None = None
    """The JSON object that a function was called with, as text."""
    input: str | None = None
    """What a custom tool was called with."""
    output: str
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    """How long the tool ran."""

    def item(self, call_id: str) -> Call:
        """Return the call as an item of a conversation."""
        namespace, name = split_name(self.name)
        if self.input is not None:
            return CustomToolCall(call_id, name, self.input, namespace)
        return FunctionCall(call_id, name, self.arguments or "{}", namespace)


class TraceTurn(_Record, frozen=True, kw_only=True, tag_field="type", tag="turn"):
    """A turn of the model: text, then calls."""

    text: str = ""
    calls: tuple[TraceCall, ...] = ()
    messages: tuple[JsonObject, ...] = ()
    """What users said while the tools ran; sent along with the outputs, after them."""

    def call_items(self) -> tuple[Call, ...]:
        """Return the calls as items, with ids that are unique in the turn."""
        return tuple(call.item(f"call_{index}") for index, call in enumerate(self.calls))


class Trace(Struct, frozen=True, kw_only=True):
    """One agent run."""

    name: str
    description: str = ""
    """For people: where it comes from."""
    instructions: str | None = None
    tools: tuple[JsonObject, ...] = ()
    """As a request declares them."""
    input: str | tuple[JsonObject, ...]
    """What the run begins with, as a request has it."""
    turns: tuple[TraceTurn, ...]


class _Header(_Record, frozen=True, kw_only=True, tag_field="type", tag="trace"):
    """What a request says, and the name of the trace."""

    version: Literal[1]
    name: Annotated[str, Meta(min_length=1)]
    description: str = ""
    instructions: str | None = None
    tools: tuple[JsonObject, ...] = ()
    input: str | tuple[JsonObject, ...]


_LINE = msgspec.json.Decoder(_Header | TraceTurn)


def read_traces(path: str | PathLike[str]) -> list[Trace]:
    """Return the traces in the file at ``path``, of which there is one at least.

    Raises:
        OSError: it cannot be read.
        TraceError: it does not hold traces.
    """
    path = Path(path)
    reader = _Reader(path)
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            reader.read(number, line)
    return reader.finish()


def write_traces(path: str | PathLike[str], traces: Iterable[Trace]) -> None:
    """Write ``traces`` to the file at ``path``, in the place of what was in it.

    Raises:
        OSError: it cannot be written.
    """
    lines = [msgspec.json.encode(record) for trace in traces for record in _records(trace)]
    Path(path).write_bytes(b"".join(line + b"\n" for line in lines))


def _records(trace: Trace) -> Iterator[_Header | TraceTurn]:
    yield _Header(
        version=1,
        name=trace.name,
        description=trace.description,
        instructions=trace.instructions,
        tools=trace.tools,
        input=trace.input,
    )
    yield from trace.turns


# --- Reading -------------------------------------------------------------------------------------


class _MemberError(ValueError):
    """What is wrong in a line."""

    def __init__(self, message: str, member: str = "") -> None:
        super().__init__(message)
        self.member = member


class _Reader:
    """Puts the traces of one file together, line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._traces: dict[str, Trace] = {}
        self._header: _Header | None = None
        self._tools: dict[str, CallableTool] = {}
        self._turns: list[TraceTurn] = []
        self._number = 1

    def read(self, number: int, line: bytes) -> None:
        """Take the next line that is not empty."""
        with self._in_line(number):
            match _LINE.decode(line):
                case _Header() as header:
                    self._begin(number, header)
                case TraceTurn() as turn:
                    self._add(turn)
        self._number = number

    def finish(self) -> list[Trace]:
        """Return the traces: there are no more lines."""
        self._end_trace()
        if not self._traces:
            raise TraceError(self._path, self._number, "expected a trace, got an empty file")
        return list(self._traces.values())

    def _begin(self, number: int, header: _Header) -> None:
        self._end_trace()
        if header.name in self._traces:
            raise _MemberError(f"expected a name used once, got {header.name!r}", "name")
        parse_items(_plain(header.input))
        self._tools = {tool.name: tool for tool in _tools(header.tools)}
        self._header = header
        self._turns = []

    def _end_trace(self) -> None:
        if self._header is None:
            return
        with self._in_line(self._number):
            if not self._turns:
                raise _MemberError(f"expected a turn of {self._header.name!r}, got none")
            if self._turns[-1].calls:
                raise _MemberError("expected a last turn without calls", "calls")
        self._traces[self._header.name] = _trace(self._header, self._turns)

    def _add(self, turn: TraceTurn) -> None:
        if self._header is None:
            raise _MemberError("expected a line of type 'trace' before the first turn", "type")
        if self._turns and not self._turns[-1].calls:
            raise _MemberError("expected no turn after one without calls")
        _check_turn(turn, self._tools)
        self._turns.append(turn)

    @contextmanager
    def _in_line(self, number: int) -> Iterator[None]:
        """Say of errors that they are in line ``number``."""
        try:
            yield
        except msgspec.ValidationError as error:
            found = errors.from_validation(error)
            raise TraceError(self._path, number, found.message, found.param or "") from None
        except msgspec.DecodeError as error:
            raise TraceError(self._path, number, f"expected one JSON object: {error}") from None
        except RecursionError:
            raise TraceError(
                self._path, number, "expected JSON that is nested less deeply"
            ) from None
        except errors.ProtocolError as error:
            raise TraceError(self._path, number, error.message, error.param or "") from None
        except _MemberError as error:
            raise TraceError(self._path, number, str(error), error.member) from None


def _plain(value: str | Sequence[JsonObject]) -> str | list[JsonObject]:
    return value if isinstance(value, str) else list(value)


def _tools(definitions: Sequence[JsonObject]) -> list[CallableTool]:
    return callable_tools(parse_tools(list(definitions)))


def _trace(header: _Header, turns: Iterable[TraceTurn]) -> Trace:
    return Trace(
        name=header.name,
        description=header.description,
        instructions=header.instructions,
        tools=header.tools,
        input=header.input,
        turns=tuple(turns),
    )


# --- What a turn may be --------------------------------------------------------------------------


def _check_turn(turn: TraceTurn, tools: dict[str, CallableTool]) -> None:
    for index, call in enumerate(turn.calls):
        _check_call(call, tools, f"calls[{index}]")
    if turn.messages and not turn.calls:
        raise _MemberError("expected no messages where there are no calls", "messages")
    for index, item in enumerate(parse_items(list(turn.messages), "messages")):
        _check_message(item, f"messages[{index}]")
    _check_is_read_back(turn)


def _check_call(call: TraceCall, tools: dict[str, CallableTool], member: str) -> None:
    tool = tools.get(call.name)
    if tool is None:
        raise _MemberError(f"expected a tool of the trace, got {call.name!r}", f"{member}.name")
    if isinstance(tool, CustomTool):
        _check_members(call, "input", "arguments", member)
    else:
        _check_members(call, "arguments", "input", member)
        _check_arguments(call.arguments or "", f"{member}.arguments")


def _check_members(call: TraceCall, wanted: str, other: str, member: str) -> None:
    if getattr(call, wanted) is None or getattr(call, other) is not None:
        raise _MemberError(
            f"expected {wanted!r} and no {other!r} in a call of {call.name!r}", member
        )


def _check_arguments(arguments: str, member: str) -> None:
    try:
        value = json.loads(arguments)
    except ValueError as error:
        raise _MemberError(f"expected JSON: {error}", member) from None
    except RecursionError:
        raise _MemberError("expected JSON that is nested less deeply", member) from None
    if not isinstance(value, dict):
        raise _MemberError(f"expected a JSON object, got {arguments[:40]!r}", member)


def _check_message(item: InputItem, member: str) -> None:
    if not isinstance(item, Message) or item.role == "assistant":
        raise _MemberError("expected a message, and not one of the assistant's", member)


def _check_is_read_back(turn: TraceTurn) -> None:
    """Make sure that from what the model says, this very turn is read: a marker in its text, or
    white space alone, is not what a client gets to see."""
    parser = TurnParser()
    said = text_of(Turn("assistant", turn.text, turn.call_items()))
    text, made = _read_back([*parser.feed(said), *parser.flush()])
    if len(made) == len(turn.calls):
        for index, (call, found) in enumerate(zip(turn.calls, made, strict=True)):
            if found not in (call.arguments, call.input):
                message = f"expected what can be read back, got {found[:40]!r} of it"
                raise _MemberError(message, f"calls[{index}]")
    if not said or text != turn.text:
        raise _MemberError(f"expected text that can be read back, got {turn.text[:40]!r}", "text")


def _read_back(parsed: Iterable[Parsed]) -> tuple[str, list[str]]:
    """Return the text, and what each call was made with."""
    text, calls = "", list[str]()
    for part in parsed:
        match part:
            case Text(piece):
                text += piece
            case CallBegan():
                calls.append("")
            case Arguments(piece):
                calls[-1] += piece
            case _:
                pass
    return text, calls
