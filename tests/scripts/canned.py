"""Events of a server, made up: one run that is suspended once or more often and then answers."""

import json
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]


def created() -> list[Event]:
    return [
        {"type": "response.created", "response": {}},
        {"type": "response.in_progress", "response": {}},
    ]


def text(*deltas: str) -> list[Event]:
    return [
        {"type": "response.output_item.added", "item": {"type": "message"}},
        *({"type": "response.output_text.delta", "delta": delta} for delta in deltas),
        {"type": "response.output_item.done", "item": {"type": "message"}},
    ]


def call(call_id: str, name: str, arguments: str) -> list[Event]:
    item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return [
        {"type": "response.output_item.added", "item": item | {"arguments": ""}},
        {"type": "response.output_item.done", "item": item},
    ]


def closed(
    kind: str,
    *,
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int = 0,
    forwarded: int = 0,
    reforwarded: int = 0,
    suspended_seconds: float = 0.0,
    time_to_first_token: float = 0.0,
) -> list[Event]:
    """Return the event that closes a segment; ``kind`` is ``done``, ``completed``, ..."""
    response = {
        "model": "canned",
        "status": "in_progress" if kind == "done" else kind,
        "usage": {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": cached_tokens},
            "output_tokens": output_tokens,
        },
        "suspend:run": {
            "tokens_forwarded": forwarded,
            "tokens_reforwarded": reforwarded,
            "time_to_first_token": time_to_first_token,
            "time_info": {"suspended": suspended_seconds},
        },
    }
    return [{"type": f"response.{kind}", "response": response}]


class CannedSocket:
    """Answers each event it is sent with the next batch of events."""

    def __init__(self, *batches: Iterable[Event]) -> None:
        self._batches = [list(batch) for batch in batches]
        self._pending: list[Event] = []
        self.sent: list[Event] = []

    async def send(self, message: str, /) -> None:
        assert not self._pending, "the client read to the end of a segment before it went on"
        self.sent.append(json.loads(message))
        self._pending = self._batches.pop(0)

    async def recv(self) -> str:
        return json.dumps(self._pending.pop(0))


def one_call() -> CannedSocket:
    """Return a socket whose server calls ``math`` once, then answers."""
    return CannedSocket(
        [
            *created(),
            *call("call_1", "math", '{"expression": "6 * 7"}'),
            *closed(
                "done",
                input_tokens=100,
                output_tokens=20,
                forwarded=119,
                time_to_first_token=0.5,
            ),
        ],
        [
            *text("It is ", "42."),
            *closed(
                "completed",
                input_tokens=130,
                cached_tokens=119,
                output_tokens=5,
                forwarded=134,
                suspended_seconds=0.25,
                time_to_first_token=0.1,
            ),
        ],
    )
