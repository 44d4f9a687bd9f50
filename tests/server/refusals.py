"""Requests that are refused, with the answer that each must get (protocol/errors.py)."""

from typing import Any, NamedTuple

from protocol.codec import encode
from tests.server.running import BODY, TOOL, Event


class Refusal(NamedTuple):
    """What a client is told."""

    status: int
    code: str | None
    param: str | None = None


def refusal(status: int, error: Event) -> Refusal:
    """Return what ``error``, which came with ``status``, says."""
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return Refusal(status, error["code"], error["param"])


def tool(**members: Any) -> list[Event]:
    return [TOOL | members]


def strict_tool(parameters: Event) -> Event:
    return TOOL | {"name": "b", "parameters": parameters, "strict": True}


def part(**members: Any) -> list[Event]:
    return [{"role": "user", "content": [members]}]


def lark(definition: str) -> Event:
    return {"type": "grammar", "syntax": "lark", "definition": definition}


CALL = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "dry"}
TOO_DEEP = encode([])[:1].decode() * 100_000

# By a name for the test: members of a create in place of ``BODY``'s, or the whole body as text.
BAD_BODIES: dict[str, tuple[Event | str, Refusal]] = {
    "unfinished JSON": ('{"input": ', Refusal(400, "invalid_json")),
    "an array": ("[]", Refusal(400, "invalid_json")),
    "a string": ('"response.create"', Refusal(400, "invalid_json")),
    "null": ("null", Refusal(400, "invalid_json")),
    "nothing": ("", Refusal(400, "invalid_json")),
    "NaN": ('{"temperature": NaN}', Refusal(400, "invalid_json")),
    "deep nesting": ('{"input": ' + TOO_DEEP, Refusal(400, "invalid_json")),
    "a lone surrogate": (r'{"input": "\ud800"}', Refusal(400, "invalid_json")),
    "a lone surrogate in a key": (r'{"input": "a", "\udc00": 1}', Refusal(400, "invalid_json")),
    "no input": ({"input": None}, Refusal(400, "missing_required_parameter", "input")),
    "empty input": ({"input": []}, Refusal(400, "missing_required_parameter", "input")),
    "input of a number": ({"input": 5}, Refusal(400, "invalid_type", "input")),
    "input of numbers": ({"input": [5]}, Refusal(400, "invalid_type", "input[0]")),
    "input of unknown items": (
        {"input": [{"type": "agent_message"}]},
        Refusal(400, "invalid_value", "input"),
    ),
    "an item of no type": (
        {"input": [{"text": "Hi"}]},
        Refusal(400, "missing_required_parameter", "input[0].type"),
    ),
    "an unknown role": (
        {"input": [{"role": "judge", "content": "Hi"}]},
        Refusal(400, "invalid_value", "input[0].role"),
    ),
    "no content": (
        {"input": [{"role": "user"}]},
        Refusal(400, "missing_required_parameter", "input[0].content"),
    ),
    "a part without text": (
        {"input": part(type="input_text")},
        Refusal(400, "missing_required_parameter", "input[0].content[0].text"),
    ),
    "an image": (
        {"input": part(type="input_image", image_url="data:")},
        Refusal(400, "unsupported_content", "input[0].content[0]"),
    ),
    "an item reference": (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        Refusal(400, "item_not_found", "input[0]"),
    ),
    "a call without output": ({"input": [CALL]}, Refusal(400, None, "input")),
    "an output without call": ({"input": [OUTPUT]}, Refusal(400, None, "input")),
    "a call answered twice": (
        {"input": [CALL, OUTPUT, OUTPUT]},
        Refusal(400, "duplicate_call_id", "input"),
    ),
    "an unknown model": ({"model": "gpt-9"}, Refusal(404, "model_not_found", "model")),
    "a model of a number": ({"model": 5}, Refusal(400, "invalid_type", "model")),
    "instructions of a number": ({"instructions": 5}, Refusal(400, "invalid_type", "instructions")),
    "temperature of a word": ({"temperature": "hot"}, Refusal(400, "invalid_type", "temperature")),
    "temperature too high": ({"temperature": 2.5}, Refusal(400, "invalid_value", "temperature")),
    "top_p of zero": ({"top_p": 0}, Refusal(400, "invalid_value", "top_p")),
    "no output wanted": (
        {"max_output_tokens": 0},
        Refusal(400, "invalid_value", "max_output_tokens"),
    ),
    "a budget of half a token": (
        {"max_output_tokens": 0.5},
        Refusal(400, "invalid_type", "max_output_tokens"),
    ),
    "a negative seed": ({"seed": -1}, Refusal(400, "invalid_value", "seed")),
    "a seed of 64 bits": ({"seed": 2**64}, Refusal(400, "invalid_value", "seed")),
    "metadata of numbers": ({"metadata": {"k": 5}}, Refusal(400, "invalid_type", "metadata")),
    "a choice of yes": (
        {"parallel_tool_calls": "yes"},
        Refusal(400, "invalid_type", "parallel_tool_calls"),
    ),
    "tools of a word": ({"tools": "all"}, Refusal(400, "invalid_type", "tools")),
    "tools of words": ({"tools": ["all"]}, Refusal(400, "invalid_type", "tools[0]")),
    "a tool of no type": (
        {"tools": [{"name": "a"}]},
        Refusal(400, "missing_required_parameter", "tools[0].type"),
    ),
    "a tool without a name": (
        {"tools": [{"type": "function"}]},
        Refusal(400, "missing_required_parameter", "tools[0].name"),
    ),
    "a name with a space": (
        {"tools": tool(name="get weather")},
        Refusal(400, "invalid_value", "tools[0].name"),
    ),
    "a name used twice": ({"tools": [TOOL, TOOL]}, Refusal(400, "invalid_value", "tools[1].name")),
    "parameters of a word": (
        {"tools": tool(parameters="any")},
        Refusal(400, "invalid_type", "tools[0].parameters"),
    ),
    "a schema of an unknown type": (
        {"tools": [TOOL, strict_tool({"properties": {"x": {"type": "tuple"}}})]},
        Refusal(400, "invalid_value", "tools[1].parameters"),
    ),
    "a schema that nothing satisfies": (
        {"tools": [strict_tool({"properties": {"x": False}, "required": ["x"]})]},
        Refusal(400, "invalid_value", "tools[0].parameters"),
    ),
    "a schema with a broken pattern": (
        {"tools": [strict_tool({"properties": {"x": {"type": "string", "pattern": "("}}})]},
        Refusal(400, "invalid_value", "tools[0].parameters"),
    ),
    "a schema of members that are no schemas": (
        {"tools": [strict_tool({"properties": {"x": 5}})]},
        Refusal(400, "invalid_value", "tools[0].parameters"),
    ),
    "an unknown choice": ({"tool_choice": "maybe"}, Refusal(400, "invalid_value", "tool_choice")),
    "a choice of no tool": (
        {"tools": [], "tool_choice": "required"},
        Refusal(400, "invalid_value", "tool_choice"),
    ),
    "a choice of an unknown tool": (
        {"tool_choice": {"type": "function", "name": "f"}},
        Refusal(400, "invalid_value", "tool_choice.name"),
    ),
    "an unknown parent": (
        {"previous_response_id": "resp_1"},
        Refusal(400, "previous_response_not_found", "previous_response_id"),
    ),
    "work in the background that is not stored": (
        {"background": True, "store": False},
        Refusal(400, "unsupported_parameter", "background"),
    ),
    "a conversation": (
        {"conversation": "c"},
        Refusal(400, "unsupported_parameter", "conversation"),
    ),
    "a stored prompt": ({"prompt": {"id": "p"}}, Refusal(400, "unsupported_parameter", "prompt")),
    "too many log probabilities": (
        {"top_logprobs": 21},
        Refusal(400, "invalid_value", "top_logprobs"),
    ),
    "a penalty too high": (
        {"presence_penalty": 2.5},
        Refusal(400, "invalid_value", "presence_penalty"),
    ),
    "a text format that nobody knows": (
        {"text": {"format": {"type": "xml"}}},
        Refusal(400, "invalid_value", "text.format.type"),
    ),
    "a text format without its schema": (
        {"text": {"format": {"type": "json_schema", "name": "answer"}}},
        Refusal(400, "missing_required_parameter", "text.format.schema"),
    ),
    "a text format of a schema that is none": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "tuple"}}}},
        Refusal(400, "invalid_value", "text.format.schema"),
    ),
    "a grammar that is none": (
        {"tools": [{"type": "custom", "name": "c", "format": lark("start: (")}]},
        Refusal(400, "invalid_value", "tools[0].format"),
    ),
    "a tool in a namespace without a name": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        Refusal(400, "missing_required_parameter", "tools[0].tools[0].name"),
    ),
    "more than the context": (
        {"input": "a" * 5000},
        Refusal(400, "context_length_exceeded", "input"),
    ),
}

BAD_FRAMES: dict[str, tuple[str, Refusal]] = {
    "no type": ('{"input": "Hi"}', Refusal(400, "missing_required_parameter", "type")),
    "a null type": ('{"type": null}', Refusal(400, "missing_required_parameter", "type")),
    "a type of a number": ('{"type": 5}', Refusal(400, "invalid_type", "type")),
    "an unknown type": (
        '{"type": "response.cancel"}',
        Refusal(400, "unsupported_event_type", "type"),
    ),
    "a server's type": (
        '{"type": "response.completed"}',
        Refusal(400, "unsupported_event_type", "type"),
    ),
    "work in the background": (
        '{"type": "response.create", "input": "Hi", "background": true}',
        Refusal(400, "unsupported_parameter", "background"),
    ),
    "a lane of no name": (
        '{"type": "response.create", "input": "Hi", "stream_id": ""}',
        Refusal(400, "invalid_stream_id", "stream_id"),
    ),
    "an append on a lane of no name": (
        '{"type": "response.append", "input": "Hi", "stream_id": "a b"}',
        Refusal(400, "invalid_stream_id", "stream_id"),
    ),
}

# Members of an append to a run that waits for one call.
BAD_APPENDS: dict[str, tuple[Event, Refusal]] = {
    "no input": ({}, Refusal(400, "missing_required_parameter", "input")),
    "null input": ({"input": None}, Refusal(400, "missing_required_parameter", "input")),
    "empty input": ({"input": []}, Refusal(400, "missing_required_parameter", "input")),
    "input of numbers": ({"input": [5]}, Refusal(400, "invalid_type", "input[0]")),
    "an output without call_id": (
        {"input": [{"type": "function_call_output", "output": "dry"}]},
        Refusal(400, "missing_required_parameter", "input[0].call_id"),
    ),
    "an output without output": (
        {"input": [{"type": "function_call_output", "call_id": "c"}]},
        Refusal(400, "missing_required_parameter", "input[0].output"),
    ),
    "an output of a number": (
        {"input": [OUTPUT | {"output": 5}]},
        Refusal(400, "invalid_type", "input[0].output"),
    ),
    "an output of an image": (
        {"input": [OUTPUT | {"output": [{"type": "input_image", "image_url": "data:"}]}]},
        Refusal(400, "unsupported_content", "input[0].output[0]"),
    ),
    "an unknown output": (
        {"input": [OUTPUT]},
        Refusal(400, "unknown_call_id", "input[0].call_id"),
    ),
    "an unknown call": ({"input": [CALL]}, Refusal(400, "unknown_call_id", "input[0].call_id")),
    "an unknown choice": (
        {"input": "Hi", "tool_choice": "maybe"},
        Refusal(400, "invalid_value", "tool_choice"),
    ),
    "a choice of an unknown tool": (
        {"input": "Hi", "tool_choice": {"type": "function", "name": "f"}},
        Refusal(400, "invalid_value", "tool_choice.name"),
    ),
    "tools": (
        {"input": [{"type": "additional_tools", "role": "developer", "tools": []}]},
        Refusal(400, "unsupported_parameter", "input[0]"),
    ),
    "nothing new": (
        {"input": [{"role": "assistant", "content": "Hm."}]},
        Refusal(400, "invalid_value", "input"),
    ),
    "another lane": ({"input": "Hi", "stream_id": "a"}, Refusal(400, "no_suspended_response")),
}


def body_text(body: Event | str, **members: Any) -> str:
    """Return a body of the table as text, with ``members`` added where it is an object."""
    return body if isinstance(body, str) else encode(BODY | body | members).decode()
