"""Agents: each holds a trace to its end in one design, as a client of that design is written.

What the model says is the same in all designs: the server replays the trace, which a request names
in its metadata. An agent checks that, for a comparison of different runs would say nothing. What is
measured is what the client sees; the parts that the server knows of are the server's own figures,
and what is left of a turn is the network: transport, framing, and what the client itself does.

Opening a connection belongs to the turn that needs it. Bytes are those of bodies and frames, so of
JSON and of event streams, without HTTP headers and masks.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self, assert_never

import httpx2
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from protocol.dialect import Dialect
from protocol.validation import JsonObject
from sampler.traces import Trace, TraceCall, TraceTurn
from scripts.comparison.results import (
    AgentRun,
    Design,
    EndpointTimes,
    EndpointTurn,
    Split,
    Turn,
)

TIMEOUT_SECONDS = 600.0
_CALLS = ("function_call", "custom_tool_call")
_CLOSING = ("response.done", "response.completed")
_FAILED = ("response.failed", "response.incomplete")
_CUT = {"reason": "max_output_tokens"}
"""The details of a response that ended at the limit that its request set."""
_NOT_SAID = ("response.created", "response.in_progress", "response.inject.created")
"""Events that show nothing of what the model says."""
_PARTS = ("pre_inference", "queue", "prefill", "decode", "post_inference")


class CompareError(RuntimeError):
    """What was measured cannot be compared: the server refused, failed, or said something else."""


@dataclass(frozen=True)
class Endpoint:
    """Where the server is, and who asks it for what."""

    url: str
    """Such as ``http://127.0.0.1:8000``."""
    model: str
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What each request, or each handshake, says of who asks."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


async def hold(design: Design, endpoint: Endpoint, trace: Trace) -> AgentRun:
    """Hold ``trace`` to its end.

    On cancellation the connection is closed, and with it the run is given up.

    Raises:
        CompareError: the server refused or failed, or what it said is not the trace.
    """
    try:
        client = client_of(design, endpoint, _members(trace))
        async with asyncio.timeout(TIMEOUT_SECONDS), client:
            return await _held(client, design, trace)
    except (OSError, httpx2.HTTPError, WebSocketException) as error:
        raise CompareError(f"{design}, {trace.name}: {type(error).__name__}: {error}") from error
    except CompareError as error:
        raise CompareError(f"{design}, {trace.name}: {error}") from error


async def _held(client: "Client", design: Design, trace: Trace) -> AgentRun:
    began_at = time.perf_counter()
    heard: list[Heard] = []
    tool_seconds: list[float] = []
    items = _input_items(trace)
    for number, turn in enumerate(trace.turns):
        heard.append(await client.ask(Question(items, len(turn.calls))))
        check_is_said(turn, heard[-1].items, number)
        calls_at = time.perf_counter()
        if turn.calls:  # those of a turn run side by side
            await asyncio.sleep(max(call.seconds for call in turn.calls))
        tool_seconds.append(time.perf_counter() - calls_at)
        items = _answers(turn, heard[-1].items)
    wall_seconds = time.perf_counter() - began_at
    turns = list(map(_turn, heard, reports(design, heard), tool_seconds))
    return AgentRun(
        seconds=wall_seconds - sum(tool_seconds), wall_seconds=wall_seconds, turns=turns
    )


# --- What is said --------------------------------------------------------------------------------


def _members(trace: Trace) -> JsonObject:
    """Return what each request of a run says, beside its input."""
    members = {
        "instructions": trace.instructions,
        "tools": list(trace.tools),
        "parallel_tool_calls": True,
        "temperature": 0,
        "store": False,
        "metadata": {"replay": trace.name},
    }
    return {name: value for name, value in members.items() if value is not None}


def _input_items(trace: Trace) -> list[JsonObject]:
    if isinstance(trace.input, str):
        return [{"type": "message", "role": "user", "content": trace.input}]
    return list(trace.input)


def _answers(turn: TraceTurn, said: Sequence[JsonObject]) -> list[JsonObject]:
    """Return what the client says next: an output for each of the calls in ``said``."""
    calls = [item for item in said if item["type"] in _CALLS]
    outputs = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": call.output}
        for item, call in zip(calls, turn.calls, strict=True)
    ]
    return [*outputs, *turn.messages]


def check_is_said(turn: TraceTurn, said: Sequence[JsonObject], number: int) -> None:
    """Make sure that ``said``, the items of a response, are those of the trace's turn ``number``.

    Raises:
        CompareError: they are not.
    """
    text = "".join(
        part["text"] for item in said if item["type"] == "message" for part in item["content"]
    )
    if text != turn.text:
        raise CompareError(f"turn {number}: expected the text {turn.text!r}, got {text!r}")
    calls = [_called(item) for item in said if item["type"] in _CALLS]
    wanted = [_wanted(call) for call in turn.calls]
    if calls != wanted:
        raise CompareError(f"turn {number}: expected the calls {wanted}, got {calls}")


def _called(item: JsonObject) -> tuple[str, str]:
    namespace, name = item.get("namespace"), str(item["name"])
    what = item["arguments"] if item["type"] == "function_call" else item["input"]
    return f"{namespace}.{name}" if namespace else name, str(what)


def _wanted(call: TraceCall) -> tuple[str, str]:
    return call.name, (call.input if call.arguments is None else call.arguments) or ""


# --- What is heard -------------------------------------------------------------------------------


@dataclass
class Heard:
    """One turn of the model, as a client has heard it."""

    sent_at: float
    """Before anything of it was sent, the connection included; as all times in seconds."""
    may_be_cut: bool = False
    """Whether it may end at ``max_output_tokens``."""
    bytes_sent: int = 0
    bytes_received: int = 0
    first_event_at: float | None = None
    ended_at: float | None = None
    response_id: str | None = None
    items: list[JsonObject] = field(default_factory=list)
    """Of the output, as they came."""
    response: JsonObject | None = None
    """As the event had it that closed the turn, if one did."""

    @property
    def calls(self) -> list[JsonObject]:
        """Those that are complete."""
        calls = [item for item in self.items if item["type"] in _CALLS]
        return [call for call in calls if call.get("status") != "incomplete"]

    def take(self, event: JsonObject) -> None:
        """Take note of an event.

        Raises:
            CompareError: it says that the server refused or failed.
        """
        kind = event["type"]
        if kind == "error":
            raise CompareError(f"the server refused: {event['error']['message']}")
        is_cut = kind == "response.incomplete" and _reason(event) == _CUT
        is_failed = kind in _FAILED or kind == "response.inject.failed"
        if is_failed and not (is_cut and self.may_be_cut):
            raise CompareError(f"the response ended as {kind}: {_reason(event)}")
        if kind == "response.created":
            self.response_id = event["response"]["id"]
        if kind in _NOT_SAID:
            return
        if self.first_event_at is None:
            self.first_event_at = time.perf_counter()
        if kind == "response.output_item.done":
            self.items.append(event["item"])
        elif kind in _CLOSING or is_cut:
            self.response = event["response"]

    def end(self) -> Self:
        """Say that the turn is over now."""
        self.ended_at = time.perf_counter()
        return self


def _reason(event: JsonObject) -> Any:
    response = event.get("response") or event
    return response.get("error") or response.get("incomplete_details")


def _turn(heard: Heard, report: JsonObject, tool_seconds: float) -> Turn:
    assert heard.ended_at is not None, "the turn is over"
    assert heard.first_event_at is not None, "and something was said"
    seconds = heard.ended_at - heard.sent_at
    parts: dict[str, float] = {name: report[name] for name in _PARTS}
    endpoint = _told_by_endpoint(report)
    # It may be below zero, where the client is told of the turn's end before the server has
    # finished with it; then that is what it is.
    network = seconds - sum(parts.values())
    return Turn(
        seconds=seconds,
        first_event_seconds=heard.first_event_at - heard.sent_at,
        first_token_seconds=report["time_to_first_token"],
        split=_with_times_of(endpoint, Split(network=network, **parts)),
        tool_seconds=tool_seconds,
        input_tokens=report["input_tokens"],
        cached_tokens=report["cached_tokens"],
        output_tokens=report["output_tokens"],
        tokens_forwarded=report["tokens_forwarded"],
        bytes_sent=heard.bytes_sent,
        bytes_received=heard.bytes_received,
        endpoint=endpoint,
    )


def _told_by_endpoint(report: JsonObject) -> EndpointTurn | None:
    told = report.get("endpoint")
    if told is None:
        return None
    return EndpointTurn(
        tries=told.get("tries", 1),
        admission=told.get("admission", 0.0),
        times=_times(told.get("time_info", {})),
    )


def _times(told: JsonObject) -> EndpointTimes | None:
    """Return the times in ``told``, as Cerebras names them; a queue is not always told."""
    if not {"prompt_time", "completion_time"} <= told.keys():
        return None
    return EndpointTimes(
        queue=told.get("queue_time", 0.0),
        prompt=told["prompt_time"],
        completion=told["completion_time"],
    )


def _with_times_of(endpoint: EndpointTurn | None, split: Split) -> Split:
    """Return ``split`` with the endpoint's own times, where it tells any, in the place of what the
    server saw of them. What is left of that was spent on the way."""
    if endpoint is None or endpoint.times is None:
        return split
    times = endpoint.times
    return msgspec.structs.replace(
        split,
        queue=split.queue + times.queue,
        prefill=times.prompt,
        decode=times.completion,
        upstream=split.prefill + split.decode - times.total,
    )


def reports(design: Design, heard: Sequence[Heard]) -> list[JsonObject]:
    """Return the server's own figures of each turn of a run that was held to its end.

    Raises:
        CompareError: it tells none, or of another number of turns.
    """
    if design is not Design.SUSPENDED_INJECT:
        return [_segments(turn)[-1] for turn in heard]
    segments = _segments(heard[-1])  # the only one that an event closed
    if len(segments) != len(heard):
        raise CompareError(f"expected figures of {len(heard)} turns, got {len(segments)}")
    return segments


def _segments(heard: Heard) -> list[JsonObject]:
    assert heard.response is not None, "an event closed the turn"
    try:
        segments: list[JsonObject] = heard.response["suspend:run"]["turns"]
    except KeyError as error:
        raise CompareError(f"the server tells nothing of its own times: no {error}") from None
    return segments


# --- Clients -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """What a client says, and how much of an answer it waits for."""

    items: list[JsonObject]
    """That are new."""
    num_calls: int
    """That the turn will make; without any it is the last one."""
    members: JsonObject = field(default_factory=dict)
    """Further ones of this request or event only."""
    may_be_cut: bool = False
    """Whether the answer may end at ``max_output_tokens``."""


class Client(Protocol):
    """A client of one design, for one run. Entered, it may ask; left, its connection is closed."""

    async def ask(self, question: Question) -> Heard:
        """Say what is new, and hear the model's turn.

        Raises:
            CompareError: the server refused or failed.
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


def client_of(design: Design, endpoint: Endpoint, members: JsonObject) -> Client:
    """Return a client.

    Args:
        design: in which it holds a run.
        endpoint: of the server.
        members: that each of its requests has.
    """
    return _CLIENTS[design](endpoint, {"model": endpoint.model, **members})


class _SocketClient:
    """Asks over one WebSocket, which is opened by the first question, and says only what is new.

    Suspended, it is one response, to which outputs are appended or injected; chained, a response
    each turn, which names the one before it, and inherits neither instructions nor tools.
    """

    def __init__(self, dialect: Dialect, endpoint: Endpoint, members: JsonObject) -> None:
        self._dialect = dialect
        self._endpoint = endpoint
        self._members = members
        self._stack = AsyncExitStack()
        self._socket: ClientConnection | None = None
        self._response_id: str | None = None
        """Of the latest response."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(self, question: Question) -> Heard:
        heard = Heard(time.perf_counter(), question.may_be_cut)
        socket = self._socket or await self._connect()
        frame = msgspec.json.encode(self._frame(question))
        heard.bytes_sent = len(frame)
        await socket.send(frame, text=True)
        while not self._is_over(heard, question):
            data = await socket.recv(decode=False)
            heard.bytes_received += len(data)
            heard.take(msgspec.json.decode(data))
        self._response_id = heard.response_id or self._response_id
        return heard.end()

    async def _connect(self) -> ClientConnection:
        address = self._endpoint.url.replace("http", "ws", 1)
        connecting = connect(
            f"{address}/v1/responses?dialect={self._dialect.value}",
            additional_headers=self._endpoint.headers,
            compression=None,
            max_size=None,
            proxy=None,
        )
        self._socket = await self._stack.enter_async_context(connecting)
        return self._socket

    def _frame(self, question: Question) -> JsonObject:
        news = {"input": question.items, **question.members}
        create = {"type": "response.create", **self._members, **news}
        if self._response_id is None:
            return create
        match self._dialect:
            case Dialect.APPEND:
                return {"type": "response.append", **news}
            case Dialect.INJECT:
                return {"type": "response.inject", "response_id": self._response_id, **news}
            case Dialect.CHAINED:
                return create | {"previous_response_id": self._response_id}
            case _:
                assert_never(self._dialect)

    def _is_over(self, heard: Heard, question: Question) -> bool:
        if heard.response is not None:
            return True
        # In this dialect no event closes a turn that calls.
        is_open = self._dialect is Dialect.INJECT and question.num_calls > 0
        return is_open and len(heard.calls) == question.num_calls


class _ResendingClient:
    """Asks by a request each turn, with the whole history, answered by an event stream."""

    def __init__(
        self, endpoint: Endpoint, members: JsonObject, *, caches: bool, reconnects: bool = False
    ) -> None:
        self._members = members | {"stream": True}
        self._history: list[JsonObject] = []
        self._path = "/v1/responses" if caches else "/v1/responses?cache=off"
        self._client = httpx2.AsyncClient(
            base_url=endpoint.url,
            headers={"Content-Type": "application/json", **endpoint.headers},
            limits=httpx2.Limits(max_keepalive_connections=0 if reconnects else 1),
            timeout=TIMEOUT_SECONDS,
            trust_env=False,
            verify=False,  # nothing is encrypted; and certificates take long to load
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, question: Question) -> Heard:
        self._history += question.items
        heard = Heard(time.perf_counter(), question.may_be_cut)
        content = msgspec.json.encode({**self._members, "input": self._history, **question.members})
        heard.bytes_sent = len(content)
        async with self._client.stream("POST", self._path, content=content) as reply:
            await _check_status(reply)
            async for event in _events(reply):
                heard.take(event)
                if heard.response is not None and heard.ended_at is None:
                    heard.end()
            heard.bytes_received = reply.num_bytes_downloaded
        if heard.ended_at is None:
            raise CompareError("the event stream ended before the response did")
        self._history += heard.items
        return heard


async def _check_status(reply: httpx2.Response) -> None:
    if reply.status_code != httpx2.codes.OK:
        text = (await reply.aread()).decode(errors="replace")
        raise CompareError(f"the server answered {reply.status_code}: {text}")


async def _events(reply: httpx2.Response) -> AsyncIterator[JsonObject]:
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield msgspec.json.decode(line.removeprefix("data: "))


_CLIENTS: dict[Design, Callable[[Endpoint, JsonObject], Client]] = {
    Design.STATELESS_CACHE: partial(_ResendingClient, caches=True),
    Design.STATELESS_CACHE_RECONNECT: partial(_ResendingClient, caches=True, reconnects=True),
    Design.STATELESS: partial(_ResendingClient, caches=False),
    Design.STATELESS_RECONNECT: partial(_ResendingClient, caches=False, reconnects=True),
    Design.CHAINED: partial(_SocketClient, Dialect.CHAINED),
    Design.SUSPENDED: partial(_SocketClient, Dialect.APPEND),
    Design.SUSPENDED_INJECT: partial(_SocketClient, Dialect.INJECT),
    Design.AGAIN: partial(_ResendingClient, caches=True),
    Design.SUSPENDED_AGAIN: partial(_SocketClient, Dialect.APPEND),
}
