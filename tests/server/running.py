"""A server that runs in the test's own event loop, and clients that check all they are sent.

The sockets, the HTTP and the WebSocket protocol are uvicorn's. Only its process (signals, a clock
that ticks ten times a second) is left to the end-to-end tests.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any, TypeAlias

import httpx2
import pytest
from openai.types.beta.beta_responses_server_event import BetaResponsesServerEvent
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses.responses_server_event import ResponsesServerEvent
from openresponses_types import ResponseResource
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from uvicorn.server import ServerState
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close

from protocol.codec import decode_object, encode
from protocol.conformance.stream_grammar import check_stream
from sampler.engine import Engine
from sampler.local_engine import LocalEngine
from server.app import create_app
from server.process import server_config
from server.settings import Settings
from tests.server.models import OSLO, scripted_engine

Event: TypeAlias = dict[str, Any]

DEADLINE_SECONDS = 20.0
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
CLOSING = (*TERMINAL, "response.done")
CALLS = ("function_call", "custom_tool_call")

# Codes of failures that have none upstream.
_OWN_CODES = (
    "context_length_exceeded",
    "duplicate_call_id",
    "invalid_prompt",
    "suspension_expired",
    "unknown_call_id",
)

TOOL: Event = {
    "type": "function",
    "name": "get_weather",
    "description": "Current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
BODY: Event = {"input": "Is it dry in Oslo?", "tools": [TOOL]}


def output(call: Event | str, text: Any = "sunny") -> Event:
    """Return the item that answers ``call``, an item or a function call's id."""
    if isinstance(call, str):
        call = {"type": "function_call", "call_id": call}
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": text}


def calls_in(events: Sequence[Event]) -> list[Event]:
    """Return the calls that ``events`` complete."""
    return [
        event["item"]
        for event in events
        if event["type"] == "response.output_item.done" and event["item"]["type"] in CALLS
    ]


def text_in(response: Event) -> str:
    """Return all text of ``response``."""
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not is_so():  # noqa: ASYNC110  # it is the model thread's doing, or a peer's
            await asyncio.sleep(0.002)


# --- The server ----------------------------------------------------------------------------------


class Running:
    """A server that listens."""

    def __init__(self, engine: Engine, port: int, state: ServerState) -> None:
        self.any_engine = engine
        self.port = port
        self._state = state

    @property
    def engine(self) -> LocalEngine:
        """The engine, which is one of this process."""
        assert isinstance(self.any_engine, LocalEngine), "it is somewhere else"
        return self.any_engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_requests(self) -> int:
        """Connections and requests whose handlers have not returned."""
        return len(self._state.tasks)

    @asynccontextmanager
    async def connect(
        self,
        dialect: str | None = None,
        *,
        betas: Sequence[str] = (),
        headers: Sequence[tuple[str, str]] = (),
        path: str = "/v1/responses",
    ) -> AsyncIterator["Client"]:
        """Open a WebSocket, in a dialect named in the URL or negotiated by ``betas``. On the way
        out, check every stream that came."""
        headers = [*headers, *(("OpenAI-Beta", beta) for beta in betas)]
        query = "" if dialect is None else f"?dialect={dialect}"
        url = f"ws://127.0.0.1:{self.port}{path}{query}"
        async with connect(
            url, additional_headers=headers, compression=None, max_size=None
        ) as socket:
            client = Client(socket)
            yield client
        client.check_streams()

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx2.AsyncClient]:
        """Open an HTTP client."""
        async with httpx2.AsyncClient(
            base_url=self.url, verify=False, trust_env=False, timeout=DEADLINE_SECONDS
        ) as client:
            yield client

    async def metrics(self) -> dict[str, float]:
        """Return the samples of ``/metrics`` by name; labels follow in braces."""
        async with self.http() as http:
            text = (await http.get("/metrics")).text
        return {
            sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def until_free(self) -> None:
        """Wait until no run is left, and nothing that a run has computed."""
        await until(lambda: not self.any_engine.runs and not self.any_engine.kv_tokens)


@asynccontextmanager
async def serving(
    *script: str, engine: Engine | None = None, settings: Settings | None = None
) -> AsyncIterator[Running]:
    """Serve a model that says ``script``, or ``engine``. On the way out nothing may be left."""
    engine = engine or scripted_engine(*script)
    # Over HTTP nothing is kept between requests unless a test wants it, so that all must be free.
    settings = settings or Settings(recent_responses=0)
    app = create_app(engine, settings)
    config = server_config(app, settings, port=0)
    config.lifespan = "off"
    config.load()
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=state, app_state={}
        ),
        "127.0.0.1",
        0,
    )
    running = Running(engine, listener.sockets[0].getsockname()[1], state)
    try:
        yield running
        if settings.recent_responses:
            await until(lambda: not engine.runs)
        else:
            await running.until_free()
    finally:
        listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.wait_for(asyncio.gather(*state.tasks), DEADLINE_SECONDS)
        await app.state.services.close()
        engine.close()
    assert engine.kv_tokens == 0


@asynccontextmanager
async def suspended(*script: str, **options: Any) -> AsyncIterator[tuple[Running, "Client", Event]]:
    """Serve ``script``, whose first turn makes a call, up to where the client is to answer it.

    Gives the server, a client of the append dialect, and the first call.
    """
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving(*(script or (OSLO, "Sun.")), **options))
        client = await stack.enter_async_context(running.connect("append"))
        events = await client.create()
        assert events[-1]["type"] == "response.done"
        yield running, client, calls_in(events)[0]


# --- The client ----------------------------------------------------------------------------------


class Client:
    """One end of a WebSocket. Keeps what it is sent, stream by stream."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.streams: list[list[Event]] = []
        self.errors: list[Event] = []
        self.notices: list[Event] = []
        """Acknowledgements that belong to no stream."""
        self._speaking: dict[str | None, list[Event]] = {}  # the latest stream of each lane

    async def send(self, event_type: str, **members: Any) -> None:
        """Send a client event."""
        await self.send_raw(encode({"type": event_type, **members}).decode())

    async def send_raw(self, frame: str | bytes) -> None:
        """Send a frame as it is."""
        await self.socket.send(frame)

    def send_bytes(self, data: bytes) -> None:
        """Put ``data`` on the wire as it is."""
        self.socket.transport.write(data)

    async def receive(self) -> Event:
        """Return the next event."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            event = decode_object(await self.socket.recv())
        self._stream_of(event).append(event)
        return event

    def _stream_of(self, event: Event) -> list[Event]:
        lane = event.get("stream_id")
        match event["type"].split("."):
            case ["error"]:
                return self.errors
            case ["response", "created"]:
                self._speaking[lane] = []
                self.streams.append(self._speaking[lane])
                return self._speaking[lane]
            case ["response", "steer" | "inject", _]:
                target = event.get("response_id") or event["steer"]["previous_response_id"]
                for stream in self.streams:
                    if stream[0]["response"]["id"] == target:
                        return stream
                return self.notices
            case _:
                return self._speaking[lane]

    async def up_to(self, *event_types: str) -> list[Event]:
        """Return the events up to the first of these types."""
        events = [await self.receive()]
        while events[-1]["type"] not in event_types:
            assert events[-1]["type"] != "error", events[-1]
            events.append(await self.receive())
        return events

    async def segment(self) -> list[Event]:
        """Return the events up to the one that closes a segment."""
        return await self.up_to(*CLOSING)

    async def calls(self, count: int) -> list[Event]:
        """Return so many calls, as soon as the last of them is made."""
        calls: list[Event] = []
        while len(calls) < count:
            calls += calls_in(await self.up_to("response.output_item.done"))
        return calls

    async def until_taken(self) -> None:
        """Wait until the server has read all that was sent: a frame of no type is refused at once,
        whatever the lanes are doing."""
        await self.send_raw("{}")
        while not self.errors or self.errors[-1]["error"]["param"] != "type":
            await self.receive()
        self.errors.pop()

    async def error(self) -> Event:
        """Return the error frame that must come next."""
        event = await self.receive()
        assert event["type"] == "error", event
        return event

    async def closed(self) -> Close:
        """Return how the server closes the connection, which is the next that it does."""
        with pytest.raises(ConnectionClosed) as closed:
            await self.receive()
        assert closed.value.rcvd is not None, "not a word was said"
        return closed.value.rcvd

    async def create(self, **members: Any) -> list[Event]:
        """Ask for a response and return the events of its first segment."""
        await self.send("response.create", **(BODY | members))
        return await self.segment()

    async def follow(self, parent: Event, *items: Event, **members: Any) -> list[Event]:
        """Ask for a response to ``items`` after ``parent``, a response that is not stored."""
        asked = {"previous_response_id": parent["id"], "input": list(items), "store": False}
        return await self.create(**(asked | members))

    async def append(self, *items: Event, **members: Any) -> list[Event]:
        """Append ``items`` and return the events of the segment that follows."""
        await self.send("response.append", input=list(items), **members)
        return await self.segment()

    def abort(self) -> None:
        """Drop the connection without a word."""
        self.socket.transport.abort()

    def check_streams(self) -> None:
        """Check all that came, up to here."""
        for stream in self.streams:
            check_events(stream)


def check_events(stream: Sequence[Event]) -> None:
    """Check the events of one response by the grammar, if it ended, and by other people's types."""
    for event in stream:
        if event["type"] != "response.done":
            is_beta = ".inject." in event["type"]
            _openai_events(is_beta=is_beta).validate_python(_as_openai_knows_it(event))
    told = [event for event in stream if event["type"] in CLOSING]
    if told and told[-1]["type"] in TERMINAL:
        check_stream(stream)
    if told:
        check_response(told[-1]["response"])


def check_response(response: Event) -> None:
    """Check a response by the types of OpenAI and, as far as they go, of Open Responses."""
    OpenAIResponse.model_validate(_as_openai_knows_it(response))
    ResponseResource.model_validate(response | _as_open_responses_knows_it(response))


def _as_openai_knows_it(told: Event) -> Event:
    """Return an event or a response with the code of a failure replaced if it is one of our own:
    clients take any string, but the types list those of the hosted service."""
    if told.get("response"):
        return told | {"response": _as_openai_knows_it(told["response"])}
    if told.get("type") == "response.steer.failed":  # gives back what came, whatever it is
        return told | {"steer": told["steer"] | {"input": ""}}
    code = (told.get("error") or {}).get("code")
    if code not in _OWN_CODES:
        return told
    is_inject = told.get("type") == "response.inject.failed"
    known = "response_not_found" if is_inject else "server_error"
    return told | {"error": told["error"] | {"code": known}}


def _as_open_responses_knows_it(response: Event) -> Event:
    """Return members of ``response`` in the place of those that Open Responses has no types for:
    tools other than functions, and a schema that is repeated."""
    choice, text_format = response["tool_choice"], response["text"]["format"]
    if isinstance(choice, dict) and choice["type"] != "function":
        choice = "auto"
    if text_format["type"] == "json_schema":
        text_format = text_format | {"schema": None}
    return {
        "tools": [tool for tool in response["tools"] if tool["type"] == "function"],
        "tool_choice": choice,
        "output": [item for item in response["output"] if item["type"] != "custom_tool_call"],
        "text": response["text"] | {"format": text_format},
    }


@cache
def _openai_events(*, is_beta: bool) -> TypeAdapter[Any]:
    return TypeAdapter(BetaResponsesServerEvent if is_beta else ResponsesServerEvent)


def parse_sse(text: str) -> list[tuple[str, str]]:
    """Return the ``event`` and ``data`` lines of an event stream, event by event."""
    frames = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        *head, data = frame.split("\n")
        event = head[0].removeprefix("event: ") if head else ""
        frames.append((event, data.removeprefix("data: ")))
    return frames
