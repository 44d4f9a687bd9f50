"""The agent loop, as a client of the append dialect writes it.

Create, read events until the response is suspended, run the tools, append their outputs, read on.
Nothing of the conversation is sent twice.
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from scripts.demo_prompt import INSTRUCTIONS, input_items
from scripts.demo_record import Call, Run, Segment
from scripts.demo_tools import Toolbox

_MAX_OUTPUT_TOKENS = 256
_LIFECYCLE = ("response.created", "response.in_progress")
_SUSPENDED = "response.done"
_CLOSED = (_SUSPENDED, "response.completed", "response.incomplete")


class AgentError(RuntimeError):
    """The server refused or failed a run, and said why."""


class Socket(Protocol):
    """What the agent needs of a WebSocket."""

    async def send(self, message: str, /) -> None: ...

    async def recv(self) -> str | bytes: ...


class Observer(Protocol):
    """Is told what happens while it happens."""

    def asked(self, question: str) -> None: ...

    def said(self, delta: str) -> None: ...

    def called(self, call: Call) -> None: ...

    def suspended(self, segment: Segment) -> None: ...

    def answered(self, call: Call) -> None: ...

    def resumed(self, seconds: float) -> None: ...

    def finished(self, run: Run) -> None: ...


@dataclass(frozen=True)
class AgentOptions:
    """How questions are asked."""

    max_calls: int = 8
    temperature: float = 0.0
    seed: int | None = None
    model: str | None = None


class Agent:
    """Answers questions with tools, over one WebSocket."""

    def __init__(
        self, socket: Socket, tools: Toolbox, observer: Observer, options: AgentOptions
    ) -> None:
        self._socket = socket
        self._tools = tools
        self._observer = observer
        self._options = options

    async def ask(self, question: str) -> Run:
        """Have one question answered.

        Raises:
            AgentError: the server refused or failed the run.
        """
        run = Run(question)
        self._observer.asked(question)
        event = self._create(question)
        while True:
            segment = await self._segment(event, is_resumption=bool(run.segments))
            run.segments.append(segment)
            if not segment.is_suspended:
                self._observer.finished(run)
                return run
            self._observer.suspended(segment)
            self._call_tools(segment)
            event = self._append(segment, may_call=len(run.calls) < self._options.max_calls)

    def _create(self, question: str) -> dict[str, Any]:
        options = {"model": self._options.model, "seed": self._options.seed}
        return {
            "type": "response.create",
            "instructions": INSTRUCTIONS,
            "input": input_items(question),
            "tools": self._tools.definitions(),
            # Binds the first call only; from then on the model chooses.
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": self._options.temperature,
            "max_output_tokens": _MAX_OUTPUT_TOKENS,
        } | {name: value for name, value in options.items() if value is not None}

    def _append(self, segment: Segment, *, may_call: bool) -> dict[str, Any]:
        event: dict[str, Any] = {
            "type": "response.append",
            "input": [
                {"type": "function_call_output", "call_id": call.call_id, "output": call.output}
                for call in segment.calls
            ],
        }
        return event if may_call else event | {"tool_choice": "none"}

    def _call_tools(self, segment: Segment) -> None:
        for call in segment.calls:
            call.output = self._tools.call(call.name, call.arguments)
            self._observer.answered(call)

    async def _segment(self, event: dict[str, Any], *, is_resumption: bool) -> Segment:
        """Send ``event`` and gather what is sampled until the server closes the segment."""
        sent_at = time.perf_counter()
        await self._socket.send(json.dumps(event))
        segment: Segment | None = None
        async for received in self._events():
            if segment is None:
                segment = Segment(first_event_seconds=time.perf_counter() - sent_at)
                if is_resumption:
                    self._observer.resumed(segment.first_event_seconds)
            self._take(received, segment)
            if received["type"] in _CLOSED:
                break
        assert segment is not None, "events come until one closes the segment"
        return segment

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        """Give the events that show something sampled, and those that close a segment."""
        while True:
            event = json.loads(await self._socket.recv())
            if event["type"] == "error":
                raise AgentError(event["error"]["message"])
            if event["type"] == "response.failed":
                raise AgentError(event["response"]["error"]["message"])
            if event["type"] not in _LIFECYCLE:
                yield event

    def _take(self, event: dict[str, Any], segment: Segment) -> None:
        match event["type"]:
            case "response.output_text.delta":
                segment.text += event["delta"]
                self._observer.said(event["delta"])
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                item = event["item"]
                call = Call(item["call_id"], item["name"], item["arguments"])
                segment.calls.append(call)
                self._observer.called(call)
            case kind if kind in _CLOSED:
                segment.is_suspended = kind == _SUSPENDED
                segment.response = _reporting(event["response"])
            case _:
                pass  # the other events tell the same in other portions


def _reporting(response: dict[str, Any]) -> dict[str, Any]:
    if "suspend:run" not in response:
        raise AgentError("the server does not report suspend:run; is it one of this project?")
    return response
