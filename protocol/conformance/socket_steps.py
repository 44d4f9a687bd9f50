"""Steps of scenarios over a WebSocket: what a client does, and what it expects."""

from collections.abc import Sequence
from typing import Any

from protocol.codec import encode
from protocol.conformance.actions import (
    Answer,
    Close,
    Closed,
    Connect,
    Manner,
    Receive,
    Send,
    Silence,
    Steps,
)
from protocol.conformance.check import Target, Way
from protocol.conformance.refusals import Refusal, refusal
from protocol.conformance.rules import (
    NonconformityError,
    NotSupportedError,
    Rule,
    expect,
)
from protocol.conformance.shapes import TERMINAL_TYPES, Event
from protocol.dialect import APPEND_BETA, INJECT_BETA

CALLS = ("function_call", "custom_tool_call")
CLOSING_TYPES = (*TERMINAL_TYPES, "response.done")

TOOL: Event = {
    "type": "function",
    "name": "get_weather",
    "description": "Current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
"""Its arguments are bounded, so that the smallest model comes to an end of them."""

CALLING: Event = {
    "input": "Is it dry in Oslo?",
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
"""Members of a create that ends in one call, whatever the model would like."""

BOTH = "Is it dry in Oslo, and in Rome? Look both up at once."
"""A question that asks for two calls."""

_NO_SOCKETS = (400, 404, 405, 426, 501)
"""With what an upgrade is refused where there are no WebSockets."""
_BETAS = {Way.APPEND: APPEND_BETA, Way.INJECT: INJECT_BETA}


def connect(target: Target, way: Way, name: str = "socket", query: str = "") -> Steps["Socket"]:
    """Open a WebSocket that asks for the dialect of ``way`` in its handshake.

    Raises:
        NotSupportedError: the upgrade is refused.
        NonconformityError: it is answered as nobody refuses it.
    """
    headers = (("OpenAI-Beta", _BETAS[way]),) if way in _BETAS else ()
    came = yield Connect(name, query, headers)
    if isinstance(came, Answer):
        message = f"the WebSocket upgrade is refused with {came.status}"
        expect(came.status in _NO_SOCKETS, message)
        raise NotSupportedError(message)
    return Socket(target, way, name)


class Socket:
    """An open WebSocket."""

    def __init__(self, target: Target, way: Way, name: str) -> None:
        self.name = name
        self._target = target
        self._way = way

    # --- To the server ---

    def send(self, event_type: str, **members: Any) -> Steps[None]:
        """Send a client event."""
        yield from self.send_raw(encode({"type": event_type, **members}).decode())

    def send_raw(self, frame: str | bytes) -> Steps[None]:
        """Send a frame as it is."""
        yield Send(self.name, frame)

    def send_create(self, **members: Any) -> Steps[None]:
        """Ask for a response, without reading it."""
        yield from self.send("response.create", **self._target.body(**members))

    def close(self, manner: Manner = Manner.CLOSED) -> Steps[None]:
        """End the connection."""
        yield Close(self.name, manner)

    # --- From the server ---

    def receive(self, rule: Rule | None = None) -> Steps[Event]:
        """Return the next event.

        Raises:
            NonconformityError: of ``rule``, as none comes.
        """
        match (yield Receive(self.name)):
            case Closed(code, reason):
                raise NonconformityError(f"the server closed: {code} {reason}".rstrip(), rule)
            case Silence(seconds):
                raise NonconformityError(f"nothing came for {seconds:g} s", rule)
            case event:
                found: Event = event
                return found

    def up_to(self, *event_types: str) -> Steps[list[Event]]:
        """Return the events up to the first of these types.

        Raises:
            NonconformityError: an error, or nothing more, comes before it.
            NotSupportedError: an error says that the server does not do it.
        """
        events = [(yield from self.receive(Rule.ONE_TERMINAL))]
        while events[-1]["type"] not in event_types:
            if events[-1]["type"] == "error":
                refused = _refusal(events[-1])
                refused.raise_unless_it_is_a_fault()
                raise NonconformityError(f"refused: {refused}")
            events.append((yield from self.receive(Rule.ONE_TERMINAL)))
        return events

    def segment(self) -> Steps[list[Event]]:
        """Return the events up to the one that closes a segment, or the response."""
        return (yield from self.up_to(*CLOSING_TYPES))

    def refused(self) -> Steps[Refusal]:
        """Return the refusal that has to come next: an error frame, or a response that fails.

        Raises:
            NonconformityError: something else comes.
        """
        event = yield from self.receive()
        while event["type"] in ("response.created", "response.in_progress"):
            event = yield from self.receive()
        if event["type"] == "response.failed":
            error = event["response"]["error"]
            return refusal(400, error)  # clients go by its code alone
        expect(event["type"] == "error", f"expected an error, got {event['type']}")
        return _refusal(event)

    def quiet(self) -> Steps[None]:
        """Require that nothing comes for a moment."""
        came = yield Receive(self.name, is_patient=False)
        expect(isinstance(came, Silence), f"expected nothing more, got {came}")

    def closed(self) -> Steps[Closed]:
        """Return how the server ends the connection, which has to be the next that it does."""
        came = yield Receive(self.name)
        expect(isinstance(came, Closed), f"expected that the server closes, got {came}")
        assert isinstance(came, Closed)
        return came

    # --- Both ---

    def create(self, **members: Any) -> Steps[list[Event]]:
        """Ask for a response and return the events of its first segment."""
        yield from self.send_create(**members)
        return (yield from self.segment())

    def follow(self, parent: Event, items: Any, **members: Any) -> Steps[list[Event]]:
        """Ask for a response to ``items`` after ``parent``."""
        asked = {"previous_response_id": parent["id"], "input": items} | members
        return (yield from self.create(**asked))

    def refuse(self, **members: Any) -> Steps[Refusal]:
        """Ask for a response that has to be refused, and return how."""
        yield from self.send_create(**members)
        return (yield from self.refused())

    def call(self, **members: Any) -> Steps["Called"]:
        """Ask for a response that has to end in calls, and return it as far as the calls.

        Raises:
            NotSupportedError: the dialect of the handshake is not spoken here.
            NonconformityError: there is no call.
        """
        yield from self.send_create(**(CALLING | members))
        is_open = self._way is Way.INJECT
        events = yield from (self._up_to_open_calls() if is_open else self.segment())
        calls = calls_in(events)
        expect(bool(calls), f"a call was required, and the response is {events[-1]['type']}")
        waits = self._way in (Way.APPEND, Way.INJECT)
        if waits and events[-1]["type"] == "response.completed":
            raise NotSupportedError("the dialect is ignored: the calls ended the response")
        return Called(events, calls, events[0]["response"]["id"])

    def _up_to_open_calls(self) -> Steps[list[Event]]:
        """Return the events up to the calls at which a response stays open: no event says so."""
        events: list[Event] = []
        while not calls_in(events):
            if events and events[-1]["type"] in CLOSING_TYPES:
                return events
            events += yield from self.up_to("response.output_item.done", *CLOSING_TYPES)
        while events[-1]["type"] not in CLOSING_TYPES:
            came = yield Receive(self.name, is_patient=False)
            if not isinstance(came, dict):
                break
            events.append(came)
        return events

    def append(self, *items: Event, **members: Any) -> Steps[list[Event]]:
        """Append ``items`` and return the events of the segment that follows."""
        yield from self.send("response.append", input=list(items), **members)
        return (yield from self.segment())

    def send_inject(self, response_id: str, *items: Event) -> Steps[None]:
        """Inject ``items`` into a response, without reading what comes of it."""
        yield from self.send("response.inject", response_id=response_id, input=list(items))

    def inject(self, response_id: str, *items: Event) -> Steps[list[Event]]:
        """Inject ``items`` into a response and return all events up to its end."""
        yield from self.send_inject(response_id, *items)
        return (yield from self.segment())


class Called:
    """A response that waits for the outputs of its calls."""

    def __init__(self, events: Sequence[Event], calls: Sequence[Event], response_id: str) -> None:
        self.events = events
        self.calls = calls
        self.response_id = response_id

    @property
    def response(self) -> Event:
        """The response as the closing event shows it; there is none in the inject dialect."""
        found: Event = self.events[-1]["response"]
        return found

    def outputs(self, text: str = "It is dry.") -> list[Event]:
        """Return an output for each call."""
        return [output(call, text) for call in self.calls]


def output(call: Event, text: Any = "It is dry.") -> Event:
    """Return the item that answers ``call``."""
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": text}


def calls_in(events: Sequence[Event]) -> list[Event]:
    """Return the calls that ``events`` complete."""
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    return [item for item in items if item["type"] in CALLS]


def _refusal(event: Event) -> Refusal:
    return refusal(event["status"], event["error"])
