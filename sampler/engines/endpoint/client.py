"""The client of a remote endpoint that speaks OpenAI's HTTP API: all about HTTP, nothing of
messages.

One ``Endpoint`` serves all runs of a process. A segment is one POST whose answer is an event
stream. A request waits at the gate (``gate``), goes out over a connection that was used
before if there is one, and is tried again, with its place kept, for as long as the answer has said
nothing and its patience lasts. What says nothing is the caller's to tell: many answers begin with
an event that names the assistant, and break off then. After that, what breaks is the caller's to
know: what was said cannot be unsaid.

HTTP/1.1 is what is spoken. With one connection to a stream, leaving a stream early closes its
connection, so the endpoint stops sampling, and bothers no other stream.
httpcore2 (2.16) resets no HTTP/2 stream that is left: the endpoint goes on to the end, at our cost,
and what it sends is never acknowledged, so that the connection's window fills up. And a connection
there fails as a whole when one read of it times out.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import httpx2

from protocol.codec import decode_object
from protocol.errors import ProtocolError
from protocol.validation import JsonObject
from sampler.engine_error import EngineError
from sampler.engines.endpoint.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    INVALID_PROMPT,
    RATE_LIMIT_EXCEEDED,
    EndpointError,
    error_in_stream,
    error_of_answer,
)
from sampler.engines.endpoint.gate import Gate, GateClosedError, Ticket
from sampler.engines.endpoint.rate_limits import exhausted_for, rate_limits_in
from sampler.engines.endpoint.server_sent_events import (
    EventParser,
    EventTooLongError,
    ServerSentEvent,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

Begins: TypeAlias = Callable[[JsonObject], bool]
"""Tells whether an event says anything that its caller has a use for. What it raises is raised."""

_Attempt: TypeAlias = Callable[[AsyncExitStack, Ticket], Awaitable[T]]

_MAX_DOUBLINGS = 4
_KEEPALIVE_SECONDS = 300.0
"""How long a connection is kept while nobody uses it: tools may take minutes. Endpoints close
theirs sooner or later, which is noticed before it is used again."""
_MAX_ERROR_BYTES = 64 << 10
_DRAIN_SECONDS = 0.1
"""How long the end of a body, which follows ``[DONE]`` at once, is waited for. Without it, its
connection is of no more use."""
_MIN_SECRET_CHARACTERS = 8
_NO_MODELS_ROUTE = (404, 405, 501)
_REFUSED_KEY = (401, 403)
"""Which no waiting mends, where an account without credit (402) may get some any time."""
_REFUSALS = frozenset({CONTEXT_LENGTH_EXCEEDED, INVALID_PROMPT})
"""The codes of errors that are the request's own fault."""
_CHECK_SECONDS = 5.0
"""How long a check waits for an endpoint that does not answer. Runs are more patient."""
_MAX_NAMES = 20
_NEEDED_MEMBERS = frozenset({"messages", "model", "prompt", "stream", "tools"})
"""Without them a request asks for nothing, or for something else."""
_DONE = b"[DONE]"


class EndpointSettingsError(ValueError):
    """A setting that cannot be. The message says why, and no key."""

    def __init__(self, member: str, message: str) -> None:
        super().__init__(message)
        self.member = member
        """Of ``EndpointSettings``: which one it is."""


@dataclass(frozen=True)
class EndpointSettings:
    """Which endpoint, and how it is spoken to.

    Raises:
        EndpointSettingsError: one of the settings cannot be.
    """

    base_url: str
    """Paths are joined to it: ``https://api.cerebras.ai/v1``."""
    api_key: str | None = field(default=None, repr=False)
    """Goes into the header ``Authorization`` and nowhere else."""
    max_concurrent: int = 64
    """Requests in flight at once."""
    patience_seconds: float = 60.0
    """How long a request is tried again before it fails."""
    backoff_seconds: float = 0.5
    """The most that is waited before the second try, where the endpoint does not say how long. It
    doubles with each try, up to 16 times as much."""
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 60.0
    """The longest silence of a stream, that before its first event included."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with each request. Their values are kept as secret as the key."""
    max_tokens_member: str = "max_completion_tokens"
    """The member of a chat request that bounds what is sampled."""
    omitted: frozenset[str] = frozenset()
    """Members that are left out of every request, because the endpoint does not take them."""

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise EndpointSettingsError(*problem)

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Give what cannot be: the member, and what is wrong with it."""
        if problem := _problem_of_url(self.base_url):
            yield "base_url", problem
        if self.max_concurrent < 1:
            yield "max_concurrent", "an endpoint takes at least one request at once"
        if self.read_timeout_seconds <= 0:
            yield "read_timeout_seconds", "an endpoint is given some time to say something"
        if not self.max_tokens_member:
            yield "max_tokens_member", "the member that bounds what is sampled has a name"
        if self.max_tokens_member in _NEEDED_MEMBERS:
            yield "max_tokens_member", f"every request needs its {self.max_tokens_member}"
        if "" in self.omitted:
            yield "omitted", "a member that is left out has a name"
        if needed := sorted(_NEEDED_MEMBERS & self.omitted):
            yield "omitted", f"every request needs its {', '.join(needed)}"
        if not _can_be_sent([self.api_key or ""]):
            yield "api_key", "an API key has no such characters as are in it"
        if not _can_be_sent(self.headers.values()):
            yield "headers", "a header has characters that no header can have"

    @property
    def secrets(self) -> tuple[str, ...]:
        """What nobody may be told."""
        values = (value for value in self.headers.values() if len(value) >= _MIN_SECRET_CHARACTERS)
        return (*filter(None, [self.api_key]), *values)


class EventStream(AsyncIterator[JsonObject]):
    """The events of a good answer, and how it came about. It is read by one task."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        ticket: Ticket,
        secrets: tuple[str, ...],
        read_timeout_seconds: float,
    ) -> None:
        self._chunks = chunks
        self._ticket = ticket
        self._secrets = secrets
        self._read_timeout_seconds = read_timeout_seconds
        self._parser = EventParser()
        self._events: deque[ServerSentEvent] = deque()
        self._read_ahead: deque[JsonObject] = deque()
        self._has_ended = False
        self._body_has_ended = False

    @property
    def queued_seconds(self) -> float:
        """How long the request waited at the gate, before all its tries."""
        return self._ticket.queued_seconds

    @property
    def tries(self) -> int:
        """How often it was sent; 1 if it was answered well at once."""
        return self._ticket.num_admissions

    @property
    def sent_at(self) -> float:
        """When it was sent to be answered: ``time.monotonic``, in seconds."""
        return self._ticket.admitted_at

    async def read_beginning(self, begins: Begins) -> None:
        """Read ahead up to the first event that says something.

        Raises:
            EndpointError: as by iterating, or no event does.
        """
        has_begun = False
        while not has_begun:
            event = await self._next()
            if event is None:
                message = "the endpoint's answer ended before it said anything"
                raise EndpointError(message, is_transient=True)
            self._read_ahead.append(event)
            has_begun = begins(event)

    async def __anext__(self) -> JsonObject:
        """Return the next event.

        A body that ends without ``[DONE]`` ends the iteration like any other.

        Raises:
            EndpointError: the endpoint says that it failed, what it says is no event of this
                kind, the connection broke, or nothing came for too long.
        """
        if self._read_ahead:
            return self._read_ahead.popleft()
        if (event := await self._next()) is None:
            raise StopAsyncIteration
        return event

    async def drain(self) -> None:
        """Read what is left of a body whose events have ended, so that its connection is free."""
        if not self._has_ended or self._body_has_ended:
            return
        with suppress(TimeoutError, EndpointError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while await self._read_chunk():
                    pass

    async def _next(self) -> JsonObject | None:
        while not self._has_ended:
            if not self._events:
                await self._read_events()
                continue
            event = self._events.popleft()
            if event.data.strip() == _DONE:
                self._has_ended = True
            elif event.data:
                return self._parse(event)
        return None

    async def _read_events(self) -> None:
        """Read until there is an event, or a little less, or the end."""
        chunk = await self._read_chunk()
        if chunk is None:
            self._has_ended = True
            return
        try:
            self._events.extend(self._parser.feed(chunk))
        except EventTooLongError as error:
            raise EndpointError(f"the endpoint sent {error}") from None

    async def _read_chunk(self) -> bytes | None:
        with _as_endpoint_errors(self._read_timeout_seconds):
            chunk = await anext(self._chunks, None)
        self._body_has_ended = chunk is None
        return chunk

    def _parse(self, event: ServerSentEvent) -> JsonObject:
        try:
            value = decode_object(event.data)
        except ProtocolError:
            message = "the endpoint sent an event that is no JSON object"
            raise EndpointError(message) from None
        if event.name == "error" and not value.get("error"):
            value = {"error": value}
        if error := error_in_stream(value, self._secrets):
            self._has_ended = True
            raise error
        return value


class Endpoint:
    """A remote endpoint, for all runs of an event loop."""

    def __init__(self, settings: EndpointSettings) -> None:
        self.settings = settings
        self.requests = 0
        """Sent, each try counted."""
        self.retries = 0
        """Those of them that were not the first of their kind."""
        self.rate_limited = 0
        """Those that were answered with 429."""
        self.failures = 0
        """Requests that were given up, and streams that failed before all was said. What was
        refused for what it asks is none, nor what its reader leaves."""
        self.rate_limits: Mapping[str, str] = {}
        """The latest ``x-ratelimit-`` headers, with names in lower case."""
        self.gate = Gate(settings.max_concurrent, settings.patience_seconds)
        self._secrets = settings.secrets
        self._client = _client_for(settings)

    async def check_model(self, name: str) -> None:
        """Make sure that the endpoint serves the model ``name``, if it is there and can be asked.

        An endpoint that cannot be asked now may be there when it is wanted: a warning is logged.

        Raises:
            EndpointError: it refuses the key, or has no such model.
        """
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                models = await self.list_models()
        except TimeoutError:
            logger.warning("the endpoint does not answer: runs will fail until it does")
            return
        except EndpointError as error:
            if error.status in _REFUSED_KEY:
                raise
            logger.warning("%s: runs may fail", error)
            return
        names = [str(model.get("id")) for model in models or ()]
        if names and name not in names:
            shown = ", ".join(names[:_MAX_NAMES]) + ", ..." * (len(names) > _MAX_NAMES)
            raise EndpointError(f"the endpoint has no model {name!r}, but {shown}")

    async def list_models(self) -> list[JsonObject] | None:
        """Return the objects of ``GET /models``, or None where the endpoint has no such route.

        Raises:
            EndpointError: as by ``stream``.
        """
        try:
            async with AsyncExitStack() as stack:
                body = await self._retrying(self._get_models, stack)
        except EndpointError as error:
            if error.status in _NO_MODELS_ROUTE:
                return None
            raise
        models = body.get("data")
        if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
            raise EndpointError("the endpoint's list of models is none")
        return models

    @asynccontextmanager
    async def stream(self, path: str, body: bytes, begins: Begins) -> AsyncIterator[EventStream]:
        """POST ``body``, which is JSON, and give the events of the answer.

        Entering waits for admission and for an event that says something; all tries are made
        there. Leaving early closes the stream, and with it its connection, so that the endpoint
        need not go on. Cancellation, at any point, does the same; nothing stays behind. An
        ``EngineError`` that leaves the block is a failure of the endpoint, whoever has raised it.

        Args:
            path: joined to the base URL: ``/chat/completions``.
            body: of the request.
            begins: tells whether an event says something. Until one does, nothing is given, and the
                request can be made again.

        Raises:
            EndpointError: the request was refused, or patience is at an end.
        """

        async def attempt(trying: AsyncExitStack, ticket: Ticket) -> EventStream:
            return await self._begin(trying, ticket, path, body, begins)

        async with AsyncExitStack() as stack:
            try:
                yield await self._retrying(attempt, stack)
            except EngineError as error:
                self.failures += error.code not in _REFUSALS
                raise

    async def close(self) -> None:
        """Close all connections. Streams that are still read break."""
        await self._client.aclose()

    # Trying, and trying again.

    async def _retrying(self, attempt: _Attempt[T], stack: AsyncExitStack) -> T:
        """Return what ``attempt`` does; try again while it fails in ways that may pass.

        What it leaves open is for ``stack`` to close, the place in flight included.
        """
        ticket = self.gate.ticket()
        error: EndpointError | None = None
        while True:
            await self._enter(ticket, error)
            self.requests += 1
            self.retries += error is not None
            async with AsyncExitStack() as trying:
                trying.callback(self.gate.leave, ticket)
                try:
                    result = await attempt(trying, ticket)
                except EndpointError as failure:
                    error = failure.with_traceback(None)
                    # The gate is closed before this place is free, or somebody would slip through.
                    seconds = self._take_note_of_failure(error, ticket)
                else:
                    self.gate.answered(ticket)
                    await stack.enter_async_context(trying.pop_all())
                    return result
            await self._wait_to_retry(error, seconds, ticket)

    async def _enter(self, ticket: Ticket, error: EndpointError | None) -> None:
        """Pass the gate; ``error``, the last one, is raised if that takes too long."""
        try:
            async with asyncio.timeout_at(ticket.deadline):
                await self.gate.enter(ticket)
        except TimeoutError:
            assert error is not None, "only what was tried has a deadline"
            raise error from None
        except GateClosedError as closed:
            raise error or _closed_for(closed.seconds) from None
        if ticket.deadline is None:
            now = asyncio.get_running_loop().time()
            ticket.deadline = now + self.settings.patience_seconds

    def _take_note_of_failure(self, error: EndpointError, ticket: Ticket) -> float:
        """Return after how many seconds to try again, if at all, and tell the gate."""
        seconds = error.retry_after_seconds
        if seconds is None:
            seconds = _backoff(self.settings.backoff_seconds, ticket.num_admissions)
        if error.status == 429:
            self.rate_limited += 1
            if error.is_transient:
                self.gate.rate_limited(ticket, seconds)
        return seconds

    async def _wait_to_retry(self, error: EndpointError, seconds: float, ticket: Ticket) -> None:
        """Wait until the request may be tried again; raise ``error`` at once where it may not."""
        assert ticket.deadline is not None, "it was tried"
        now = asyncio.get_running_loop().time()
        if not error.is_transient or now + seconds > ticket.deadline:
            raise error
        logger.info("%s; trying again in %.2f s", error, seconds)
        if error.status != 429:  # there the gate is closed, and opens for the first in the queue
            await asyncio.sleep(seconds)

    # One try.

    async def _begin(
        self, trying: AsyncExitStack, ticket: Ticket, path: str, body: bytes, begins: Begins
    ) -> EventStream:
        response, chunks = await self._send(trying, "POST", path, body)
        kind = response.headers.get("content-type", "text/event-stream")
        if "text/event-stream" not in kind:
            raise EndpointError(f"the endpoint answered with {kind[:80]}, not with an event stream")
        events = EventStream(chunks, ticket, self._secrets, self.settings.read_timeout_seconds)
        trying.push_async_callback(events.drain)
        await events.read_beginning(begins)
        return events

    async def _get_models(self, trying: AsyncExitStack, ticket: Ticket) -> JsonObject:
        _, chunks = await self._send(trying, "GET", "/models", None)
        with _as_endpoint_errors(self.settings.read_timeout_seconds):
            body = b"".join([chunk async for chunk in chunks])
        try:
            return decode_object(body)
        except ProtocolError:
            raise EndpointError("the endpoint's list of models is none") from None

    async def _send(
        self, trying: AsyncExitStack, method: str, path: str, body: bytes | None
    ) -> tuple[httpx2.Response, AsyncGenerator[bytes]]:
        """Send a request, and return its answer, which is good, and the chunks of its body."""
        request = self._client.build_request(method, path, content=body)
        if body is not None:
            request.headers["content-type"] = "application/json"
        with _as_endpoint_errors(self.settings.read_timeout_seconds):
            response = await self._client.send(request, stream=True)
        trying.push_async_callback(response.aclose)
        chunks = await trying.enter_async_context(aclosing(response.aiter_bytes()))
        self._take_note_of_limits(response)
        if response.status_code != 200:
            said = await self._read_beginning(chunks)
            raise error_of_answer(response.status_code, response.headers, said, self._secrets)
        return response, chunks

    async def _read_beginning(self, chunks: AsyncIterator[bytes]) -> bytes:
        """Return what an error says, as far as it can be read."""
        said = b""
        with suppress(EndpointError), _as_endpoint_errors(self.settings.read_timeout_seconds):
            async for chunk in chunks:
                said += chunk
                if len(said) > _MAX_ERROR_BYTES:
                    break
        return said

    def _take_note_of_limits(self, response: httpx2.Response) -> None:
        self.rate_limits = rate_limits_in(response.headers) or self.rate_limits
        if response.status_code == 200 and (seconds := exhausted_for(response.headers)):
            self.gate.close_for(seconds)


def _problem_of_url(text: str) -> str:
    """Return what is wrong with the URL of an endpoint; empty if nothing is."""
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        return str(error)
    if url.scheme not in ("http", "https") or not url.host:
        return "the URL of an endpoint begins with http:// or https:// and a host"
    if url.port is not None and not 0 < url.port < 1 << 16:
        return f"a port is a number from 1 to 65535, not {url.port}"
    return ""


def _can_be_sent(values: Iterable[str]) -> bool:
    """Tell whether each of ``values`` can stand in a header."""
    return all(value.isascii() and value.isprintable() for value in values)


def _client_for(settings: EndpointSettings) -> httpx2.AsyncClient:
    url = httpx2.URL(settings.base_url)
    headers = {"accept-encoding": "gzip", **settings.headers}
    if settings.api_key is not None:
        headers["authorization"] = f"Bearer {settings.api_key}"
    return httpx2.AsyncClient(
        base_url=url,
        headers=headers,
        verify=url.scheme != "http",  # certificates take long to read, and are not needed there
        timeout=httpx2.Timeout(
            settings.read_timeout_seconds, connect=settings.connect_timeout_seconds, pool=None
        ),
        limits=httpx2.Limits(
            max_connections=None,  # the gate is what limits them
            max_keepalive_connections=settings.max_concurrent,
            keepalive_expiry=_KEEPALIVE_SECONDS,
        ),
        # A proxy that the environment names has no way to this machine's loopback.
        trust_env=url.host not in ("localhost", "127.0.0.1", "::1"),
    )


def _closed_for(seconds: float) -> EndpointError:
    return EndpointError(
        "the endpoint's rate limit is reached",
        code=RATE_LIMIT_EXCEEDED,
        is_transient=True,
        retry_after_seconds=seconds,
    )


def _backoff(first_seconds: float, num_tries: int) -> float:
    """Return how long to wait after so many tries: exponential, with full jitter.

    Brooker, "Exponential Backoff And Jitter", AWS 2015.
    """
    return random.uniform(0.0, first_seconds * 2.0 ** min(num_tries - 1, _MAX_DOUBLINGS))


@contextmanager
def _as_endpoint_errors(read_timeout_seconds: float) -> Iterator[None]:
    """Raise as ``EndpointError``, which may pass, what the client raises.

    The client's own words are left out: some repeat a header.
    """
    try:
        yield
    except httpx2.ConnectTimeout:
        message = "the endpoint could not be reached in time"
        raise EndpointError(message, is_transient=True) from None
    except httpx2.TimeoutException:
        message = f"the endpoint said nothing for {read_timeout_seconds:g} seconds"
        raise EndpointError(message, is_transient=True) from None
    except httpx2.ConnectError as error:  # nothing was sent yet that it could repeat
        raise EndpointError("the endpoint could not be reached", is_transient=True) from error
    except httpx2.RequestError:
        raise EndpointError("the connection to the endpoint broke", is_transient=True) from None
