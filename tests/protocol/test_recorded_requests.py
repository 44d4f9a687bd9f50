"""What real clients were recorded to send, long texts cut, is understood as it was meant."""

from typing import Any

import pytest

from protocol.client_events import (
    TextFormatKind,
    parse_append,
    parse_create,
    resolve_append,
    resolve_tool_choice,
)
from protocol.codec import decode_object, encode
from protocol.items import check_calls_are_answered, tools_in_effect

JsonObject = dict[str, Any]


def function(name: str, **members: Any) -> JsonObject:
    parameters = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    return {"type": "function", "name": name, "parameters": parameters} | members


def user(text: str) -> JsonObject:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
EXEC = {"type": "custom", "name": "exec", "description": "runs code", "format": LARK}
NAMESPACES = [
    {
        "type": "namespace",
        "name": "functions",
        "description": "",
        "tools": [EXEC, function("wait", strict=False)],
    },
    {
        "type": "namespace",
        "name": "collaboration",
        "description": "Tools for spawning and managing sub-agents.",
        "tools": [function("list_agents", strict=False)],
    },
]
THOUGHT = {
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "thinking briefly"}],
    "encrypted_content": "ENCxxxxxxxxxxxxxxxxxxxx",
}
ECHOED_MESSAGE = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Let me look."}],
    "phase": "commentary",
}
CALL = {"type": "function_call", "call_id": "call_10", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_10", "output": "hi-42\n"}

CODEX = {
    "type": "response.create",
    "model": "gpt-5.2-codex",
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0192",
    "client_metadata": {"x-codex-turn-metadata": "{}"},
}
CODEX_TOOLS = [
    function("exec_command", strict=False),
    {"type": "custom", "name": "apply_patch", "description": "edits files", "format": LARK},
    {"type": "web_search", "external_web_access": True},
]

CREATES: dict[str, tuple[JsonObject, str, list[str]]] = {
    "Codex 0.98, create": (
        CODEX | {"instructions": "x", "input": [user("Say hi.")], "tools": CODEX_TOOLS},
        "Message",
        ["exec_command", "apply_patch"],
    ),
    "Codex 0.107, warm-up": (
        CODEX
        | {"instructions": "x", "input": [], "tools": CODEX_TOOLS, "generate": False}
        | {"reasoning": {"effort": "medium", "summary": "auto"}},
        "",
        ["exec_command", "apply_patch"],
    ),
    "Codex 0.171, namespaces in the tools": (
        CODEX | {"previous_response_id": "resp_1", "input": [OUTPUT], "tools": NAMESPACES},
        "CallOutput",
        ["functions.exec", "functions.wait", "collaboration.list_agents"],
    ),
    "Codex 0.171, tools in the input": (
        CODEX
        | {"previous_response_id": "resp_1", "reasoning": {"effort": "low", "context": "all_turns"}}
        | {"text": {"verbosity": "low"}}
        | {
            "input": [
                {
                    "type": "additional_tools",
                    "role": "developer",
                    "tools": NAMESPACES,
                    "id": "at_1",
                },
                {"type": "message", "id": "msg_1", "role": "developer", "content": []},
                user("Say hi.") | {"type": "message", "id": "msg_2"},
            ]
        },
        "AdditionalTools Message Message",
        ["functions.exec", "functions.wait", "collaboration.list_agents"],
    ),
    "Codex 0.171, an output in parts": (
        CODEX
        | {"previous_response_id": "resp_2"}
        | {
            "input": [
                {
                    "type": "custom_tool_call_output",
                    "id": "ctco_1",
                    "call_id": "call_20",
                    "output": [
                        {"type": "input_text", "text": "Script completed\n"},
                        {"type": "input_text", "text": "hi-42"},
                    ],
                }
            ]
        },
        "CallOutput",
        [],
    ),
    "AI SDK 7, references": (
        {
            "model": "stub",
            "input": [
                {"role": "system", "content": "Be brief."},
                user("Weather in Oslo?"),
                {"type": "item_reference", "id": "rs_1"},
                {"type": "item_reference", "id": "msg_p1"},
                CALL,
                OUTPUT,
            ],
            "tool_choice": "auto",
            "stream": True,
            "tools": [function("f", strict=False)],
        },
        "Message Message ItemReference ItemReference FunctionCall CallOutput",
        ["f"],
    ),
    "opencode, full history": (
        {
            "model": "stub",
            "input": [user("Say hi."), THOUGHT, ECHOED_MESSAGE, CALL, OUTPUT],
            "max_output_tokens": 2048,
            "store": False,
            "prompt_cache_key": "session",
            "tool_choice": "auto",
            "stream": True,
            "tools": [function("f")],
        },
        "Message ReasoningItem Message FunctionCall CallOutput",
        ["f"],
    ),
    "llm, content as a string": (
        {
            "model": "stub",
            "stream": True,
            "input": [
                {"role": "user", "content": "version?"},
                THOUGHT | {"id": "rs_1"},
                {"role": "assistant", "content": "Let me look."},
                CALL,
                OUTPUT,
            ],
            "store": False,
        },
        "Message ReasoningItem Message FunctionCall CallOutput",
        [],
    ),
    "agents JS, ids and statuses, the type last": (
        {
            "model": "stub",
            "instructions": "Be brief.",
            "input": [
                {"type": "message", "role": "user", "content": "Weather?"},
                THOUGHT
                | {"id": "rs_1", "status": "completed"}
                | {"content": [{"type": "reasoning_text", "text": "raw thought"}]},
                ECHOED_MESSAGE | {"id": "msg_p1", "status": "completed"},
                CALL | {"id": "fc_10", "status": "completed"},
                OUTPUT | {"status": "completed"},
            ],
            "include": [],
            "stream": True,
            "type": "response.create",
        },
        "Message ReasoningItem Message FunctionCall CallOutput",
        [],
    ),
    "Cline, hosted tools": (
        {
            "model": "stub",
            "input": [user("Say hi.")],
            "include": ["web_search_call.action.sources"],
            "truncation": "auto",
            "tools": [
                {"type": "web_search"},
                {"type": "image_generation"},
                function("run_commands"),
            ],
        },
        "Message",
        ["run_commands"],
    ),
}


@pytest.mark.parametrize("name", CREATES)
def test_a_recorded_create_is_understood(name: str) -> None:
    body, items, callable_names = CREATES[name]

    params = parse_create(decode_object(encode(body)), transport="websocket")

    assert [type(item).__name__ for item in params.input] == items.split()
    tools = tools_in_effect(params.tools, params.input)
    assert [tool.name for tool in tools] == callable_names
    assert not resolve_tool_choice(params, tools).is_forced
    assert params.input_json == body["input"]
    if params.previous_response_id is None:
        check_calls_are_answered(params.input)


@pytest.mark.parametrize(
    "text_format",
    [
        {
            "type": "json_schema",
            "strict": True,
            "name": "response",
            "schema": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {
                    "n": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}
                },
                "required": ["n"],
                "additionalProperties": False,
            },
        },
        {"type": "json_schema", "name": "output", "schema": {"type": "object"}, "strict": False},
    ],
    ids=["AI SDK 7", "llm"],
)
def test_a_recorded_schema_is_understood(text_format: JsonObject) -> None:
    body = {"model": "stub", "input": "x", "text": {"format": text_format}}

    params = parse_create(decode_object(encode(body)), transport="http")

    assert params.text_format.kind is TextFormatKind.JSON_SCHEMA
    assert params.text_format.schema == text_format["schema"]


@pytest.mark.parametrize(
    "items",
    [
        [OUTPUT],
        [CALL, OUTPUT],
        [
            THOUGHT | {"content": [{"type": "reasoning_text", "text": "raw thought"}]},
            ECHOED_MESSAGE,
            CALL,
            OUTPUT,
        ],
    ],
    ids=["Codex 0.107", "Codex 0.87", "Codex 0.98"],
)
def test_a_recorded_append_brings_its_outputs_and_nothing_else(items: list[JsonObject]) -> None:
    frame = {"type": "response.append", "input": items, "client_metadata": {}}

    append = parse_append(decode_object(encode(frame)), [])

    resolved = resolve_append(append.input, ["call_10"], {}, ["call_10"])
    assert resolved.outputs == {"call_10": "hi-42\n"}
    assert resolved.messages == []
