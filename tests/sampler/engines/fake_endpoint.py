"""A chat-completions endpoint on a real socket that says what a test tells it to.

It has the shapes, checks and counts of Cerebras' inference API (its documentation and the schema
of its SDK 1.91), so that what passes here is no surprise there. What it *says* is a script: a list
of steps, which the functions below make and which are joined like lists::

    async with fake_endpoint([*thinks("Hm."), *calls(("weather", '{"city":"Oslo"}'))]) as fake:
        ...  # a client of fake.url, with fake.api_key
        assert fake.requests[0].body["max_completion_tokens"] == 100

Each valid request takes the next script; ``fake.say`` adds some, and ``fake.answer`` may be set to
a function that makes one of the JSON body. ``chat_request`` makes a valid body.

=====================================  =============================================================
``says("text")``                       content, in pieces of about a token
``thinks("text")``                     ``delta.reasoning``, likewise
``calls((name, arguments), ...)``      tool calls, their arguments in pieces, interleaved by index
``deltas({...}, ...)``                 any other deltas
``waits(event_or_seconds)``            nothing, until the event is set or so long
``silence()``                          nothing, until the client leaves
``refuses(429, retry_after="1")``      an HTTP error, in the flat form; it can only be first
``breaks(503)``                        an error chunk inside of the stream, in the nested form
``cut()``                              the connection is closed in the middle, or before the answer
``ends("length")``, ``ends(None)``     the turn, with this finish reason or with none
=====================================  =============================================================

A script that does not say how it ends ends as it should: with a finish reason, ``usage`` and
``time_info`` on the last chunk, and ``[DONE]``. A turn longer than ``max_completion_tokens`` is
ended with ``length`` there.

It refuses what Cerebras refuses: a wrong key (401), a model that it does not have (404), assistant
messages with ``reasoning_content`` (400, ``wrong_api_format``), outputs that answer no call (400),
what does not fit into the context (400, ``context_length_exceeded``).

``usage`` is honest, where four bytes are a token: ``cached_tokens`` are the blocks of 128 tokens
that the request begins with and that earlier requests of the same ``prompt_cache_key`` began with,
not longer ago than ``cache_seconds``. One byte that changes early misses all that follows.
"""

import asyncio
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, TypeAlias
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from protocol.codec import SSE_DONE, decode_object, encode
from protocol.errors import ProtocolError
from protocol.validation import JsonObject

API_KEY = "csk-fake-0123456789abcdef"
MODEL = "gpt-oss-120b"
DEADLINE_SECONDS = 20.0

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 128

# --- Scripts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delta:
    """A chunk of the answer."""

    members: JsonObject
    num_tokens: int = 1


@dataclass(frozen=True)
class Wait:
    """Nothing is said for so many seconds, until the event is set or, with None, ever again."""

    until: asyncio.Event | float | None


@dataclass(frozen=True)
class HttpError:
    """An answer that is no stream."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """An event that is sent as it is, and no chunk of an answer."""

    event: JsonObject


@dataclass(frozen=True)
class Cut:
    """The connection is closed."""


@dataclass(frozen=True)
class End:
    """How the turn ends, where it is not as usual."""

    finish_reason: str | None
    says_done: bool = True


Step: TypeAlias = Delta | Wait | HttpError | Chunk | Cut | End
Script: TypeAlias = Sequence[Step]


def says(text: str) -> list[Step]:
    """Say ``text``, a token at a time."""
    return [Delta({"content": piece}) for piece in _pieces(text)]


def thinks(text: str) -> list[Step]:
    """Think ``text``, a token at a time."""
    return [Delta({"reasoning": piece}) for piece in _pieces(text)]


def calls(*calls: tuple[str, str], ids: Sequence[str] = ()) -> list[Step]:
    """Call functions, given as name and arguments, in parallel.

    Each is opened by a chunk with its id and name; then the pieces of all arguments take turns.

    Args:
        calls: names and arguments, which are said byte for byte.
        ids: of the calls; those that are not given are made up.
    """
    opened = zip_longest(calls, ids[: len(calls)])
    heads: list[Step] = [
        _call(index, "", id=call_id or uuid4().hex[:9], name=call[0])
        for index, (call, call_id) in enumerate(opened)
    ]
    turns = zip_longest(*(_pieces(arguments) for _, arguments in calls))
    pieces: list[Step] = [
        _call(index, piece)
        for turn in turns
        for index, piece in enumerate(turn)
        if piece is not None
    ]
    return heads + pieces


def _call(index: int, arguments: str, *, id: str | None = None, name: str | None = None) -> Delta:
    head = {} if id is None else {"id": id, "type": "function"}
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return Delta({"tool_calls": [{"index": index, **head, "function": function}]})


def deltas(*members: JsonObject) -> list[Step]:
    """Send deltas as they are, each of which counts as a token."""
    return [Delta(delta) for delta in members]


def waits(until: asyncio.Event | float) -> list[Step]:
    """Say nothing until ``until`` is set, or for so many seconds."""
    return [Wait(until)]


def silence() -> list[Step]:
    """Say nothing ever again."""
    return [Wait(None)]


def refuses(
    status: int,
    message: str = "no",
    *,
    code: str = "fake_error",
    body: bytes | None = None,
    **headers: str,
) -> list[Step]:
    """Answer with an HTTP error.

    Args:
        status: of the answer.
        message: of the error.
        code: of the error.
        body: what is sent instead of Cerebras' flat form.
        headers: of the answer; underscores are dashes.
    """
    flat = {"message": message, "type": f"{code}_error", "param": "", "code": code}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return [HttpError(status, encode(flat) if body is None else body, named)]


def breaks(status: int, message: str = "no", *, code: str = "fake_error") -> list[Step]:
    """Send an error inside of the stream, which ends with it."""
    error = {"id": "", "code": code, "message": message, "param": "", "type": f"{code}_error"}
    return [Chunk({"error": error, "status_code": status}), End(None, says_done=False)]


def cut() -> list[Step]:
    """Close the connection, without an end."""
    return [Cut()]


def ends(finish_reason: str | None, *, says_done: bool = True) -> list[Step]:
    """End the turn with this reason; with None, no chunk has one, or usage.

    Args:
        finish_reason: stop, length, content_filter, tool_calls or None.
        says_done: whether ``[DONE]`` is said.
    """
    return [End(finish_reason, says_done)]


def _pieces(text: str) -> list[str]:
    return [text[i : i + BYTES_PER_TOKEN] for i in range(0, len(text), BYTES_PER_TOKEN)]


def chat_request(content: str = "Hello?", **members: Any) -> JsonObject:
    """Return a valid body for ``/chat/completions`` with one user message, and ``members``."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": 1000,
        "stream": True,
    } | members


# --- What it is asked ----------------------------------------------------------------------------


@dataclass(eq=False)
class FakeRequest:
    """A request that came, and what became of it."""

    path: str
    headers: Mapping[str, str]
    body: JsonObject
    connection: tuple[str, int]
    """The client's end of it: equal where a connection was used again."""
    received_at: float = field(default_factory=time.monotonic)
    """In seconds, monotonic."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    pre_charge: int = 0
    """Tokens that are taken off the rate limit when it is admitted."""
    status: int | None = None
    """Of the answer; None where the connection was cut before."""
    was_left: bool = False
    """Whether the client closed the stream before its end."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing more will be sent."""


class PromptCache:
    """Beginnings of prompts that were seen, block by block."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seen_at: dict[bytes, float] = {}

    def look_up(self, key: str, prompt: bytes) -> int:
        """Return how many tokens of ``prompt`` were seen under ``key``, and see all of them now."""
        now = time.monotonic()
        block_bytes = BLOCK_TOKENS * BYTES_PER_TOKEN
        beginning = blake2b(key.encode())
        beginnings = []
        for start in range(0, len(prompt) - block_bytes + 1, block_bytes):
            beginning.update(prompt[start : start + block_bytes])
            beginnings.append(beginning.digest())
        num_cached = 0
        for digest in beginnings:
            if now - self._seen_at.get(digest, float("-inf")) > self.seconds:
                break
            num_cached += BLOCK_TOKENS
        self._seen_at.update(dict.fromkeys(beginnings, now))
        return num_cached


# --- The endpoint --------------------------------------------------------------------------------


class FakeEndpoint:
    """An endpoint that listens. Its attributes may be set at any time."""

    def __init__(self, scripts: Iterable[Script]) -> None:
        self.api_key = API_KEY
        self.checks_key = True
        """Whether it lets in only who has ``api_key``."""
        self.models = [MODEL]
        self.has_models_route = True
        self.models_refusal: Script = ()
        """What ``refuses`` makes, to be answered in the place of the list of models."""
        self.max_context = 131_072
        """In tokens, of the prompt and the answer."""
        self.cache = PromptCache(seconds=300.0)
        self.tokens_per_second: float | None = None
        """How fast it speaks; None for as fast as can be."""
        self.prefill_tokens_per_second: float | None = None
        """How fast it reads what is not cached; None likewise."""
        self.compresses = False
        """Whether it answers in gzip where the client takes that."""
        self.headers: dict[str, str] = {}
        """Sent with each answer, in the place of the usual ones of that name."""
        self.answer: Callable[[JsonObject], Script] | None = None
        """What makes a script for a request when no other is left."""

        self.requests: list[FakeRequest] = []
        """All that came, in order, whatever the answer."""
        self.num_connections = 0
        """That were ever made."""
        self.num_unbounded = 0
        """Requests without ``max_completion_tokens``, which are charged the whole context."""
        self.in_flight = 0
        """Requests that are being answered; one that makes a script counts."""
        self.max_in_flight = 0
        """The most that there were; may be set back."""

        self.port = 0
        self._scripts = deque(scripts)
        self._came = asyncio.Event()
        self._transports: dict[tuple[str, int], asyncio.Transport] = {}

    @property
    def url(self) -> str:
        """The base URL, as a client wants it."""
        return f"http://127.0.0.1:{self.port}/v1"

    def say(self, *scripts: Script) -> None:
        """Say this, too, each script to one request."""
        self._scripts.extend(scripts)

    async def received(self, count: int = 1) -> FakeRequest:
        """Wait until so many requests have come, and return the last of them."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(self.requests) < count:
                self._came.clear()
                await self._came.wait()
        return self.requests[count - 1]

    def app(self) -> Starlette:
        """Return the application that is served."""
        return Starlette(
            routes=[
                Route("/v1/models", self._list_models),
                Route("/v1/chat/completions", _Completions(self), methods=["POST"]),
                Route("/v1/completions", _Completions(self), methods=["POST"]),
            ]
        )

    async def _list_models(self, request: Request) -> Response:
        if not self.has_models_route:
            return Response("Not Found", 404)
        for error in self.models_refusal or filter(None, [self._check_key(request)]):
            assert isinstance(error, HttpError), "it is no stream"
            return Response(error.body, error.status, media_type="application/json")
        data = [
            {"id": name, "object": "model", "created": 1721692800, "owned_by": "Cerebras"}
            for name in self.models
        ]
        return Response(encode({"object": "list", "data": data}), media_type="application/json")

    def _check_key(self, request: Request) -> HttpError | None:
        is_known = request.headers.get("authorization") == f"Bearer {self.api_key}"
        if is_known or not self.checks_key:
            return None
        return _error(401, "wrong_api_key", "Wrong API Key", param="api_key")

    # What _Completions and the protocol use.

    def came(self, request: FakeRequest) -> None:
        """Take note of a request."""
        self.requests.append(request)
        self._came.set()

    def connected(self, transport: asyncio.Transport) -> None:
        """Take note of a connection."""
        self.num_connections += 1
        self._transports[transport.get_extra_info("peername")] = transport

    def disconnect(self, connection: tuple[str, int]) -> None:
        """Close a connection, after what was sent."""
        self._transports[connection].close()

    def disconnect_all(self) -> None:
        """Drop all connections, which ends whatever is being said."""
        for transport in self._transports.values():
            transport.abort()

    def script_for(self, request: FakeRequest, raw: Request) -> Script:
        """Check ``request``, count its tokens, and return what is said to it."""
        if error := self._check_key(raw) or self._check(request):
            return [error]
        if self._scripts:
            return self._scripts.popleft()
        if self.answer is None:
            return [_error(500, "nothing_to_say", "the test gave no script for this request")]
        return self.answer(request.body)

    def _check(self, request: FakeRequest) -> HttpError | None:
        body = request.body
        if body.get("model") not in self.models:
            message = f"Model {body.get('model')} does not exist or you do not have access to it."
            return _error(404, "model_not_found", message, param="model")
        if body.get("stream") is not True:
            return _error(400, "not_streaming", "this one only streams", param="stream")
        is_chat = request.path.endswith("/chat/completions")
        error = _check_messages(body.get("messages")) if is_chat else _check_prompt(body)
        return error or self._count(request, is_chat=is_chat)

    def _count(self, request: FakeRequest, *, is_chat: bool) -> HttpError | None:
        body = request.body
        prompt = _rendered_messages(body) if is_chat else _rendered_prompt(body["prompt"])
        request.prompt_tokens = -(-len(prompt) // BYTES_PER_TOKEN)
        left = self.max_context - request.prompt_tokens
        most = _most_tokens(body)
        self.num_unbounded += most is None
        request.pre_charge = request.prompt_tokens + (left if most is None else most)
        if left < (most or 1):
            message = (
                "Please reduce the length of the messages or completion. Current length is "
                f"{request.pre_charge} while limit is {self.max_context}"
            )
            return _error(400, "context_length_exceeded", message, param="messages")
        key = body.get("prompt_cache_key") or ""
        request.cached_tokens = self.cache.look_up(key, prompt)
        return None

    def headers_of(self, answer: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer that has ``answer`` of its own."""
        limits = {
            "x-ratelimit-limit-requests-day": "14400",
            "x-ratelimit-limit-tokens-minute": "60000",
            "x-ratelimit-remaining-requests-day": str(14400 - len(self.requests)),
            "x-ratelimit-remaining-tokens-minute": "59000",
            "x-ratelimit-reset-requests-day": "33011.382867",
            "x-ratelimit-reset-tokens-minute": "11.382867",
        }
        headers = limits | self.headers | dict(answer)
        return [(name.encode(), value.encode()) for name, value in headers.items()]


def _check_messages(messages: Any) -> HttpError | None:
    """Check what Cerebras checks of messages."""
    if not isinstance(messages, list) or not messages:
        return _error(422, "validation_error", "messages: expected a list", param="messages")
    awaited: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        match message:
            case {"role": "assistant", "reasoning_content": _}:
                name = f"{where}.assistant.reasoning_content"
                text = f"{name}: property '{name}' is unsupported"
                return _error(400, "wrong_api_format", text, param="validation_error")
            case {"role": "assistant"}:
                awaited = {call["id"] for call in message.get("tool_calls") or ()}
            case {"role": "tool", "content": str(), "tool_call_id": str(call_id)}:
                if call_id not in awaited:
                    text = f"{where}: no tool call with the id '{call_id}' precedes this message"
                    return _error(400, "wrong_api_format", text, param=where)
                awaited.remove(call_id)
            case {"role": "system" | "developer" | "user", "content": str() | list()}:
                pass
            case _:
                return _error(422, "validation_error", f"{where}: no message", param=where)
    return None


def _check_prompt(body: JsonObject) -> HttpError | None:
    if isinstance(body.get("prompt"), str | list):
        return None
    return _error(422, "validation_error", "prompt: expected text or token ids", param="prompt")


def _rendered_messages(body: JsonObject) -> bytes:
    """Return what the model reads: the tools, then each message."""
    return b"\n".join([encode(body.get("tools") or []), *map(encode, body["messages"]), b""])


def _rendered_prompt(prompt: str | Sequence[int]) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode()
    return b"".join(token_id.to_bytes(BYTES_PER_TOKEN, "big") for token_id in prompt)


def _most_tokens(body: JsonObject) -> int | None:
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    return None if most is None else int(most)


def _error(status: int, code: str, message: str, *, param: str = "") -> HttpError:
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return HttpError(
        status, encode({"message": message, "type": kind, "param": param, "code": code})
    )


class _Completions:
    """The ASGI application of both ways to ask for a completion."""

    def __init__(self, fake: FakeEndpoint) -> None:
        self._fake = fake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = Request(scope, receive)
        data = await raw.body()
        try:
            body = decode_object(data)
        except ProtocolError as error:
            body = {"model": None, "unreadable": str(error)}
        request = FakeRequest(scope["path"], dict(raw.headers), body, tuple(scope["client"]))
        self._fake.came(request)
        async with asyncio.TaskGroup() as group:
            player = group.create_task(self._answer(request, raw, send))
            watcher = group.create_task(_cancel_if_left(player, request, receive))
            await asyncio.wait({player})
            watcher.cancel()

    async def _answer(self, request: FakeRequest, raw: Request, send: Send) -> None:
        fake = self._fake
        fake.in_flight += 1
        fake.max_in_flight = max(fake.max_in_flight, fake.in_flight)
        try:
            await _Player(fake, request, send).play(fake.script_for(request, raw))
        finally:
            fake.in_flight -= 1
            request.over.set()


async def _cancel_if_left(
    player: asyncio.Task[None], request: FakeRequest, receive: Receive
) -> None:
    """Wait for the client to leave, and end what is being said to it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not player.done():
        request.was_left = True
        player.cancel()


class _Player:
    """Plays one script."""

    def __init__(self, fake: FakeEndpoint, request: FakeRequest, send: Send) -> None:
        self._fake = fake
        self._request = request
        self._send = send
        self._is_chat = request.path.endswith("/chat/completions")
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid4()}"
        self._created = int(time.time())
        self._has_called = False
        self._has_role = False
        takes_gzip = "gzip" in request.headers.get("accept-encoding", "")
        self._gzip = zlib.compressobj(wbits=31) if fake.compresses and takes_gzip else None
        self._begun_at = self._due_at = time.perf_counter()

    async def play(self, script: Script) -> None:
        """Play ``script`` to its end, or to its first step that ends all."""
        if script and isinstance(script[0], HttpError):
            return await self._refuse(script[0])
        if not await self._read_prompt(script):
            return None
        for step in script:
            match step:
                case Delta() if self._request.completion_tokens >= self._most_tokens():
                    return await self._end(End("length"))
                case Delta():
                    await self._say(step)
                case Wait():
                    await _wait(step.until)
                    self._due_at = time.perf_counter()
                case Chunk():
                    await self._send_event(step.event)
                case Cut():
                    return self._fake.disconnect(self._request.connection)
                case End():
                    return await self._end(step)
                case HttpError():
                    raise AssertionError("an HTTP error can only be first")
        return await self._end(End("tool_calls" if self._has_called else "stop"))

    async def _refuse(self, error: HttpError) -> None:
        headers = {"content-type": "application/json"} | dict(error.headers)
        await self._start(error.status, headers)
        await self._send({"type": "http.response.body", "body": error.body})

    async def _read_prompt(self, script: Script) -> bool:
        """Prefill and begin the answer, unless the connection is to be cut before."""
        num_tokens = self._request.prompt_tokens - self._request.cached_tokens
        if rate := self._fake.prefill_tokens_per_second:
            await asyncio.sleep(num_tokens / rate)
        self._begun_at, first = time.perf_counter(), script[0] if script else None
        prompt_seconds = self._begun_at - self._due_at
        self._prompt_seconds = prompt_seconds
        self._due_at = self._begun_at
        if isinstance(first, Cut):
            self._fake.disconnect(self._request.connection)
            return False
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        await self._start(200, headers | ({"content-encoding": "gzip"} if self._gzip else {}))
        return True

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._request.status = status
        message = {"type": "http.response.start", "status": status}
        await self._send(message | {"headers": self._fake.headers_of(headers)})

    def _most_tokens(self) -> float:
        most = _most_tokens(self._request.body)
        return float("inf") if most is None else most

    async def _say(self, delta: Delta) -> None:
        if self._is_chat and not self._has_role:
            self._has_role = True
            await self._send_chunk({"role": "assistant"})
        if rate := self._fake.tokens_per_second:
            # Each is due at a time that follows from the last one's, however late a sleep ends.
            self._due_at += delta.num_tokens / rate
            await asyncio.sleep(max(self._due_at - time.perf_counter(), 0))
        self._has_called |= "tool_calls" in delta.members
        self._request.completion_tokens += delta.num_tokens
        self._request.reasoning_tokens += delta.num_tokens * ("reasoning" in delta.members)
        await self._send_chunk(delta.members)

    async def _end(self, end: End) -> None:
        if end.finish_reason is not None:
            ending = {"usage": self._usage(), "time_info": self._time_info()}
            await self._send_chunk({}, finish_reason=end.finish_reason, **ending)
        if end.says_done:
            await self._write(SSE_DONE)
        rest = self._gzip.flush() if self._gzip else b""
        await self._send({"type": "http.response.body", "body": rest})

    async def _send_chunk(
        self, delta: JsonObject, *, finish_reason: str | None = None, **members: Any
    ) -> None:
        choice: JsonObject = {"index": 0}
        if self._is_chat:
            choice["delta"] = delta
        else:
            choice |= {"text": delta.get("content", ""), "tokens": delta.get("tokens")}
        if finish_reason is not None:
            choice["finish_reason"] = finish_reason
        chunk = {
            "id": self._id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._request.body["model"],
            "system_fingerprint": "fp_fake",
            "choices": [choice],
        }
        await self._send_event(chunk | members)

    async def _send_event(self, event: JsonObject) -> None:
        await self._write(b"data: %b\n\n" % encode(event))

    async def _write(self, data: bytes) -> None:
        if self._gzip:
            data = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _usage(self) -> JsonObject:
        request = self._request
        return {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.completion_tokens,
            "total_tokens": request.prompt_tokens + request.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
                "reasoning_tokens": request.reasoning_tokens,
            },
        }

    def _time_info(self) -> JsonObject:
        """Return how long it took, in seconds."""
        completion_seconds = time.perf_counter() - self._begun_at
        return {
            "queue_time": 0.0,
            "prompt_time": self._prompt_seconds,
            "completion_time": completion_seconds,
            "total_time": self._prompt_seconds + completion_seconds,
            "created": float(self._created),
        }


async def _wait(until: asyncio.Event | float | None) -> None:
    if isinstance(until, asyncio.Event):
        await until.wait()
    elif until is None:
        await asyncio.Event().wait()
    else:
        await asyncio.sleep(until)


@asynccontextmanager
async def fake_endpoint(*scripts: Script, port: int = 0) -> AsyncIterator[FakeEndpoint]:
    """Serve an endpoint that says ``scripts``, each to one request.

    On the way out, connections are dropped and all that is still being said is ended.

    Args:
        scripts: what it says; more may be added.
        port: to listen on; zero for any.
    """
    fake = FakeEndpoint(scripts)

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            fake.connected(transport)

    config = uvicorn.Config(
        fake.app(), http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False
    )
    config.load()
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: Protocol(config=config, server_state=state, app_state={}), "127.0.0.1", port
    )
    fake.port = listener.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        listener.close()
        fake.disconnect_all()
        await asyncio.wait_for(asyncio.gather(*state.tasks), DEADLINE_SECONDS)
