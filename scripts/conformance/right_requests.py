"""Requests that are right, of as many kinds as there are, for others to be made of them."""

from collections.abc import Sequence

from protocol.conformance.check import Target, Way
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import CALLING, TOOL, output
from scripts.conformance.places import LIMIT

CALL_ID = "call_of_the_response"
"""Stands for the id of the call that a response waits at."""
RESPONSE_ID = "resp_that_is_open"
"""Stands for the id of that response."""
FEW_TOKENS = 16
"""The limit of what a request makes the model write."""

_NOBODY = "resp_0123456789abcdef"
_MESSAGE: Event = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "Is it dry in Oslo? ☔"}],
}
_SCHEMA: Event = {
    "type": "object",
    "properties": {"dry": {"type": "boolean"}, "why": {"type": ["string", "null"]}},
    "required": ["dry", "why"],
    "additionalProperties": False,
}
_PAST_CALL: Event = {
    "type": "function_call",
    "call_id": "call_past",
    "name": "get_weather",
    "arguments": '{"city": "Oslo"}',
}
_GRAMMAR: Event = {"type": "grammar", "syntax": "lark", "definition": 'start: "yes" | "no"'}

_CREATES: tuple[Event, ...] = (
    {},
    {"input": [_MESSAGE]},
    {"input": [_MESSAGE, _PAST_CALL, output(_PAST_CALL)], "tools": [TOOL]},
    CALLING,
    {
        **CALLING,
        "tools": [TOOL | {"strict": True}],
        "tool_choice": {"type": "function", "name": TOOL["name"]},
    },
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA, "strict": True}}},
    {
        "tools": [{"type": "custom", "name": "answer", "format": _GRAMMAR}],
        "tool_choice": "required",
    },
    {"previous_response_id": _NOBODY},
    {"input": [], "generate": False, "tools": [TOOL]},
    {
        "instructions": "Be brief.",
        "metadata": {"key": "value"},
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "top_logprobs": 0,
        "prompt_cache_key": "junk",
    },
)


_OUTPUT = output({"type": "function_call", "call_id": CALL_ID})
_INJECT: Event = {"type": "response.inject", "response_id": RESPONSE_ID}
_OTHERS: dict[Way, list[Event]] = {
    Way.APPEND: [
        {"type": "response.append", "input": [_OUTPUT]},
        {"type": "response.append", "input": [_OUTPUT, _MESSAGE]},
        {
            "type": "response.append",
            "input": [
                _PAST_CALL | {"call_id": CALL_ID},
                _OUTPUT | {"output": _MESSAGE["content"]},
            ],
            "tool_choice": "auto",
        },
    ],
    Way.INJECT: [
        _INJECT | {"input": [_OUTPUT]},
        _INJECT | {"input": [_OUTPUT | {"output": [{"type": "input_text", "text": "dry"}]}]},
        _INJECT | {"response_id": _NOBODY, "input": [_OUTPUT]},
    ],
}
_STEER: Event = {"type": "response.steer", "previous_response_id": _NOBODY}
_STEERS: list[Event] = [_STEER | {"input": text} for text in ("Faster.", [_MESSAGE])]


def creates(target: Target) -> list[Event]:
    """Return bodies of creates."""
    bodies = [target.body(**{LIMIT: FEW_TOKENS} | members) for members in _CREATES]
    return [body | {"stream": streams} for body in bodies for streams in (False, True)]


def frames(target: Target, way: Way) -> list[Event]:
    """Return frames, half of them creates."""
    lanes: Sequence[Event] = ({}, {"stream_id": "a"}, {"stream_id": "b"})
    of_creates = [
        {"type": "response.create", **create, **lane}
        for create in creates(target)
        for lane in lanes
    ]
    others = _OTHERS.get(way, [])
    return (
        of_creates + others * (len(of_creates) // len(others)) if others else of_creates + _STEERS
    )
