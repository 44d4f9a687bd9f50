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
import uvicorn
from openai.types.responses import ResponseStreamEvent
from openresponses_types import ResponseResource
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from uvicorn.server import ServerState
from websockets.asyncio.client import ClientConnection, connect

from protocol.codec import decode_object, encode
from protocol.dialect import APPEND_BETA
from sampler.engine import Engine
from server.app import create_app
from server.settings import Settings
from tests.protocol.stream_grammar import check_stream
from tests.server.models import OSLO, scripted_engine

Event: TypeAlias = dict[str, Any]

DEADLINE_SECONDS = 20.0
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
CLOSING = (*TERMINAL, "response.done")

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
    """Return the item that answers ``call``, an item or its call id."""
    call_id = call if isinstance(call, str) else call["call_id"]
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def calls_in(events: Sequence[Event]) -> list[Event]:
    """Return the calls that ``events`` complete."""
    return [
        event["item"]
        for event in events
        if event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call"
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
        self.engine = engine
        self.port = port
        self._state = state

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_requests(self) -> int:
        """Connections and requests whose handlers have not returned."""
        return len(self._state.tasks)

    @asynccontextmanager
    async def connect(
        self, *, append: bool = False, betas: Sequence[str] = (), query: str = ""
    ) -> AsyncIterator["Client"]:
        """Open a WebSocket, by its header in the append dialect if wanted. On the way out, check
        every stream that came."""
        headers = [("OpenAI-Beta", beta) for beta in (*betas, *[APPEND_BETA] * append)]
        url = f"ws://127.0.0.1:{self.port}/v1/responses{query}"
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
        """Wait until no run holds anything."""
        await until(lambda: not self.engine.runs)
        assert self.engine.kv_tokens == 0


@asynccontextmanager
async def serving(
    *script: str, engine: Engine | None = None, settings: Settings | None = None
) -> AsyncIterator[Running]:
    """Serve a model that says ``script``, or ``engine``. On the way out nothing may be left."""
    engine = engine or scripted_engine(*script)
    config = uvicorn.Config(
        create_app(engine, settings),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="websockets-sansio",
        ws_max_size=2 * Settings.max_frame_bytes,
        ws_per_message_deflate=False,
        ws_ping_timeout=None,
    )
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
        await running.until_free()
    finally:
        listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.wait_for(asyncio.gather(*state.tasks), DEADLINE_SECONDS)
        engine.close()


@asynccontextmanager
async def suspended(*script: str, **options: Any) -> AsyncIterator[tuple[Running, "Client", Event]]:
    """Serve ``script``, whose first turn makes a call, up to where the client is to answer it.

    Gives the server, a client of the append dialect, and the first call.
    """
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving(*(script or (OSLO, "Sun.")), **options))
        client = await stack.enter_async_context(running.connect(append=True))
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
        match event["type"]:
            case "error":
                self.errors.append(event)
            case "response.created":
                self.streams.append([event])
            case _:
                self.streams[-1].append(event)
        return event

    async def segment(self) -> list[Event]:
        """Return the events up to the one that closes a segment."""
        events = [await self.receive()]
        while events[-1]["type"] not in CLOSING:
            assert events[-1]["type"] != "error", events[-1]
            events.append(await self.receive())
        return events

    async def error(self) -> Event:
        """Return the error frame that must come next."""
        event = await self.receive()
        assert event["type"] == "error", event
        return event

    async def create(self, **members: Any) -> list[Event]:
        """Ask for a response and return the events of its first segment."""
        await self.send("response.create", **(BODY | members))
        return await self.segment()

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
            _openai_events().validate_python(event)
    if stream[-1]["type"] in TERMINAL:
        check_stream(stream)
    if stream[-1]["type"] in CLOSING:
        check_response(stream[-1]["response"])


def check_response(response: Event) -> None:
    """Check a response by the types of Open Responses."""
    ResponseResource.model_validate(response)


@cache
def _openai_events() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


def parse_sse(text: str) -> list[tuple[str, str]]:
    """Return the ``event`` and ``data`` lines of an event stream, event by event."""
    frames = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        *head, data = frame.split("\n")
        event = head[0].removeprefix("event: ") if head else ""
        frames.append((event, data.removeprefix("data: ")))
    return frames
