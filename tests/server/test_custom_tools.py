"""Tools that take free text: any, or what a regular expression or a Lark grammar describes."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from sampler.local_engine import LocalEngine
from server.settings import Settings
from tests.server.http_client import (
    cached_tokens,
    context_length,
    post,
    post_refused,
    post_streamed,
)
from tests.server.models import inputs_of
from tests.server.refusals import Refusal
from tests.server.running import BODY, Event, Running, calls_in, output, serving, text_in
from tests.tiny_model import tiny_model

QUESTION = {"role": "user", "content": BODY["input"]}
KEEPING = Settings(recent_responses=4)

# The patches of Codex, with all that its grammar asks of Lark.
PATCH_GRAMMAR = r"""start: head change+ tail
head: "*** Begin Patch" LF
tail: "*** End Patch" LF?

// One change for each file.
change: added | removed | updated
added: "*** Add File: " path LF new_line+
removed: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? part?

path: /(.+)/
new_line: "+" /(.*)/ LF -> line
moved: "*** Move to: " path LF
part: (place | line)+ last?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF

%import common.LF
"""
PATCH = """*** Begin Patch
*** Add File: æ.py
+print("<tool_call>")
+
*** Delete File: b
*** Update File: c
*** Move to: d
@@ def f():
-x
+y
*** End of File
*** End Patch"""


def custom_tool(name: str = "run", text_format: Event | None = None) -> Event:
    tool = {"type": "custom", "name": name, "description": "Runs"}
    return tool if text_format is None else tool | {"format": text_format}


def grammar(syntax: str, definition: str) -> Event:
    return {"type": "grammar", "syntax": syntax, "definition": definition}


def free_text_call(text: str, name: str = "run") -> str:
    """Return the text in which the model calls a tool with free text."""
    return f'<tool_call>\n{{"name": "{name}"}}\n{text}\n</tool_call>'


FORMATS: dict[str, tuple[Event | None, str]] = {
    "no format": (None, "ls\n\n  -l"),
    "text": ({"type": "text"}, '{"a": "<|im_end|>"}'),
    "regex": (grammar("regex", r"[a-z]+ [0-9]{2}"), "sol 42"),
    "lark": (grammar("lark", 'start: ("a" NUMBER)+\nNUMBER: /[0-9]+/'), "a1a22"),
    "patch": (grammar("lark", PATCH_GRAMMAR), PATCH),
    "empty": ({"type": "text"}, ""),
}


# --- Calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
async def test_a_call_is_told_piece_by_piece(name: str) -> None:
    text_format, text = FORMATS[name]
    async with serving(free_text_call(text)) as server:
        events = await post_streamed(server, tools=[custom_tool(text_format=text_format)])

        kinds = [event["type"].removeprefix("response.") for event in events]
        (call,) = calls_in(events)
        added = next(e["item"] for e in events if e["type"] == "response.output_item.added")
        deltas = [e["delta"] for e in events if e["type"].endswith("tool_call_input.delta")]
        (done,) = (e for e in events if e["type"].endswith("tool_call_input.done"))
        assert added | {"status": "completed", "input": text} == call
        assert added["input"] == ""
        assert call["type"] == "custom_tool_call"
        assert call["name"] == "run"
        assert "namespace" not in call
        assert "".join(deltas) == done["input"] == text
        assert kinds[-3:] == ["custom_tool_call_input.done", "output_item.done", "completed"]


@pytest.mark.parametrize("name", ["text", "lark"])
async def test_its_output_is_answered_however_it_comes_back(name: str) -> None:
    text_format, text = FORMATS[name]
    tools = [custom_tool(text_format=text_format)]
    read: list[list[int]] = []
    async with serving(free_text_call(text), "Sun.", settings=KEEPING) as server:
        first = await post(server, tools=tools)
        (call,) = first["output"]
        last = await post(server, tools=tools, input=[QUESTION, call, custom_output(call)])

        assert text_in(last) == "Sun."
        assert cached_tokens(last) == context_length(first)
        read.append(inputs_of(server.engine))
    async with serving(free_text_call(text), "Sun.", settings=KEEPING) as server:
        first = await post(server, tools=tools)
        outputs = [custom_output(first["output"][0])]
        await post(server, tools=tools, previous_response_id=first["id"], input=outputs)
        read.append(inputs_of(server.engine))
    async with serving(free_text_call(text), "Sun.") as server:
        async with server.connect("append") as client:
            (call,) = calls_in(await client.create(tools=tools))
            echoed = {key: call[key] for key in ("type", "call_id", "name", "input")}
            await client.append(echoed, custom_output(call))
        read.append(inputs_of(server.engine))
    assert read[0] == read[1] == read[2]


def custom_output(call: Event, text: Any = "Done. Æ") -> Event:
    return {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": text}


async def test_the_output_may_have_the_type_of_a_functions() -> None:
    async with serving(free_text_call("ls"), "Sun.", settings=KEEPING) as server:
        tools = [custom_tool()]
        first = await post(server, tools=tools)
        (call,) = first["output"]
        answer = custom_output(call) | {"type": "function_call_output"}
        last = await post(server, tools=tools, input=[QUESTION, call, answer])

        assert text_in(last) == "Sun."


async def test_an_output_may_come_in_parts() -> None:
    """Codex 0.171 sends what its code mode returned as a list."""
    parts = [{"type": "input_text", "text": "Done."}, {"type": "input_text", "text": " Æ"}]
    async with serving(free_text_call("ls"), "Sun.") as server, server.connect() as client:
        events = await client.create(tools=[custom_tool()])
        parent = events[-1]["response"]
        last = await client.create(
            tools=[custom_tool()],
            previous_response_id=parent["id"],
            input=[custom_output(parent["output"][0], parts)],
        )

        assert "Done. Æ" in read_text(server)
        assert text_in(last[-1]["response"]) == "Sun."


async def test_functions_and_free_text_can_be_called_in_one_turn() -> None:
    calls = f'{free_text_call("ls")}\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>'
    tools = [custom_tool(), {"type": "function", "name": "f"}]
    async with serving(calls, "Sun.") as server, server.connect("append") as client:
        custom, function = calls_in(await client.create(tools=tools))
        last = await client.append(
            {"type": "function_call_output", "call_id": function["call_id"], "output": "1"},
            custom_output(custom),
        )

        assert (custom["type"], function["type"]) == ("custom_tool_call", "function_call")
        assert text_in(last[-1]["response"]) == "Sun."


async def test_the_declaration_is_repeated_as_it_came() -> None:
    tool = custom_tool(text_format=grammar("lark", PATCH_GRAMMAR)) | {"x_member": 1}
    async with serving("Sun.") as server:
        response = await post(server, tools=[tool])

        assert response["tools"] == [tool]


# --- What the grammar enforces -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text_format", "pattern"),
    [
        (grammar("regex", r"(sun|rain) [0-9]{1,3}"), r"(sun|rain) [0-9]{1,3}"),
        (grammar("lark", 'start: "a" b\nb: /[xyz]{2}/ | "é"'), r"a([xyz]{2}|é)"),
        (None, r"(?s:.){0,8}"),
    ],
)
async def test_a_forced_input_is_of_its_form_whatever_the_model_would_rather_say(
    text_format: Event | None, pattern: str
) -> None:
    tool = custom_tool(text_format=text_format)
    choice = {"type": "custom", "name": "run"}
    async with serving(engine=LocalEngine(tiny_model(), max_forced_string=8)) as server:
        for seed in range(3):
            response = await post(server, tools=[tool], tool_choice=choice, seed=seed)

            (call,) = response["output"]
            assert call["type"] == "custom_tool_call"
            assert re.fullmatch(pattern, call["input"]), call["input"]


async def test_a_patch_cannot_go_wrong() -> None:
    tool = custom_tool(text_format=grammar("lark", PATCH_GRAMMAR))
    async with serving(free_text_call("--- a/file\n+++ b/file")) as server:
        response = await post(server, tools=[tool], seed=0, max_output_tokens=60)

        (call,) = response["output"]
        assert call["input"].startswith("*** Begin Patch\n*** ")
        assert call["status"] == response["status"] == "incomplete"


async def test_a_call_that_was_cut_short_need_not_be_answered() -> None:
    async with serving(free_text_call("a" * 40), "Sun.", settings=KEEPING) as server:
        first = await post(server, tools=[custom_tool()], max_output_tokens=20)
        last = await post(server, previous_response_id=first["id"], input="Go on.")

        assert first["output"][0]["status"] == "incomplete"
        assert text_in(last) == "Sun."


BAD_TOOLS: dict[str, tuple[Sequence[Event], Refusal]] = {
    "a regular expression that is none": (
        [custom_tool(text_format=grammar("regex", "(a"))],
        Refusal(400, "invalid_value", "tools[0].format"),
    ),
    "a rule that is not there": (
        [custom_tool(text_format=grammar("lark", "start: x"))],
        Refusal(400, "invalid_value", "tools[0].format"),
    ),
    "a grammar of control tokens": (
        [custom_tool(text_format=grammar("lark", "start: <|im_end|>"))],
        Refusal(400, "invalid_value", "tools[0].format"),
    ),
    "a grammar without a start": (
        [custom_tool(text_format=grammar("lark", 'begin: "a"'))],
        Refusal(400, "invalid_value", "tools[0].format"),
    ),
    "an unknown syntax": (
        [custom_tool(text_format=grammar("gbnf", "root ::= x"))],
        Refusal(400, "invalid_value", "tools[0].format.syntax"),
    ),
    "no definition": (
        [custom_tool(text_format={"type": "grammar", "syntax": "lark"})],
        Refusal(400, "missing_required_parameter", "tools[0].format.definition"),
    ),
    "a tool behind one that is not for the model": (
        [{"type": "web_search"}, custom_tool(text_format=grammar("regex", "(a"))],
        Refusal(400, "invalid_value", "tools[1].format"),
    ),
    "a tool in a namespace": (
        [
            {"type": "function", "name": "f"},
            {
                "type": "namespace",
                "name": "shell",
                "tools": [
                    {"type": "web_search"},
                    custom_tool("a"),
                    custom_tool("b", grammar("regex", "(a")),
                ],
            },
        ],
        Refusal(400, "invalid_value", "tools[1].tools[2].format"),
    ),
}


@pytest.mark.parametrize("name", BAD_TOOLS)
async def test_a_grammar_that_cannot_be_kept_is_refused(name: str) -> None:
    tools, expected = BAD_TOOLS[name]
    async with serving("Sun.") as server:
        assert await post_refused(server, tools=tools) == expected


async def test_a_grammar_that_cannot_be_kept_is_refused_where_the_input_declares_it() -> None:
    tools = [custom_tool("e"), custom_tool("f", grammar("regex", "(a"))]
    declared = {"type": "additional_tools", "tools": tools}
    async with serving("Sun.", "Sun.") as server, server.connect() as client:
        parent = (await client.create())[-1]["response"]
        members: Event = BODY | {"input": [QUESTION, declared]}
        await client.send("response.create", previous_response_id=parent["id"], **members)
        error = await client.error()

        assert (error["status"], error["error"]["param"]) == (400, "input[1].tools[1].format")


# --- Namespaces ----------------------------------------------------------------------------------

NAMESPACE: Event = {
    "type": "namespace",
    "name": "shell",
    "description": "The shell.",
    "tools": [
        custom_tool("exec"),
        {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}},
    ],
}
EXEC = free_text_call("ls", "shell.exec")
WAIT = '<tool_call>\n{"name": "shell.wait", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(("call_text", "name"), [(EXEC, "exec"), (WAIT, "wait")])
async def test_a_call_in_a_namespace_names_it_apart(call_text: str, name: str) -> None:
    async with serving(call_text, "Sun.", settings=KEEPING) as server:
        events = await post_streamed(server, tools=[NAMESPACE])
        (call,) = calls_in(events)
        first = events[-1]["response"]
        answer = output(call) | {"type": call["type"] + "_output"}
        last = await post(server, tools=[NAMESPACE], input=[QUESTION, call, answer])

        assert (call["namespace"], call["name"]) == ("shell", name)
        assert cached_tokens(last) == context_length(first)
        assert text_in(last) == "Sun."
        assert last["tools"] == [NAMESPACE]


async def test_tools_of_one_name_in_two_namespaces_are_told_apart() -> None:
    other = NAMESPACE | {"name": "remote"}
    called = free_text_call("ls", "remote.exec")
    async with serving(called) as server:
        response = await post(server, tools=[NAMESPACE, other])

        (call,) = response["output"]
        assert (call["namespace"], call["name"]) == ("remote", "exec")


async def test_a_tool_in_a_namespace_can_be_forced() -> None:
    choice = {"type": "custom", "namespace": "shell", "name": "exec"}
    async with serving(engine=LocalEngine(tiny_model(), max_forced_string=4)) as server:
        response = await post(server, tools=[NAMESPACE], tool_choice=choice, seed=0)

        (call,) = response["output"]
        assert (call["namespace"], call["name"]) == ("shell", "exec")


async def test_tools_may_be_declared_in_the_input() -> None:
    """Codex 0.171 does so for the models that it knows, in the first request of a chain."""
    declared = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [NAMESPACE]}
    async with serving(EXEC, WAIT, "Sun.") as server, server.connect() as client:
        warm = await client.create(tools=None, input=[], generate=False)
        first = await client.create(
            tools=None,
            previous_response_id=warm[-1]["response"]["id"],
            input=[declared, QUESTION],
        )
        (call,) = calls_in(first)
        second = await client.create(
            tools=None,
            previous_response_id=first[-1]["response"]["id"],
            input=[custom_output(call)],
        )
        (wait,) = calls_in(second)

        assert (call["namespace"], call["name"]) == ("shell", "exec")
        assert (wait["namespace"], wait["name"]) == ("shell", "wait")
        assert cached_tokens(second[-1]["response"]) == context_length(first[-1]["response"])


def read_text(server: Running) -> str:
    """Return all that the model read, as text; control tokens are left out."""
    tokenizer = server.engine.model.tokenizer
    return b"".join(map(tokenizer.token_bytes, inputs_of(server.engine))).decode()
