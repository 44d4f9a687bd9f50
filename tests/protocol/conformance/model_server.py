"""A small server of the Responses API without sockets: it performs what a scenario asks for.

It is correct, and made of our own ``protocol``; only the model is missing. It says a fixed text,
and calls a tool where it is made to. Events are made when they are read, so that what a client does
meanwhile comes in between, as it does on a real connection. Each method that decides something is
there to be overridden by a fault.
"""

from base64 import b64decode
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl

from protocol import errors
from protocol.client_events import (
    CompactParams,
    CreateParams,
    InjectParams,
    SteerParams,
    TextFormatKind,
    parse_append,
    parse_compact,
    parse_create,
    parse_inject,
    parse_steer,
    parse_stream_id,
    resolve_append,
    resolve_tool_choice,
)
from protocol.codec import SSE_DONE, decode_client_event, decode_object, encode, sse_frame
from protocol.conformance.actions import (
    Action,
    Answer,
    Close,
    Closed,
    Connect,
    Frame,
    Opened,
    Outcome,
    Receive,
    Request,
    Send,
    Sent,
    Silence,
)
from protocol.conformance.shapes import Event
from protocol.dialect import Dialect, negotiate
from protocol.errors import ProtocolError, error_body, error_event
from protocol.items import CallOutput, FunctionCall, InputItem, Message, check_calls_are_answered
from protocol.output_items import (
    Logprob,
    OutputCompaction,
    OutputFunctionCall,
    TopLogprob,
    as_input,
)
from protocol.response import CompactionResource, ResponseResource, Usage, build_response
from protocol.response_stream import ResponseStream
from protocol.sealed import seal
from protocol.server_events import ServerEvent, inject_failed, output_stub, steer_failed
from protocol.tools import (
    CallableTool,
    CustomTool,
    callable_tools,
    echo_tools,
    split_name,
)

CUSTOM_INPUTS = {"text": "ls -l", "regex": "abc-12", "lark": "turn left"}
"""What is written into a free-form call, by the syntax of its grammar: they are known by heart."""
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"] * 3
MAX_LANES = 32
MAX_STEERS = 32
"""That wait for one response."""
MAX_CONTEXT = 1 << 20
"""In characters."""
MAX_FRAME = 1 << 24
MODEL = "made-up"

Distort = Callable[[Event], list[Event]]
"""Returns what is told in place of an event, which has no number yet."""


@dataclass
class Run:
    """One response, from its create to its end."""

    stream: ResponseStream
    params: CreateParams
    context: list[InputItem]
    lane: str | None = None
    num_cached: int = 0
    has_called: bool = False
    awaited: dict[str, None] = field(default_factory=dict)
    answered: dict[str, str] = field(default_factory=dict)
    steers: dict[str, SteerParams] = field(default_factory=dict)
    """What was accepted for it and waits for its successor, by id."""
    num_read: int = 0
    num_sampled: int = 0
    num_told: int = 0
    told: list[Event] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.stream.response.id

    @property
    def whole_context(self) -> list[InputItem]:
        """What comes before whatever follows this response."""
        return [*self.context, *map(as_input, self.stream.output)]

    @property
    def usage(self) -> Usage:
        """Of the segment so far."""
        return Usage.of(self.num_read, self.num_sampled, cached_tokens=self.num_cached)

    @property
    def length(self) -> int:
        """How much there is to be read now."""
        params = self.params
        parts = [params.instructions or "", echo_tools(params.tools), *self.whole_context]
        return sum(len(encode(part)) // 4 for part in parts) + 1


Told = tuple[Run | None, ServerEvent | Event]


@dataclass
class Lane:
    """What is said on one lane, in order."""

    queue: deque[Iterator[Told]] = field(default_factory=deque)
    latest: Run | None = None
    suspended: Run | None = None


@dataclass
class Connection:
    """One WebSocket."""

    dialect: Dialect
    lanes: dict[str | None, Lane] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    out: deque[str | Closed] = field(default_factory=deque)
    """What is sent before anything that is still to be said."""
    turn: int = 0


class ModelServer:
    """Performs actions, as a server would have them performed."""

    def __init__(self, distort: Distort = lambda event: [event]) -> None:
        self.distort = distort
        self.connections: dict[str, Connection] = {}
        self.stored: dict[str, Run] = {}
        self.background: dict[str, Iterator[Event]] = {}
        self._counter = Counter[str]()

    def perform(self, action: Action) -> Outcome:
        """Do it, and return what comes of it."""
        match action:
            case Connect(socket, query, headers):
                return self.connect(socket, query, dict(headers))
            case Send(socket, data):
                self.take(self.connections[socket], data)
                return Sent()
            case Receive(socket):
                return self.say(self.connections[socket])
            case Close(socket):
                del self.connections[socket]
                return Sent()
            case Request():
                return self.answer(action)

    def fresh_id(self, prefix: str) -> str:
        self._counter[prefix] += 1
        return f"{prefix}_{self._counter[prefix]}"

    # --- The WebSocket ---

    def connect(self, socket: str, query: str, headers: dict[str, str]) -> Outcome:
        asked = query.removeprefix("?dialect=") or None
        dialect = negotiate(headers.get("OpenAI-Beta", ""), asked)
        try:
            self.admit(headers)
        except ProtocolError as error:
            return self.json(self.error_body(error), error.status)
        self.connections[socket] = Connection(dialect)
        return Opened()

    def admit(self, headers: Mapping[str, str]) -> None:
        """Check who asks: a scenario that says so itself does not say it right.

        Raises:
            ProtocolError: nobody that is known.
        """
        if "Authorization" in headers:
            raise errors.invalid_api_key()

    def take(self, connection: Connection, data: str | bytes) -> None:
        """Read a frame."""
        frame: Event = {}
        try:
            self.check_frame(data)
            kind, frame = decode_client_event(data)
            self.take_event(connection, kind, frame)
        except ProtocolError as error:
            self.refuse(connection, error, frame)

    def check_frame(self, data: str | bytes) -> None:
        if isinstance(data, bytes):
            raise errors.binary_frame()
        if len(data) > MAX_FRAME:
            raise errors.payload_too_large(MAX_FRAME)

    def take_event(self, connection: Connection, kind: str, frame: Event) -> None:
        match kind:
            case "response.create":
                lane = self.lane(connection, frame)
                lane.queue.append(self.respond(connection, lane, frame))
            case "response.append":
                lane = self.lane(connection, frame)
                lane.queue.append(self.resume(connection, lane, frame))
            case "response.inject":
                self.inject(connection, frame)
            case "response.steer":
                self.steer(connection, frame)
            case _:
                raise errors.unsupported_event_type(kind)

    def refuse(self, connection: Connection, error: ProtocolError, frame: Event) -> None:
        """Say what is wrong with a frame."""
        name = frame.get("stream_id") if error.code != "invalid_stream_id" else None
        connection.out.append(encode(self.error_frame(error, name)).decode())
        if frame.get("type") == "response.inject":
            self.close_after_malformed_inject(connection)

    def error_frame(self, error: ProtocolError, lane: str | None) -> Event:
        return decode_object(encode(error_event(error, 0, lane)))

    def close_after_malformed_inject(self, connection: Connection) -> None:
        connection.out.append(Closed(1008))

    def lane(self, connection: Connection, frame: Event) -> Lane:
        name = self.lane_name(frame)
        if name is not None and name not in connection.lanes:
            self.check_lanes(connection)
        return connection.lanes.setdefault(name, Lane())

    def check_lanes(self, connection: Connection) -> None:
        if len(connection.lanes.keys() - {None}) >= MAX_LANES:
            raise errors.websocket_stream_limit_reached(MAX_LANES)

    def lane_name(self, frame: Event) -> str | None:
        return parse_stream_id(frame)

    def say(self, connection: Connection) -> Outcome:
        """Return what the client reads next."""
        while not connection.out:
            if not any(lane.queue for lane in connection.lanes.values()):
                return Silence(1)
            self.advance(connection)
        said = connection.out.popleft()
        if isinstance(said, str):
            return Frame(said)
        connection.out.append(said)
        return said

    def advance(self, connection: Connection) -> None:
        """Have the next lane say one thing more."""
        connection.turn += 1
        name, lane = list(connection.lanes.items())[connection.turn % len(connection.lanes)]
        speaking = self.speaking(lane)
        if speaking is None:
            return
        told = next(speaking, None)
        if told is None:
            lane.queue.remove(speaking)
            return
        for event in self.events(*told, name):
            connection.out.append(encode(event).decode())

    def speaking(self, lane: Lane) -> Iterator[Told] | None:
        return lane.queue[0] if lane.queue else None

    def events(self, run: Run | None, event: ServerEvent | Event, lane: str | None) -> list[Event]:
        """Return what is told for ``event``, numbered."""
        told = decode_object(encode(event))
        if run is None:
            return [told]
        del told["sequence_number"]
        events = self.distort(told | self.lane_member(lane))
        numbered = [self.numbered(run, event) for event in events]
        run.told += numbered
        return numbered

    def lane_member(self, lane: str | None) -> Event:
        return {} if lane is None else {"stream_id": lane}

    def numbered(self, run: Run, event: Event) -> Event:
        run.num_told += 1
        return event | {"sequence_number": run.num_told - 1}

    # --- Responses ---

    def respond(self, connection: Connection, lane: Lane, frame: Event) -> Iterator[Told]:
        """Answer a create."""
        try:
            run = self.begin(frame, connection, lane)
        except ProtocolError as error:
            self.evict(lane, frame)
            yield None, self.error_frame(error, frame.get("stream_id"))
            return
        yield from self.abandon(lane)
        run.lane = next(name for name, known in connection.lanes.items() if known is lane)
        connection.runs[run.id] = run
        lane.latest = run
        for event in self.speak(run, run.stream.start(), connection.dialect):
            yield run, event
        lane.suspended = run if run.awaited and connection.dialect is Dialect.APPEND else None
        yield from self.take_up_steers(connection, lane, run, frame)

    def abandon(self, lane: Lane) -> Iterator[Told]:
        """Give up what waits on ``lane``."""
        if run := lane.suspended:
            lane.suspended = None
            for event in run.stream.cancel(run.usage):
                yield run, event

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        """Return the run of a create.

        Raises:
            ProtocolError: it cannot be begun.
        """
        transport = "http" if connection is None else "websocket"
        params = self.parse(body, transport)
        self.check_model(params.model)
        resolve_tool_choice(params, params.tools)
        parent = self.parent(params.previous_response_id, connection)
        before = [*parent.whole_context, *self.steered(parent)] if parent else []
        context = [*before, *self.without_echoes(params.input, before)]
        self.check_calls(context)
        self.check_length(context)
        response = build_response(
            params, id=self.fresh_id("resp"), created_at=1, store=params.store
        )
        run = Run(ResponseStream(response, self.fresh_id), params, context)
        run.num_read = run.length
        if parent is not None and self.shares_prefix(parent, params):
            run.num_cached = self.num_cached(parent)
        if params.store:
            self.stored[run.id] = run
        return run

    def without_echoes(
        self, items: Sequence[InputItem], before: Sequence[InputItem]
    ) -> list[InputItem]:
        """Return ``items`` without the calls that are known from ``before``."""
        known = {item.call_id for item in before if isinstance(item, FunctionCall)}
        return [i for i in items if not (isinstance(i, FunctionCall) and i.call_id in known)]

    def shares_prefix(self, parent: Run, params: CreateParams) -> bool:
        """Tell whether what the model reads first is the same."""
        before = parent.params.instructions, parent.params.tools_digest
        return before == (params.instructions, params.tools_digest)

    def num_cached(self, parent: Run) -> int:
        """Return how many tokens of ``parent`` are not prefilled again: all but the last sampled,
        which was never read."""
        return parent.usage.total_tokens - 1

    def parse(self, body: Event, transport: Any) -> CreateParams:
        return parse_create(self.seen(body), transport=transport, default_model=MODEL)

    def seen(self, body: Event) -> Event:
        """Return ``body`` as the model sees it: of an image, that it is there."""
        items = body.get("input")
        return body | {"input": [*map(self.seen_item, items)]} if isinstance(items, list) else body

    def seen_item(self, item: Any) -> Any:
        """Return an item of an input, or a part of one, with a word for each image in it."""
        match item:
            case {"type": "input_image", "image_url": url}:
                self.check_image(url)
                return {"type": "input_text", "text": "[image]"}
            case {"content": [*parts]}:
                return item | {"content": [*map(self.seen_item, parts)]}
            case _:
                return item

    def check_image(self, url: str) -> None:
        """Check that there is an image in a ``data:`` URL.

        Raises:
            ProtocolError: there is none.
        """
        if not b64decode(url.partition(",")[2]).startswith(b"\x89PNG"):
            raise ProtocolError("expected an image", code="invalid_image", param="input")

    def check_model(self, model: str) -> None:
        if model != MODEL:
            raise errors.model_not_found(model)

    def check_calls(self, context: Sequence[InputItem]) -> None:
        check_calls_are_answered(context)

    def check_length(self, context: Sequence[InputItem]) -> None:
        length = sum(len(text) for item in context if (text := getattr(item, "text", None)))
        if length > MAX_CONTEXT:
            raise errors.context_length_exceeded(length, MAX_CONTEXT)

    def parent(self, response_id: str | None, connection: Connection | None) -> Run | None:
        """Return what a create goes on from.

        Raises:
            ProtocolError: it is not known.
        """
        if response_id is None:
            return None
        lanes = [] if connection is None else list(connection.lanes.values())
        known = {lane.latest.id: lane.latest for lane in lanes if lane.latest} | self.stored
        if response_id not in known:
            raise errors.previous_response_not_found(response_id)
        return known[response_id]

    def evict(self, lane: Lane, frame: Event) -> None:
        """Forget the parent of a create that failed."""
        if lane.latest and lane.latest.id == frame.get("previous_response_id"):
            lane.latest = None

    def speak(
        self, run: Run, first: Iterable[ServerEvent], dialect: Dialect
    ) -> Iterator[ServerEvent]:
        """Say what the model says in one segment."""
        run.num_read, run.num_sampled = run.length, 0
        yield from first
        tools = self.tools_to_call(run)
        if not run.params.generate:
            pass
        elif tools:
            if (yield from self.call(run, tools)) == "max_output_tokens":
                yield from run.stream.incomplete("max_output_tokens", run.usage)
                return
            if dialect is Dialect.APPEND:
                yield from self.suspend(run)
                return
            if dialect is Dialect.INJECT:
                yield from run.stream.pause()
                return
        elif (yield from self.write(run)) == "max_output_tokens":
            yield from run.stream.incomplete("max_output_tokens", run.usage)
            return
        elif run.steers:
            yield from run.stream.incomplete("steered", run.usage)
            return
        yield from run.stream.complete(run.usage, None, 2)

    def tools_to_call(self, run: Run) -> list[CallableTool]:
        """Return the tools that are called now: where a call is required, and once. It is called
        twice if it may be."""
        choice = run.params.tool_choice
        if not choice.is_forced or run.has_called:
            return []
        tools = callable_tools(run.params.tools)
        tools = [tool for tool in tools if choice.names is None or tool.name in choice.names][:1]
        return tools * 2 if run.params.parallel_tool_calls else tools

    def call(self, run: Run, tools: Sequence[CallableTool]) -> Generator[ServerEvent, None, str]:
        """Make the calls, and return why that ended."""
        run.has_called = True
        for tool in tools:
            call_id = self.fresh_id("call")
            run.awaited[call_id] = None
            namespace, name = split_name(tool.name)
            is_custom = isinstance(tool, CustomTool)
            yield from run.stream.call_started(call_id, name, namespace, is_custom)
            arguments = self.arguments(tool)
            pieces = [arguments[i : i + 8] for i in range(0, len(arguments), 8)]
            said = self.limited(run, pieces)
            for piece in said:
                run.num_sampled += 1
                yield from run.stream.arguments_delta(piece)
            if len(said) < len(pieces):
                return "max_output_tokens"
            yield from run.stream.call_done()
        return "stop"

    def arguments(self, tool: CallableTool) -> str:
        """Return arguments that the tool's schema allows, if it is simple."""
        if isinstance(tool, CustomTool):
            return self.custom_input(tool)
        return encode(example({"type": "object"} | (tool.parameters or {}))).decode()

    def custom_input(self, tool: CustomTool) -> str:
        return CUSTOM_INPUTS[tool.format.syntax]

    def write(self, run: Run) -> Generator[ServerEvent, None, str]:
        """Write the text, and return why that ended."""
        tokens = self.text(run)
        said = self.limited(run, tokens)
        for token in said:
            run.num_sampled += 1
            yield from run.stream.text_delta(token, self.logprobs(run, token))
        return "stop" if len(said) == len(tokens) else "max_output_tokens"

    def text(self, run: Run) -> list[str]:
        """Return the tokens of the text, in the format that is asked for."""
        wanted = run.params.text_format
        match wanted.kind:
            case TextFormatKind.JSON_SCHEMA:
                text = encode(example(wanted.schema or {})).decode()
            case TextFormatKind.JSON_OBJECT:
                text = '{"says": "hello"}'
            case _:
                return [f"{word} " for word in self.words(run)]
        return [text[i : i + 8] for i in range(0, len(text), 8)]

    def logprobs(self, run: Run, token: str) -> tuple[Logprob, ...]:
        """Return the log probability of a token, if it is asked for, with its alternatives."""
        if not run.params.wants_logprobs:
            return ()
        alternatives = [token, *"abcdefghijklmnopqrs"][: run.params.top_logprobs]
        likely = [TopLogprob(other, -1.0, (*other.encode(),)) for other in alternatives]
        return (Logprob(token, -1.0, (*token.encode(),), tuple(likely)),)

    def words(self, run: Run) -> list[str]:
        """Return what there is to say, which depends on what was said before."""
        texts = [
            item.text if isinstance(item, Message) else item.output
            for item in run.context
            if isinstance(item, Message | CallOutput)
        ]
        start = (sum(map(len, texts)) + len(texts)) % len(WORDS)
        return WORDS[start:] + WORDS[:start]

    def limited(self, run: Run, tokens: list[str]) -> list[str]:
        """Return those of ``tokens`` that may still be sampled."""
        limit = run.params.max_output_tokens
        return tokens if limit is None else tokens[: limit - run.num_sampled]

    def suspend(self, run: Run) -> Iterator[ServerEvent]:
        yield from run.stream.suspend(run.usage)

    # --- Append and inject ---

    def resume(self, connection: Connection, lane: Lane, frame: Event) -> Iterator[Told]:
        """Answer an append."""
        run = lane.suspended
        try:
            if run is None:
                raise errors.no_suspended_run()
            items = parse_append(frame, run.params.tools).input
            num_cached = self.num_cached(run)
            self.append(run, items)
        except ProtocolError as error:
            yield None, self.error_frame(error, frame.get("stream_id"))
            return
        if run.awaited:
            return
        lane.suspended = None
        run.num_cached = num_cached
        yield from self.go_on(run, connection.dialect)

    def append(self, run: Run, items: Sequence[InputItem]) -> None:
        sampled = [item.call_id for item in run.stream.output if hasattr(item, "call_id")]
        resolved = resolve_append(items, list(run.awaited), run.answered, sampled)
        for call_id, output in resolved.outputs.items():
            del run.awaited[call_id]
            run.answered[call_id] = output
            run.context.append(CallOutput(call_id, output))

    def go_on(self, run: Run, dialect: Dialect) -> Iterator[Told]:
        run.context.extend(self.steered(run))
        for event in self.speak(run, self.resumed(run), dialect):
            yield run, event

    def resumed(self, run: Run) -> list[ServerEvent]:
        """Return what is said when a response goes on: nothing."""
        return []

    def inject(self, connection: Connection, frame: Event) -> None:
        params = self.parse_inject(frame)
        run = connection.runs.get(params.response_id)
        if run is None:
            error = errors.response_not_found(params.response_id)
            failed = inject_failed(error, self.returned(params), params.response_id, 0)
            connection.out.append(encode(failed).decode())
            return
        name = self.name_of_lane(connection, run)
        try:
            self.commit(run, params)
        except ProtocolError as error:
            self.tell(connection, run, run.stream.inject_failed(error, self.returned(params)), name)
            return
        self.tell(connection, run, run.stream.inject_created(), name)
        if not run.awaited:
            connection.lanes[name].queue.append(self.go_on(run, connection.dialect))

    def name_of_lane(self, connection: Connection, run: Run) -> str | None:
        return run.lane  # of which it need not be the latest any more

    def tell(self, connection: Connection, run: Run, event: ServerEvent, lane: str | None) -> None:
        """Say something at once."""
        for told in self.events(run, event, lane):
            connection.out.append(encode(told).decode())

    def parse_inject(self, frame: Event) -> InjectParams:
        return parse_inject(frame)

    def returned(self, params: InjectParams) -> Any:
        return params.raw_input

    def commit(self, run: Run, params: InjectParams) -> None:
        """Take all that is injected, or nothing.

        Raises:
            ProtocolError: something cannot be taken.
        """
        if run.stream.is_finished:
            raise errors.response_already_completed(params.response_id)
        self.append(run, params.outputs)

    # --- Steer ---

    def steer(self, connection: Connection, frame: Event) -> None:
        target, raw_input = str(frame.get("previous_response_id")), frame.get("input")
        run = connection.runs.get(target)
        try:
            params = self.parse_steer(frame)
            self.check_target(run, target)
            self.check_steers(run)
        except ProtocolError as error:
            if run is None:
                failed = steer_failed(error, raw_input, target, 0)
                connection.out.append(encode(failed).decode())
            else:
                self.tell_lane(connection, run, run.stream.steer_failed(error, raw_input))
            return
        assert run is not None
        steer_id = self.fresh_id("steer")
        run.steers[steer_id] = params
        self.tell_lane(connection, run, run.stream.steer_accepted(steer_id))

    def parse_steer(self, frame: Event) -> SteerParams:
        return parse_steer(frame)

    def check_target(self, run: Run | None, target: str) -> None:
        """Check that there is a response to be steered.

        Raises:
            ProtocolError: there is none, or it is over.
        """
        if run is None:
            raise errors.response_not_found(target)
        if run.stream.is_finished:
            raise errors.response_already_completed(target)

    def check_steers(self, run: Run | None) -> None:
        if run is not None and len(run.steers) >= MAX_STEERS:
            raise errors.too_many_pending_steers(MAX_STEERS)

    def tell_lane(self, connection: Connection, run: Run, event: ServerEvent) -> None:
        self.tell(connection, run, event, self.name_of_lane(connection, run))

    def steered(self, run: Run) -> list[InputItem]:
        """Return what waits to be said after ``run``, which does so no longer."""
        steers, run.steers = run.steers, {}
        return [message for params in steers.values() for message in params.messages]

    def take_up_steers(
        self, connection: Connection, lane: Lane, run: Run, frame: Event
    ) -> Iterator[Told]:
        """Answer in a successor what was said meanwhile, unless outputs have to come first."""
        if not run.steers:
            return
        if not run.awaited:
            successor = {**frame, "previous_response_id": run.id, "input": []}
            yield from self.respond(connection, lane, successor)
            return
        calls = [item for item in run.stream.output if isinstance(item, OutputFunctionCall)]
        for steer_id in run.steers:
            pending = run.stream.steer_pending(steer_id, tuple(map(output_stub, calls)))
            yield run, pending

    # --- HTTP ---

    def answer(self, request: Request) -> Answer:
        try:
            self.admit(request.headers)
            return self.route(request)
        except ProtocolError as error:
            return self.json(self.error_body(error), error.status)

    def error_body(self, error: ProtocolError) -> Event:
        return error_body(error)

    def route(self, request: Request) -> Answer:
        path, _, query = request.path.partition("?")
        asked = dict(parse_qsl(query))
        match request.method, path.split("/")[1:]:
            case "POST", ["responses"]:
                return self.post(request.body or b"", request.max_events)
            case "POST", ["responses", "compact"]:
                return self.compact(request.body or b"")
            case "POST", ["responses", "input_tokens"]:
                return self.json(self.input_tokens(decode_object(request.body or b"")))
            case "GET", ["responses"]:
                raise errors.upgrade_required()
            case "GET", ["responses", response_id] if asked.get("stream") == "true":
                return self.replay(self.find(response_id), int(asked.get("starting_after", -1)))
            case "GET", ["responses", response_id]:
                return self.json(self.find(response_id).stream.response)
            case "DELETE", ["responses", response_id]:
                self.delete(self.find(response_id))
                return self.json({"id": response_id, "object": "response", "deleted": True})
            case "GET", ["responses", response_id, "input_items"]:
                return self.json(self.input_items(self.find(response_id), asked))
            case "POST", ["responses", response_id, "cancel"]:
                return self.json(self.cancel(self.find(response_id)))
            case "GET", ["models"]:
                return self.json({"object": "list", "data": self.models()})
            case "GET", ["models", name]:
                return self.json(self.model(name))
            case _:
                return self.json({"error": None}, 404)

    def compact(self, body: bytes) -> Answer:
        params = self.parse_compact(decode_object(body))
        self.check_model(params.model)
        return self.json(self.compacted(params))

    def parse_compact(self, body: Event) -> CompactParams:
        return parse_compact(body)

    def compacted(self, params: CompactParams) -> CompactionResource:
        """Return what a conversation comes to."""
        summary = OutputCompaction(self.fresh_id("cmp"), seal("We spoke."), "completed")
        length = sum(len(encode(item)) // 4 for item in params.input) + 1
        return CompactionResource(self.fresh_id("resp"), 1, [summary], Usage.of(length, 1))

    def find(self, response_id: str) -> Run:
        if response_id not in self.stored:
            raise errors.response_not_found(response_id)
        return self.stored[response_id]

    def delete(self, run: Run) -> None:
        del self.stored[run.id]

    def json(self, value: Any, status: int = 200) -> Answer:
        return Answer(status, {"content-type": "application/json"}, encode(value))

    def post(self, body: bytes, max_events: int | None = None) -> Answer:
        run = self.begin(decode_object(body))
        telling = self.telling(run)
        if run.params.background:
            self.background[run.id] = telling
        if run.params.stream:
            return self.post_streamed(run, telling, max_events)
        if run.params.background:
            deque(islice(telling, 2), 0)
            return self.json(run.stream.response)
        *_, end = telling
        return self.json(self.resource(end["response"]))

    def post_streamed(
        self, run: Run, telling: Iterator[Event], max_events: int | None = None
    ) -> Answer:
        """Return the events of a response, as far as its client reads them."""
        events = list(islice(telling, max_events))
        if not (run.stream.is_finished or run.params.background):
            self.leave(run)
            return self.event_stream(events, b"")
        return self.event_stream(events, self.sse_end() if run.stream.is_finished else b"")

    def telling(self, run: Run) -> Iterator[Event]:
        """Return what is told of a response over HTTP. It is made as it is read."""
        for event in self.speak(run, self.announced(run), Dialect.CHAINED):
            yield from self.events(run, event, None)

    def announced(self, run: Run) -> Iterator[ServerEvent]:
        if run.params.background:
            yield from run.stream.queue()
        yield from run.stream.start()

    def leave(self, run: Run) -> None:
        """End a response that nobody reads any more."""
        for event in run.stream.cancel(run.usage):
            self.events(run, event, None)

    def event_stream(self, events: Iterable[Event], end: bytes) -> Answer:
        frames = b"".join(map(self.sse, events))
        return Answer(200, {"content-type": "text/event-stream"}, frames + end)

    def replay(self, run: Run, after: int) -> Answer:
        """Return the events of a response that follow the one with that number."""
        deque(self.background.pop(run.id, ()), 0)
        events = [event for event in run.told if event["sequence_number"] > after]
        return self.event_stream(events, self.sse_end())

    def cancel(self, run: Run) -> ResponseResource:
        """End a response in the background."""
        if not run.params.background:
            raise errors.response_not_background(run.id)
        if not run.stream.is_finished:
            self.leave(run)
        return run.stream.response

    def input_items(self, run: Run, asked: dict[str, str]) -> Event:
        """Return a page of the input of a response."""
        named = [{"id": f"in_{i}"} | item for i, item in enumerate(run.params.input_json)]
        items = named if asked.get("order") == "asc" else named[::-1]
        ids = [item["id"] for item in items]
        first = ids.index(asked["after"]) + 1 if "after" in asked else 0
        page = slice(first, first + int(asked.get("limit", 20)))
        return {
            "object": "list",
            "data": items[page],
            "first_id": next(iter(ids[page]), None),
            "last_id": next(iter(ids[page][::-1]), None),
            "has_more": len(items) > page.stop,
        }

    def input_tokens(self, body: Event) -> Event:
        run = self.begin(body | {"generate": False, "store": False})
        return {"object": "response.input_tokens", "input_tokens": run.usage.input_tokens}

    def models(self) -> list[Event]:
        return [{"id": MODEL, "object": "model", "created": 1, "owned_by": "nobody"}]

    def model(self, name: str) -> Event:
        if name != MODEL:
            raise errors.model_not_found(name)
        return self.models()[0]

    def resource(self, response: Event) -> Event:
        """Return a response as it is told without a stream."""
        return response

    def sse(self, event: Event) -> bytes:
        return sse_frame(event["type"], encode(event))

    def sse_end(self) -> bytes:
        return SSE_DONE


def example(schema: Event) -> Any:
    """Return a value that ``schema`` allows, if it is simple."""
    match schema:
        case {"enum": [first, *_]}:
            return first
        case {"type": "object"}:
            members = schema.get("properties", {})
            return {name: example(member) for name, member in members.items()}
        case {"type": "array"}:
            return [example(schema["items"])]
        case {"type": "boolean"}:
            return True
        case {"type": "integer" | "number"}:
            return 1
        case _:
            return "x"
