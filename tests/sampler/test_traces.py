"""Files of traces: what is read from them, and what is said of those that are wrong."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.items import CustomToolCall, FunctionCall
from sampler.traces import Trace, TraceCall, TraceError, TraceTurn, read_traces, write_traces
from tests.tiny_model import call_text

READ = {"type": "function", "name": "read", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "patch"}
FILES = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "stat"}]}
HEADER = {"type": "trace", "version": 1, "name": "fix", "tools": [READ, PATCH], "input": "Fix it."}
CALL = {"name": "read", "arguments": '{"path": "a.py"}', "output": "import b"}
CALLING = {"type": "turn", "text": "I will look.", "calls": [CALL]}
DONE = {"type": "turn", "text": "Done."}

TRACE = Trace(
    name="fix",
    description="A small one.",
    instructions="You are an agent.",
    tools=(READ, PATCH, FILES),
    input=({"role": "user", "content": "Fix it."},),
    turns=(
        TraceTurn(
            text="I will look.",
            calls=(
                TraceCall(name="read", arguments='{"a":"é\\n"}', output="x\n", seconds=0.25),
                TraceCall(name="files.stat", arguments="{}", output=""),
            ),
        ),
        TraceTurn(
            calls=(TraceCall(name="patch", input="+ import c\n", output="Done."),),
            messages=({"role": "user", "content": "Be quick."},),
        ),
        TraceTurn(text="The import is fixed."),
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


def write(path: Path, *records: object) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def error_in(path: Path) -> TraceError:
    with pytest.raises(TraceError) as caught:
        read_traces(path)
    return caught.value


# --- Files that hold traces ----------------------------------------------------------------------


def test_what_is_written_is_read_back(path: Path) -> None:
    other = msgspec.structs.replace(TRACE, name="other", input="Go on.", instructions=None)

    write_traces(str(path), [TRACE, other])

    assert read_traces(str(path)) == [TRACE, other]


def test_members_that_say_nothing_are_not_written(path: Path) -> None:
    write_traces(path, [Trace(name="short", input="Hello", turns=(TraceTurn(text="Hi."),))])

    lines = [json.loads(line) for line in path.read_text().splitlines()]

    assert lines == [
        {"type": "trace", "version": 1, "name": "short", "input": "Hello"},
        {"type": "turn", "text": "Hi."},
    ]


def test_empty_lines_and_the_last_line_break_make_no_difference(path: Path) -> None:
    path.write_text(f"\n{json.dumps(HEADER)}\r\n \n{json.dumps(DONE)}")

    [trace] = read_traces(path)

    assert trace.turns == (TraceTurn(text="Done."),)


def test_calls_are_items_of_a_conversation() -> None:
    first, second = TRACE.turns[0].call_items()
    [third] = TRACE.turns[1].call_items()

    assert first == FunctionCall("call_0", "read", '{"a":"é\\n"}')
    assert second == FunctionCall("call_1", "stat", "{}", "files")
    assert third == CustomToolCall("call_0", "patch", "+ import c\n")


# --- Files that do not ---------------------------------------------------------------------------


def calling(**members: Any) -> dict[str, Any]:
    return {**CALLING, "calls": [{**CALL, **members}]}


@pytest.mark.parametrize(
    ("record", "member"),
    [
        ({**CALLING, "type": "round"}, "type"),
        ({**CALLING, "txt": "Hm."}, "txt"),
        ({**CALLING, "text": 1}, "text"),
        ({"type": "turn", "text": "Look.", "calls": [{"name": "read"}]}, "calls[0].output"),
        (calling(seconds=-1), "calls[0].seconds"),
        (calling(name="write"), "calls[0].name"),
        (calling(arguments=None), "calls[0]"),
        (calling(input="x"), "calls[0]"),
        (calling(name="patch"), "calls[0]"),
        (calling(arguments="{"), "calls[0].arguments"),
        (calling(arguments="[1]"), "calls[0].arguments"),
        (calling(arguments=' {"path": 1} '), "calls[0]"),
        (calling(name="patch", arguments=None, input="a\n</tool_call>"), "calls[0]"),
        ({**DONE, "text": "Write <tool_call>"}, "text"),
        ({**CALLING, "text": call_text("read", "{}")}, "text"),
        ({**CALLING, "text": " \n"}, "text"),
        ({"type": "turn"}, "text"),
        ({**DONE, "messages": [{"role": "user", "content": "Hm."}]}, "messages"),
        ({**CALLING, "messages": [{"role": "user"}]}, "messages[0].content"),
        ({**CALLING, "messages": [{"role": "assistant", "content": "Hm."}]}, "messages[0]"),
    ],
)
def test_a_turn_that_is_wrong_is_told_by_its_number_and_the_member(
    path: Path, record: object, member: str
) -> None:
    write(path, HEADER, CALLING, record)

    error = error_in(path)

    assert (error.path, error.line, error.member) == (path, 3, member)
    assert str(error).startswith(f"{path}:3: {member}: ")


@pytest.mark.parametrize(
    ("record", "member"),
    [
        ({**HEADER, "name": "other", "version": 2}, "version"),
        ({**HEADER, "name": ""}, "name"),
        ({**HEADER, "name": "other", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({**HEADER, "name": "other", "input": [{"type": "message"}]}, "input[0].role"),
    ],
)
def test_a_trace_that_is_wrong_is_told_by_its_number_and_the_member(
    path: Path, record: object, member: str
) -> None:
    write(path, HEADER, DONE, record)

    error = error_in(path)

    assert (error.line, error.member) == (3, member)


@pytest.mark.parametrize(
    ("records", "line", "message"),
    [
        ([], 1, "expected a trace, got an empty file"),
        ([DONE], 1, "type: expected a line of type 'trace' before the first turn"),
        ([HEADER], 1, "expected a turn of 'fix', got none"),
        ([HEADER, HEADER], 1, "expected a turn of 'fix', got none"),
        ([HEADER, CALLING], 2, "calls: expected a last turn without calls"),
        ([HEADER, CALLING, HEADER], 2, "calls: expected a last turn without calls"),
        ([HEADER, DONE, DONE], 3, "expected no turn after one without calls"),
        ([HEADER, DONE, HEADER, DONE], 3, "name: expected a name used once, got 'fix'"),
    ],
)
def test_lines_in_an_order_that_makes_no_trace_are_refused(
    path: Path, records: list[object], line: int, message: str
) -> None:
    write(path, *records)

    error = error_in(path)

    assert error.line == line
    assert str(error) == f"{path}:{line}: {message}"


@pytest.mark.parametrize("line", ["{", "[]", '"turn"', b"\xff".decode("latin-1")])
def test_a_line_that_is_no_object_is_refused(path: Path, line: str) -> None:
    path.write_bytes(line.encode("latin-1"))

    assert error_in(path).line == 1


DEEP = "[" * 100_000 + "]" * 100_000


def test_a_line_that_is_nested_too_deeply_is_refused(path: Path) -> None:
    path.write_text(json.dumps(HEADER).replace('"tools": [', f'"tools": [{{"deep": {DEEP}}}, '))

    assert str(error_in(path)) == f"{path}:1: expected JSON that is nested less deeply"


def test_arguments_that_are_nested_too_deeply_are_refused(path: Path) -> None:
    write(path, HEADER, calling(arguments=DEEP))

    assert (error_in(path).line, error_in(path).member) == (2, "calls[0].arguments")


def test_a_file_that_is_not_there_is_an_error_of_the_system(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_traces(path)


# --- Transcripts ---------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "traces.md"


def documented(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_documented_example_is_a_trace(path: Path) -> None:
    path.write_text(documented("json"))

    [trace] = read_traces(path)

    assert [len(turn.calls) for turn in trace.turns] == [1, 0]


def test_the_documented_function_makes_a_trace_of_a_transcript(path: Path) -> None:
    request = {"instructions": "You are an agent.", "tools": [READ, PATCH], "input": "Fix it."}
    call = {"type": "function_call", "call_id": "a", "name": "read", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "+ c"}
    user = {"type": "message", "role": "user", "content": "Be quick."}
    items = [
        {"type": "reasoning", "summary": []},
        said("I will look."),
        call,
        custom,
        {"type": "function_call_output", "call_id": "a", "output": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "y"},
        user,
        call | {"call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "z"},
        said("Done."),
    ]
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(documented("python"), DOCUMENT, "exec"), names)

    trace = names["trace_of"]("mine", request, items)

    write_traces(path, [trace])
    assert read_traces(path) == [trace]
    first, second, third = trace.turns
    assert [(c.name, c.arguments, c.input, c.output) for c in first.calls] == [
        ("read", "{}", None, "x"),
        ("patch", None, "+ c", "y"),
    ]
    assert (first.text, first.messages) == ("I will look.", (user,))
    assert (second.text, [c.output for c in second.calls], second.messages) == ("", ["z"], ())
    assert third == TraceTurn(text="Done.")


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content}
