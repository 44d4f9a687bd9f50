"""The client of an endpoint: what it sends, how it tries again, and what it tells of failures.

``test_endpoint_herd`` has many runs at once; the queue by itself is in ``test_endpoint_gate``.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from protocol.codec import encode
from protocol.validation import JsonObject
from sampler.engine_error import EngineError
from sampler.engines.chat.chunk import says_something
from sampler.engines.endpoint.client import Endpoint, EndpointSettings, EndpointSettingsError
from sampler.engines.endpoint.errors import MAX_MESSAGE_CHARACTERS, EndpointError
from tests.sampler.engines.fake_endpoint import (
    API_KEY,
    DEADLINE_SECONDS,
    MODEL,
    Chunk,
    FakeEndpoint,
    Script,
    breaks,
    chat_request,
    cut,
    deltas,
    ends,
    fake_endpoint,
    refuses,
    says,
    silence,
    waits,
)

CHAT = "/chat/completions"
QUICK: dict[str, Any] = {"patience_seconds": 5.0, "backoff_seconds": 0.01}


@asynccontextmanager
async def client_of(fake: FakeEndpoint, **settings: Any) -> AsyncIterator[Endpoint]:
    """Open a client, which may leave nothing in flight."""
    chosen = {"base_url": fake.url, "api_key": API_KEY} | QUICK | settings
    endpoint = Endpoint(EndpointSettings(**chosen))
    try:
        yield endpoint
    finally:
        await endpoint.close()
    assert (endpoint.gate.in_flight, endpoint.gate.unanswered, endpoint.gate.num_waiting) == (
        (0, 0, 0)
    )


@asynccontextmanager
async def talking(
    *scripts: Script, **settings: Any
) -> AsyncIterator[tuple[FakeEndpoint, Endpoint]]:
    """Serve an endpoint that says ``scripts``, and open a client of it."""
    async with fake_endpoint(*scripts) as fake, client_of(fake, **settings) as endpoint:
        yield fake, endpoint


async def events_of(
    endpoint: Endpoint, content: str = "Hello?", **members: Any
) -> list[JsonObject]:
    """Return the events of one answer."""
    body = encode(chat_request(content, **members))
    async with endpoint.stream(CHAT, body, says_something) as events:
        return [event async for event in events]


def text_in(events: Sequence[JsonObject]) -> str:
    """Return what was said in ``events``."""
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


async def read_into(events: list[JsonObject], endpoint: Endpoint) -> None:
    """Put the events of one answer into ``events``, as far as they come."""
    async with endpoint.stream(CHAT, encode(chat_request()), says_something) as stream:
        async for event in stream:
            events.append(event)  # noqa: PERF401  # those are wanted that came before it broke


async def failure_of(endpoint: Endpoint) -> EndpointError:
    """Return what asking fails with."""
    with pytest.raises(EndpointError) as failure:
        await events_of(endpoint)
    return failure.value


# --- Streams -------------------------------------------------------------------------------------


async def test_a_stream_gives_the_events_up_to_done() -> None:
    async with talking(says("Hello there.")) as (fake, endpoint):
        before = time.monotonic()
        async with endpoint.stream(CHAT, encode(chat_request()), says_something) as stream:
            events = [event async for event in stream]

        request = fake.requests[0]
        assert text_in(events) == "Hello there."
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        assert events[-1]["usage"]["completion_tokens"] == 3
        assert request.body == chat_request()
        assert request.headers["authorization"] == f"Bearer {API_KEY}"
        assert request.headers["content-type"] == "application/json"
        assert (stream.tries, stream.queued_seconds < 1) == (1, True)
        assert before <= stream.sent_at <= request.received_at
        assert not request.was_left


async def test_completions_are_streamed_too() -> None:
    async with talking(says("Hello")) as (_, endpoint):
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 10, "stream": True}
        async with endpoint.stream("/completions", encode(body), bool) as stream:
            texts = [event["choices"][0]["text"] async for event in stream]

    assert "".join(texts) == "Hello"


async def test_a_connection_is_used_again() -> None:
    async with talking(says("one"), says("two"), refuses(400), says("three")) as (fake, endpoint):
        await events_of(endpoint)
        await events_of(endpoint)
        await failure_of(endpoint)
        await events_of(endpoint)

        assert fake.num_connections == 1


async def test_compressed_events_come_as_they_are_said() -> None:
    go_on = asyncio.Event()
    async with talking([*says("one"), *waits(go_on), *says("two")]) as (fake, endpoint):
        fake.compresses = True
        async with endpoint.stream(CHAT, encode(chat_request()), says_something) as stream:
            events = [await anext(stream), await anext(stream)]
            assert text_in(events) == "one"
            go_on.set()
            events += [event async for event in stream]

    assert text_in(events) == "onetwo"


@pytest.mark.parametrize("finish_reason", ["stop", None])
async def test_a_body_that_ends_without_done_ends_the_stream(finish_reason: str | None) -> None:
    async with talking([*says("Hi"), *ends(finish_reason, says_done=False)]) as (_, endpoint):
        events = await events_of(endpoint)

    assert text_in(events) == "Hi"
    assert ("finish_reason" in events[-1]["choices"][0]) == (finish_reason is not None)


async def test_the_latest_limits_are_shown() -> None:
    async with talking(says("Hi")) as (_, endpoint):
        await events_of(endpoint)

        assert endpoint.rate_limits["x-ratelimit-remaining-tokens-minute"] == "59000"


# --- Trying again --------------------------------------------------------------------------------


TRANSIENT = [408, 409, 425, 429, 500, 502, 503, 504, 507, 520, 522, 524, 529]
LASTING = [400, 401, 402, 403, 404, 413, 422, 501, 505]


@pytest.mark.parametrize("status", TRANSIENT)
async def test_what_may_pass_is_tried_again(status: int) -> None:
    async with talking(refuses(status, retry_after_ms="1"), says("Hi")) as (fake, endpoint):
        async with endpoint.stream(CHAT, encode(chat_request()), says_something) as stream:
            text = text_in([event async for event in stream])

        assert (text, stream.tries) == ("Hi", 2)
        assert stream.sent_at > fake.requests[0].received_at
        assert (endpoint.requests, endpoint.retries, endpoint.failures) == (2, 1, 0)
        assert endpoint.rate_limited == (status == 429)


@pytest.mark.parametrize("status", LASTING)
async def test_what_stays_as_it_is_is_not_tried_again(status: int) -> None:
    async with talking(refuses(status, retry_after_ms="1"), says("Hi")) as (_, endpoint):
        error = await failure_of(endpoint)

        assert (error.status, error.is_transient) == (status, False)
        is_its_own_fault = status in (400, 413, 422)
        assert (endpoint.requests, endpoint.failures) == (1, not is_its_own_fault)


@pytest.mark.parametrize("status", [429, 503])
async def test_milliseconds_go_before_seconds(status: int) -> None:
    soon = refuses(status, retry_after_ms="20", retry_after="3600")
    async with talking(soon, says("Hi")) as (fake, endpoint):
        await events_of(endpoint)

        first, second = fake.requests
        assert second.received_at - first.received_at >= 0.02


async def test_a_date_says_when_to_try_again() -> None:
    in_an_hour = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    async with talking(refuses(503, retry_after=in_an_hour)) as (_, endpoint):
        error = await failure_of(endpoint)

    assert error.retry_after_seconds == pytest.approx(3600, abs=30)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    "told",
    [
        {"retry_after": "0"},
        {"retry_after_ms": "0"},
        {"retry_after": "Wed, 21 Oct 2015 07:28:00 GMT"},
    ],
)
async def test_who_may_try_again_at_once_waits_longer_each_time(
    status: int, told: dict[str, Any]
) -> None:
    async with talking(patience_seconds=0.2, backoff_seconds=0.05) as (fake, endpoint):
        fake.answer = lambda body: refuses(status, **told)
        error = await asyncio.wait_for(failure_of(endpoint), DEADLINE_SECONDS)

        assert error.retry_after_seconds is None
        assert endpoint.requests < 20


@pytest.mark.parametrize("status", [429, 503])
async def test_a_wait_beyond_patience_fails_at_once(status: int) -> None:
    async with talking(refuses(status, retry_after="3600"), says("Hi")) as (_, endpoint):
        error = await asyncio.wait_for(failure_of(endpoint), DEADLINE_SECONDS)

        assert (error.status, error.is_transient) == (status, True)
        assert error.retry_after_seconds == 3600
        assert endpoint.requests == 1


async def test_patience_comes_to_an_end() -> None:
    async with talking(patience_seconds=0.2, backoff_seconds=0.02) as (fake, endpoint):
        fake.answer = lambda body: refuses(503, "still not")
        error = await asyncio.wait_for(failure_of(endpoint), DEADLINE_SECONDS)

        assert str(error) == "the endpoint answered 503: still not"
        assert endpoint.requests > 1


async def test_no_credit_is_not_waited_for() -> None:
    poor = refuses(429, code="insufficient_quota")
    async with talking(poor, says("Hi")) as (_, endpoint):
        error = await failure_of(endpoint)
        assert (error.code, error.is_transient) == ("rate_limit_exceeded", False)

        assert text_in(await events_of(endpoint)) == "Hi", "nobody else is held"


@pytest.mark.parametrize(
    ("remaining", "reset"),
    [
        ("x-ratelimit-remaining-tokens-minute", "0.05"),
        ("x-ratelimit-remaining-tokens", "50ms"),
    ],
)
async def test_a_limit_that_is_used_up_closes_the_gate_until_its_reset(
    remaining: str, reset: str
) -> None:
    async with talking(says("one"), says("two")) as (fake, endpoint):
        fake.headers = {remaining: "0", remaining.replace("remaining", "reset"): reset}
        await events_of(endpoint)
        fake.headers = {}
        await events_of(endpoint)

        first, second = fake.requests
        assert second.received_at - first.received_at >= 0.05


async def test_a_limit_that_is_reset_too_late_fails_without_a_request() -> None:
    async with talking(says("one"), says("two")) as (fake, endpoint):
        fake.headers = {"x-ratelimit-remaining-requests-day": "0"}
        await events_of(endpoint)
        error = await failure_of(endpoint)

        assert (error.code, error.status, error.is_transient) == ("rate_limit_exceeded", None, True)
        assert endpoint.requests == 1


async def test_an_error_as_first_event_is_tried_again() -> None:
    async with talking(breaks(503), breaks(429), says("Hi")) as (_, endpoint):
        assert text_in(await events_of(endpoint)) == "Hi"

        assert (endpoint.requests, endpoint.rate_limited) == (3, 1)


@pytest.mark.parametrize("status", TRANSIENT)
async def test_what_may_pass_may_be_said_in_the_stream(status: int) -> None:
    async with talking(breaks(status), says("Hi")) as (_, endpoint):
        assert text_in(await events_of(endpoint)) == "Hi"


@pytest.mark.parametrize("status", LASTING)
async def test_what_stays_as_it_is_may_be_said_in_the_stream(status: int) -> None:
    async with talking(breaks(status), says("Hi")) as (_, endpoint):
        error = await failure_of(endpoint)

        assert (error.status, error.is_transient) == (status, False)
        assert endpoint.requests == 1


SILENT: dict[str, Script] = {
    "a role": deltas({"role": "assistant", "content": ""}),
    "white space": says("\n\n"),
    "nothing": [],
}


@pytest.mark.parametrize(
    "fault", [breaks(503), breaks(429), cut(), ends(None), ends(None, says_done=False)]
)
@pytest.mark.parametrize("beginning", SILENT.values(), ids=SILENT)
async def test_what_breaks_before_it_says_anything_is_tried_again(
    beginning: Script, fault: Script
) -> None:
    faults = [[*beginning, *fault]] * 5
    async with talking(*faults, [*beginning, *says("Hi")]) as (_, endpoint):
        async with endpoint.stream(CHAT, encode(chat_request()), says_something) as stream:
            text = text_in([event async for event in stream])

        assert (text.strip(), stream.tries) == ("Hi", 6), "nothing of the others is given"
        assert endpoint.rate_limited == (5 if fault == breaks(429) else 0)
        assert endpoint.failures == 0


@pytest.mark.parametrize("beginning", SILENT.values(), ids=SILENT)
async def test_what_never_says_anything_fails_when_patience_ends(beginning: Script) -> None:
    async with talking(patience_seconds=0.2, backoff_seconds=0.02) as (fake, endpoint):
        fake.answer = lambda body: [*beginning, *breaks(429, "busy")]
        error = await asyncio.wait_for(failure_of(endpoint), DEADLINE_SECONDS)

        assert (error.status, endpoint.failures) == (429, 1)
        assert endpoint.requests > 1


async def test_a_refusal_as_first_event_is_not_tried_again() -> None:
    async with talking(breaks(400, "bad"), says("Hi")) as (_, endpoint):
        error = await failure_of(endpoint)

    assert (error.code, error.status) == ("invalid_prompt", 400)


async def test_a_later_error_is_not_tried_again() -> None:
    async with talking([*says("Hi"), *breaks(503, "lost")], says("Hi")) as (_, endpoint):
        said = list[JsonObject]()
        with pytest.raises(EndpointError, match="lost") as failure:
            await read_into(said, endpoint)

        assert text_in(said) == "Hi"
        assert (failure.value.status, failure.value.is_transient) == (503, True)
        assert (endpoint.requests, endpoint.failures) == (1, 1)


@pytest.mark.parametrize("code", ["context_length_exceeded", "invalid_request_error"])
async def test_what_is_refused_for_what_it_asks_is_no_failure_of_the_endpoint(code: str) -> None:
    refusal = breaks(400, code=code)
    async with talking(refusal, [*says("Hi"), *refusal]) as (_, endpoint):
        for _ in range(2):
            await failure_of(endpoint)

        assert endpoint.failures == 0


async def test_what_its_reader_cannot_read_is_a_failure_of_the_endpoint() -> None:
    async with talking(says("Hi")) as (_, endpoint):
        with pytest.raises(EngineError):
            async with endpoint.stream(CHAT, encode(chat_request()), says_something):
                raise EngineError("it makes no sense")

        assert endpoint.failures == 1


async def test_what_its_reader_leaves_is_no_failure_of_the_endpoint() -> None:
    async with talking([*says("Hi"), *silence()], silence()) as (fake, endpoint):
        async with endpoint.stream(CHAT, encode(chat_request()), says_something) as stream:
            await anext(stream)
        await fake.received()
        reading = asyncio.ensure_future(events_of(endpoint))
        await fake.received()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

        assert endpoint.failures == 0


async def test_a_connection_cut_before_the_answer_is_tried_again() -> None:
    async with talking(cut(), says("Hi")) as (_, endpoint):
        assert text_in(await events_of(endpoint)) == "Hi"


async def test_a_stream_that_is_cut_fails() -> None:
    async with talking([*says("Hi"), *cut()]) as (_, endpoint):
        error = await failure_of(endpoint)

        assert (error.code, error.status, error.is_transient) == ("server_error", None, True)
        assert (endpoint.requests, endpoint.failures) == (1, 1)


async def test_a_stream_that_falls_silent_fails() -> None:
    async with talking([*says("Hi"), *silence()], read_timeout_seconds=0.1) as (fake, endpoint):
        error = await failure_of(endpoint)
        await asyncio.wait_for(fake.requests[0].over.wait(), DEADLINE_SECONDS)

        assert str(error) == "the endpoint said nothing for 0.1 seconds"
        assert (error.status, error.is_transient) == (None, True)


async def test_silence_before_the_first_event_is_tried_again() -> None:
    async with talking(silence(), says("Hi"), read_timeout_seconds=0.1) as (_, endpoint):
        assert text_in(await events_of(endpoint)) == "Hi"


async def test_an_endpoint_that_comes_back_is_found() -> None:
    async with fake_endpoint() as gone:
        pass
    async with client_of(gone) as endpoint, asyncio.TaskGroup() as group:
        asking = group.create_task(events_of(endpoint))
        while not endpoint.retries:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.002)
        async with fake_endpoint(says("Hi"), port=gone.port):
            assert text_in(await asking) == "Hi"


async def test_an_endpoint_that_is_not_there_fails() -> None:
    async with fake_endpoint() as gone:
        pass
    async with client_of(gone, patience_seconds=0.05) as endpoint:
        error = await failure_of(endpoint)

    assert (str(error), error.status) == ("the endpoint could not be reached", None)
    assert error.is_transient


# --- Leaving -------------------------------------------------------------------------------------


async def test_leaving_early_closes_the_stream() -> None:
    async with talking([*says("Hi"), *silence()], says("Hi")) as (fake, endpoint):
        async with endpoint.stream(CHAT, encode(chat_request()), says_something) as stream:
            await anext(stream)
        await asyncio.wait_for(fake.requests[0].over.wait(), DEADLINE_SECONDS)

        assert fake.requests[0].was_left
        assert text_in(await events_of(endpoint)) == "Hi", "the next has a connection of its own"


async def ask(endpoint: Endpoint) -> None:
    """Read an answer."""
    await events_of(endpoint)


@pytest.mark.parametrize(
    ("script", "prefill_rate"),
    [
        pytest.param(says("Hi"), 0.01, id="before the answer"),
        pytest.param(silence(), None, id="before the first event"),
        pytest.param([*says("Hi"), *silence()], None, id="while it streams"),
        pytest.param(refuses(503, retry_after="4"), None, id="before it is tried again"),
        pytest.param(refuses(429, retry_after_ms="200"), None, id="while the gate is closed"),
    ],
)
async def test_cancelled_it_leaves_nothing(script: Script, prefill_rate: float | None) -> None:
    async with talking(script, says("Hi"), max_concurrent=1) as (fake, endpoint):
        fake.prefill_tokens_per_second = prefill_rate
        asking = asyncio.ensure_future(ask(endpoint))
        request = await fake.received()
        await asyncio.sleep(0.02)  # on to where it waits

        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(request.over.wait(), DEADLINE_SECONDS)
        fake.prefill_tokens_per_second = None

        assert endpoint.gate.in_flight == 0
        assert text_in(await asyncio.wait_for(events_of(endpoint), DEADLINE_SECONDS)) == "Hi"


async def test_cancelled_in_the_queue_it_leaves_nothing() -> None:
    go_on = asyncio.Event()
    async with talking([*waits(go_on), *says("one")], says("three"), max_concurrent=1) as (
        fake,
        endpoint,
    ):
        first = asyncio.ensure_future(ask(endpoint))
        second = asyncio.ensure_future(ask(endpoint))
        await fake.received()
        assert endpoint.gate.num_waiting == 1

        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        await first

        assert text_in(await events_of(endpoint)) == "three"
        assert len(fake.requests) == 2


# --- Errors --------------------------------------------------------------------------------------

FLAT = encode({"message": "too bad", "type": "x", "param": "", "code": "y"})
NESTED = encode({"error": {"message": "too bad", "type": "x", "param": None, "code": None}})
DETAIL = encode({"detail": "too bad"})
DETAIL_LIST = encode({"detail": [{"loc": ["body"], "msg": "too bad"}]})
PAGE = b"<html><head><title>too &lt; bad</title></head><body>%b</body></html>" % (5000 * b"x")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (FLAT, "too bad"),
        (NESTED, "too bad"),
        (DETAIL, "too bad"),
        (DETAIL_LIST, "[{'loc': ['body'], 'msg': 'too bad'}]"),
        (b" too\n bad\n", "too bad"),
        (PAGE, "too < bad"),
        (b"<html>no title</html>", None),
        (b"", None),
        (b"\xff\xfe", "��"),
        (b"[1]", "[1]"),
    ],
)
async def test_every_form_of_an_error_is_read(body: bytes, message: str | None) -> None:
    async with talking(refuses(400, body=body)) as (_, endpoint):
        error = await failure_of(endpoint)

    says_no = "the endpoint does not take the request"
    assert str(error) == (says_no if message is None else f"{says_no}: {message}")


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        (refuses(401, "bad key abc"), "server_error", "the endpoint refused the API key"),
        (refuses(403, "bad key abc"), "server_error", "the endpoint refused the API key"),
        (refuses(402, "pay"), "server_error", "the endpoint's account has no credit"),
        (
            refuses(404, "No such model"),
            "server_error",
            "the endpoint does not know the model or the path: No such model",
        ),
        (
            refuses(429, "slower", retry_after="999"),
            "rate_limit_exceeded",
            "the endpoint's rate limit is reached: slower (try again in 999s)",
        ),
        (
            refuses(422, "bad"),
            "invalid_prompt",
            "the endpoint does not take the request: bad",
        ),
        (
            refuses(400, "Sorry", code="context_length_exceeded"),
            "context_length_exceeded",
            "the endpoint's context window is too short: Sorry",
        ),
        (
            refuses(400, "This model's maximum context length is 8 tokens."),
            "context_length_exceeded",
            "the endpoint's context window is too short: "
            "This model's maximum context length is 8 tokens.",
        ),
        (
            refuses(413, "Please reduce the length of the messages."),
            "context_length_exceeded",
            "the endpoint's context window is too short: Please reduce the length of the messages.",
        ),
        (refuses(418, "tea"), "server_error", "the endpoint answered 418: tea"),
        (refuses(302, "", location="/"), "server_error", "the endpoint answered 302"),
    ],
)
async def test_every_status_has_its_meaning(script: Script, code: str, message: str) -> None:
    async with talking(script) as (_, endpoint):
        error = await failure_of(endpoint)

    assert (error.code, str(error)) == (code, message)


@pytest.mark.parametrize(
    ("event", "status", "code"),
    [
        (
            {"error": {"message": "m", "type": "BadRequestError", "code": 400}},
            400,
            "invalid_prompt",
        ),
        ({"error": {"message": "m", "code": "rate_limit_exceeded"}}, 429, "rate_limit_exceeded"),
        ({"error": {"message": "m", "type": "overloaded_error"}}, 503, "server_error"),
        ({"error": {"message": "m"}, "status_code": 401}, 401, "server_error"),
        ({"message": "m", "type": "a", "status_code": 429}, 429, "rate_limit_exceeded"),
        ({"error": "m"}, 500, "server_error"),
        (
            {"object": "error", "message": "m", "type": "BadRequestError", "code": 400},
            400,
            "invalid_prompt",
        ),
        ({"message": "m", "type": "overloaded_error"}, 503, "server_error"),
        ({"message": "m", "code": "rate_limit_exceeded"}, 429, "rate_limit_exceeded"),
        (
            {"message": "m", "type": "invalid_request_error", "code": "context_length_exceeded"},
            400,
            "context_length_exceeded",
        ),
    ],
)
async def test_every_form_of_an_error_in_a_stream_is_read(
    event: JsonObject, status: int, code: str
) -> None:
    async with talking([*says("Hi"), Chunk(event)]) as (_, endpoint):
        error = await failure_of(endpoint)

    assert (error.status, error.code) == (status, code)
    assert str(error).endswith("refused the API key" if status == 401 else ": m")


@pytest.mark.parametrize("event", [{"message": "m", "code": 1, "choices": []}, {"message": "m"}])
async def test_what_is_not_quite_an_error_is_none(event: JsonObject) -> None:
    async with (
        talking([Chunk(event), *says("Hi")]) as (_, endpoint),
        endpoint.stream(CHAT, encode(chat_request()), bool) as stream,
    ):
        assert await anext(stream) == event


async def test_an_answer_that_is_no_event_stream_fails() -> None:
    page = refuses(200, body=b"<html>Log in</html>", content_type="text/html")
    async with talking(page) as (_, endpoint):
        error = await failure_of(endpoint)

    assert str(error) == "the endpoint answered with text/html, not with an event stream"


async def test_an_event_that_is_no_json_fails() -> None:
    stream = refuses(200, body=b"data: {nope\n\n", content_type="text/event-stream")
    async with talking(stream) as (_, endpoint):
        error = await failure_of(endpoint)

    assert str(error) == "the endpoint sent an event that is no JSON object"
    assert not error.is_transient


async def test_a_message_is_shortened() -> None:
    async with talking(refuses(400, 1000 * "long ")) as (_, endpoint):
        error = await failure_of(endpoint)

    assert len(str(error)) < MAX_MESSAGE_CHARACTERS + 60


async def test_nobody_is_told_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = "gateway-key-123"
    tells = f"Bearer {API_KEY} and {gateway}"
    scripts = [
        refuses(503, tells, retry_after_ms="1"),
        breaks(500, tells),
        refuses(400, tells),
    ]
    async with talking(*scripts, headers={"x-gateway-key": gateway}) as (fake, endpoint):
        error = await failure_of(endpoint)
        assert fake.requests[0].headers["x-gateway-key"] == gateway

    assert "Bearer *** and ***" in str(error)
    own = [record for record in caplog.records if record.name.startswith(("sampler", "http"))]
    settings = EndpointSettings("http://x", API_KEY, headers={"x-gateway-key": gateway})
    for told in [repr(settings), *(record.getMessage() for record in own)]:
        assert API_KEY not in told
        assert gateway not in told
    assert own


@pytest.mark.parametrize("key", ["a\nb", "a\x00", "é"])
def test_a_key_that_no_header_can_have_is_refused_unsaid(key: str) -> None:
    with pytest.raises(ValueError) as refusal:
        EndpointSettings("http://x", key)

    assert key not in str(refusal.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"base_url": "ftp://x"},
        {"base_url": "x"},
        {"base_url": "http://x:port"},
        {"base_url": "http://x:65536"},
        {"omitted": frozenset({""})},
        {"headers": {"x-gateway-key": "é"}},
        {"max_concurrent": 0},
        {"read_timeout_seconds": 0},
        {"omitted": frozenset({"seed", "messages"})},
        {"max_tokens_member": "model"},
        {"max_tokens_member": ""},
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(EndpointSettingsError) as refusal:
        EndpointSettings(**({"base_url": "http://x"} | settings))

    assert [refusal.value.member] == list(settings)


# --- Models --------------------------------------------------------------------------------------


async def test_models_are_listed() -> None:
    async with talking() as (fake, endpoint):
        fake.models = ["a", "b"]
        models = await endpoint.list_models()

    assert models is not None
    assert [model["id"] for model in models] == ["a", "b"]


async def test_an_endpoint_without_a_list_of_models_has_none() -> None:
    async with talking() as (fake, endpoint):
        fake.has_models_route = False

        assert await endpoint.list_models() is None
        assert endpoint.failures == 0


@pytest.mark.parametrize("status", [401, 403])
async def test_a_check_fails_where_the_key_is_refused(status: int) -> None:
    async with talking() as (fake, endpoint):
        fake.models_refusal = refuses(status)
        with pytest.raises(EndpointError, match="refused the API key"):
            await endpoint.check_model(MODEL)


async def test_a_check_warns_of_an_account_without_credit_which_may_get_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with talking() as (fake, endpoint):
        fake.models_refusal = refuses(402)
        await endpoint.check_model(MODEL)

    assert "the endpoint's account has no credit: runs may fail" in caplog.text


async def test_the_list_of_models_needs_the_key() -> None:
    async with talking(api_key="wrong") as (_, endpoint):
        with pytest.raises(EndpointError, match="refused the API key"):
            await endpoint.list_models()
