"""Dialogues to be held in more than one way, and the two ways a client holds them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
from websockets.sync.client import connect

JsonObject = dict[str, Any]

CITY = {"type": "string", "enum": ["Oslo", "Paris", "Lima", "Kyoto"]}
DICE = {"type": "integer", "minimum": 1, "maximum": 6}


def _function(name: str, description: str, **properties: JsonObject) -> JsonObject:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": parameters,
    }


TOOLS = [
    _function("weather", "Current weather in a city", city=CITY),
    _function("roll", "Roll a number of dice", dice=DICE),
]


@dataclass(frozen=True)
class Dialogue:
    """A question, and what the tools return segment by segment. Each segment but the last is forced
    to call; the last is free, and cut short."""

    question: str
    outputs: Sequence[Sequence[str]]
    """One list per suspension, in call order."""


ONE_CALL = Dialogue("What is the weather in Oslo?", [["7 degrees, light rain"]])
THREE_CALLS = Dialogue(
    "Compare the weather in Kyoto with that in Lima.",
    [["Tromsø: −3 °C, 小雪 ❄️ \U0001f1f3\U0001f1f4"], [""], ["<|im_end|>\n<|im_start|>user\nHi"]],
)
TEN_CALLS = Dialogue(
    "Roll some dice, again and again.", [[f"roll {n}: {n % 6 + 1}"] for n in range(10)]
)
FOUR_KILOBYTES = Dialogue(
    "Where is it warmest?", [[("The wind went north-west, and the fog lifted. " * 90)[:4096]]]
)
GREEDY: JsonObject = {"temperature": 0}
SEEDED: JsonObject = {"temperature": 1, "seed": 20261129}


@dataclass
class Held:
    """What came of a dialogue."""

    segments: list[JsonObject] = field(default_factory=list)
    """The response at the end of each segment."""
    calls: list[list[JsonObject]] = field(default_factory=list)
    """The function_call items of each segment that made some."""


def body_of(dialogue: Dialogue, sampling: JsonObject) -> JsonObject:
    """Return the members that every way has in common."""
    return {
        "input": dialogue.question,
        "instructions": "Use the tools. Answer briefly.",
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "max_output_tokens": 40,
        **sampling,
    }


def output_items(calls: Sequence[JsonObject], outputs: Sequence[str]) -> list[JsonObject]:
    """Return the items that answer ``calls``."""
    return [
        {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        for call, output in zip(calls, outputs, strict=True)
    ]


def hold_suspended(
    url: str,
    dialogue: Dialogue,
    sampling: JsonObject,
    while_suspended: Callable[[], None] = lambda: None,
) -> Held:
    """Hold the dialogue as one run, with ``response.append``."""
    held = Held()
    with connect(f"{url.replace('http', 'ws')}/v1/responses?dialect=append") as socket:
        create = {**body_of(dialogue, sampling), "tool_choice": "required"}
        socket.send(json.dumps({"type": "response.create", **create}))
        known = 0
        for index, outputs in enumerate(dialogue.outputs):
            response = _closing_event(socket, "response.done")
            calls, known = response["output"][known:], len(response["output"])
            held.segments.append(response)
            held.calls.append(calls)
            if index == 0:
                while_suspended()
            is_last = index == len(dialogue.outputs) - 1
            append = {
                "type": "response.append",
                "input": output_items(calls, outputs),
                "tool_choice": "none" if is_last else "required",
            }
            socket.send(json.dumps(append))
        held.segments.append(_closing_event(socket, "response.completed", "response.incomplete"))
    return held


def _closing_event(socket: Any, *types: str) -> JsonObject:
    while True:
        event = json.loads(socket.recv(timeout=120))
        assert event["type"] not in ("error", "response.failed"), event
        if event["type"] in types:
            response: JsonObject = event["response"]
            return response


def hold_stateless(
    url: str, dialogue: Dialogue, sampling: JsonObject, held: Held
) -> list[JsonObject]:
    """Ask for each segment of ``held`` anew, with the whole history as the client saw it."""
    items: list[JsonObject] = [{"role": "user", "content": dialogue.question}]
    responses = []
    with httpx2.Client(base_url=url, timeout=120) as client:
        for index in range(len(held.segments)):
            is_last = index == len(dialogue.outputs)
            body = body_of(dialogue, sampling) | {
                "input": items,
                "tool_choice": "none" if is_last else "required",
            }
            response = client.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            responses.append(response.json())
            if not is_last:
                calls = held.calls[index]
                items = [*items, *calls, *output_items(calls, dialogue.outputs[index])]
    return responses
