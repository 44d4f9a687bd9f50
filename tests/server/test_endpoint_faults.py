"""Faults of the endpoint where runs are sampled: who is told what, and how runs go on.

Four things hold for each: the client is told the right thing, other runs go on, the connection can
be used, and the conversation can be gone on with from where it was before, with nothing lost and
nothing said twice. Where the fault passes in time, it is as if there had been none.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from protocol.codec import decode_object
from sampler.engines.endpoint.client import Endpoint
from server.settings import Settings
from tests.sampler.engines.fake_endpoint import (
    MODEL,
    Chunk,
    FakeEndpoint,
    HttpError,
    Script,
    Step,
    breaks,
    calls,
    cut,
    deltas,
    ends,
    fake_endpoint,
    refuses,
    says,
    silence,
    thinks,
    waits,
)
from tests.server.http_client import post
from tests.server.running import (
    BODY,
    TERMINAL,
    Client,
    Event,
    Running,
    calls_in,
    output,
    parse_sse,
    serving,
    text_in,
    until,
)
from tests.server.test_chat_engine import (
    BOTH,
    CALL,
    OSLO,
    QUESTION,
    RECENT,
    SUN,
    chat_engine,
    messages,
    said,
    served,
    told,
    types,
)

HASTY: dict[str, Any] = {"patience_seconds": 0.05}
"""The endpoint's client is not patient here, or each fault would have to last."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, and what becomes of it."""

    script: Script = ()
    """What the endpoint does."""
    code: str = "server_error"
    """What the response fails with."""
    status: int = 500
    """What is answered over HTTP."""
    says: str = ""
    """What the message has in it."""
    text: str = ""
    """What the client has read before."""
    endpoint: dict[str, Any] = field(default_factory=dict)
    """Attributes that the endpoint has meanwhile."""
    may_pass: bool = False
    """Whether the same request may be sent again."""
    silence_seconds: float = 20.0
    """How long nothing is said before the endpoint is given up."""
    seconds: float = 0.0
    """How long nothing else is let through then."""


FAULTS = {
    "wrong key": Fault(says="refused the API key", endpoint={"api_key": "another"}),
    "unknown model": Fault(says="does not know the model", endpoint={"models": ["another"]}),
    "no tools": Fault(
        refuses(400, "tools are not supported"), "invalid_prompt", 400, "tools are not supported"
    ),
    "no tools, says FastAPI": Fault(
        refuses(422, body=b'{"detail":[{"loc":["tools"],"msg":"extra"}]}'), "invalid_prompt", 400
    ),
    "too long": Fault(
        refuses(400, "too long", code="context_length_exceeded"), "context_length_exceeded", 400
    ),
    "no credit": Fault(refuses(402), says="no credit"),
    "overloaded": Fault(refuses(503, "overloaded"), says="overloaded", may_pass=True),
    "rate limit": Fault(
        refuses(429, "slow down", retry_after_ms="60"),
        "rate_limit_exceeded",
        429,
        "slow down",
        seconds=0.06,
    ),
    "cut before the answer": Fault(cut(), may_pass=True),
    "silence": Fault(silence(), says="said nothing", silence_seconds=0.4),
    "overloaded in the stream": Fault(breaks(503, "busy"), says="busy", may_pass=True),
    "cut before a word": Fault([*deltas({}), *cut()], says="broke", may_pass=True),
    "cut in a text": Fault([*says("It is"), *cut()], says="broke", text="It is"),
    "cut in a thought": Fault([*thinks("Hm."), *cut()], says="broke"),
    "cut in a call": Fault([*calls(("get_weather", OSLO)), *cut()], says="broke"),
    "overloaded in a text": Fault(
        [*says("It is"), *breaks(503, "busy")], says="busy", text="It is"
    ),
    "rate limit in a text": Fault(
        [*says("It is"), *breaks(429, "slow down")],
        "rate_limit_exceeded",
        429,
        "slow down",
        "It is",
    ),
    "silence in a text": Fault(
        [*says("It is"), *silence()], says="said nothing", text="It is", silence_seconds=0.4
    ),
    "words and an unknown reason at once": Fault(
        [
            Chunk({"choices": [{"delta": {"content": "It is"}, "finish_reason": "STOP"}]}),
            *ends(None),
        ],
        says="ended with 'STOP'",
    ),
    "no reason to finish": Fault(
        [*says("It is"), *ends(None)], says="without a reason", text="It is"
    ),
    "no end at all": Fault(
        [*says("It is"), *ends(None, says_done=False)], says="without a reason", text="It is"
    ),
    "the endpoint's own end": Fault(
        [*says("It is"), *ends("error")], says="ended with 'error'", text="It is"
    ),
    "the endpoint's own end in a call": Fault(
        [*calls(("get_weather", OSLO[:9])), *ends("abort")], says="ended with 'abort'"
    ),
    "the endpoint's own end before a word": Fault(
        ends("insufficient_system_resource"), says="insufficient_system_resource", may_pass=True
    ),
    "a nameless error": Fault(
        [Chunk({"object": "error", "message": "no tools", "type": "BadRequest", "code": 400})],
        "invalid_prompt",
        400,
        "no tools",
    ),
    "a page": Fault(
        [HttpError(200, b"<html>", {"content-type": "text/html"})], says="not with an event stream"
    ),
    "a page that says no": Fault(
        [HttpError(502, b"<title>Bad gateway</title>")], says="Bad gateway", may_pass=True
    ),
    "no chunk": Fault([Chunk({"what": 1})], says="expected a chunk"),
    "a call of nothing": Fault(
        deltas({"tool_calls": [{"index": 0, "function": {"arguments": OSLO}}]}), says="never named"
    ),
}
ALL = [
    pytest.param(fault, id=name, marks=[pytest.mark.slow] if fault.silence_seconds < 1 else [])
    for name, fault in FAULTS.items()
]
SOME = {
    name: FAULTS[name]
    for name in ("wrong key", "too long", "rate limit", "cut before the answer", "cut in a text")
}


@asynccontextmanager
async def failing(fake: FakeEndpoint, fault: Fault) -> AsyncIterator[None]:
    """Have ``fake`` fail meanwhile, and let the fault pass then."""
    before = {name: getattr(fake, name) for name in fault.endpoint}
    for name, value in fault.endpoint.items():
        setattr(fake, name, value)
    if not fault.endpoint:
        fake.answer = lambda _: fault.script
    num_requests = len(fake.requests)
    yield
    for name, value in before.items():
        setattr(fake, name, value)
    fake.answer = None
    assert fault.may_pass or len(fake.requests) == num_requests + 1
    await asyncio.sleep(fault.seconds)


class Murmur(Sequence[Step]):
    """A script that says nothing, but not in silence, until it is let go on."""

    def __init__(self, held: asyncio.Event) -> None:
        self._held = held

    def __len__(self) -> int:
        return 1  # at least

    def __getitem__(self, index: Any) -> Any:
        return next(iter(self))

    def __iter__(self) -> Iterator[Step]:
        yield from says("Rain")
        while not self._held.is_set():
            yield from [*deltas({}), *waits(0.03)]
        yield from says(" and sun.")


class Other:
    """Another run, in the midst of its text."""

    def __init__(self, client: Client, held: asyncio.Event) -> None:
        self._client = client
        self._held = held

    async def rest(self) -> Event:
        """Return the response to which the run goes on."""
        self._held.set()
        events = await self._client.segment()
        response: Event = events[-1]["response"]
        return response


@asynccontextmanager
async def beside_another(
    fault: Fault, *scripts: Script, settings: Settings | None = None
) -> AsyncIterator[tuple[Running, FakeEndpoint, Other]]:
    """Serve ``scripts`` to those who come after another run."""
    held = asyncio.Event()
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(fake_endpoint(Murmur(held), *scripts))
        engine = chat_engine(fake, **HASTY, read_timeout_seconds=fault.silence_seconds)
        server = await stack.enter_async_context(serving(engine=engine, settings=settings))
        client = await stack.enter_async_context(server.connect())
        await client.send("response.create", **BODY)
        await client.up_to("response.output_text.delta")
        yield server, fake, Other(client, held)


async def bring(client: Client, dialect: str, response: Event, call: Event) -> list[Event]:
    """Bring the output of ``call`` in the way of the dialect."""
    match dialect:
        case "append":
            return await client.append(output(call))
        case "inject":
            await client.send("response.inject", response_id=response["id"], input=[output(call)])
            return await client.segment()
        case _:
            return await client.follow(response, output(call), store=True)


async def failed_stream(server: Running, **members: Any) -> list[Event]:
    """Return the events of a stream that fails. The last but one is none of the response."""
    async with server.http() as http:
        answer = await http.post("/v1/responses", json=BODY | {"stream": True} | members)
    events = [decode_object(data) for event, data in parse_sse(answer.text) if event]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def error_of(events: list[Event]) -> Event:
    """Return why the response failed, which it did once, at its end."""
    assert [kind for kind in types(events) if kind in TERMINAL] == ["response.failed"]
    response = events[-1]["response"]
    assert response["status"] == "failed"
    error: Event = response["error"]
    return error


def check_error(error: Event, fault: Fault) -> None:
    assert error["code"] == fault.code
    assert fault.says in error["message"]


# --- It lasts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ALL)
async def test_when_a_run_goes_on_it_fails_and_can_be_gone_on_with_from_before(
    fault: Fault,
) -> None:
    await check_resumption("append", fault)


@pytest.mark.parametrize("fault", SOME.values(), ids=SOME)
@pytest.mark.parametrize("dialect", ["inject", "chained"])
async def test_so_it_does_in_other_dialects(dialect: str, fault: Fault) -> None:
    await check_resumption(dialect, fault)


async def check_resumption(dialect: str, fault: Fault) -> None:
    async with (
        beside_another(fault, CALL) as (server, fake, other),
        server.connect(dialect) as client,
    ):
        await client.send("response.create", **BODY)
        (call,) = await client.calls(1)
        response = client.streams[-1][0]["response"]
        if dialect == "inject":
            await until(lambda: "suspended" in {run.state.value for run in server.any_engine.runs})
        else:
            await client.segment()
        async with failing(fake, fault):
            failed = await bring(client, dialect, response, call)
        fake.say(SUN, SUN)
        last = await client.follow(response, output(call))
        afresh = await client.create(input="Hello?")
        rest = await other.rest()

        check_error(error_of(failed), fault)
        assert text_in(failed[-1]["response"]) == fault.text
        assert text_in(last[-1]["response"]) == "It is sunny."
        assert messages(fake, -2) == [QUESTION, said(call, thoughts="Hm. Oslo."), told(call)]
        assert afresh[-1]["type"] == "response.completed"
        assert text_in(rest) == "Rain and sun."


@pytest.mark.parametrize("fault", ALL)
async def test_at_the_start_of_a_run_it_fails_and_can_be_asked_for_again(fault: Fault) -> None:
    async with beside_another(fault) as (server, fake, other), server.connect() as client:
        async with failing(fake, fault):
            failed = await client.create()
        fake.say(SUN)
        last = await client.create()
        rest = await other.rest()

        check_error(error_of(failed), fault)
        assert text_in(last[-1]["response"]) == "It is sunny."
        assert messages(fake) == [QUESTION]
        assert text_in(rest) == "Rain and sun."
        await until(lambda: not server.any_engine.runs)


@pytest.mark.parametrize("fault", SOME.values(), ids=SOME)
async def test_over_http_it_is_an_error_and_the_last_response_can_be_followed(
    fault: Fault,
) -> None:
    async with beside_another(fault, CALL, settings=RECENT) as (server, fake, other):
        first = await post(server, input=[QUESTION])
        call = first["output"][-1]
        asked: Event = {"previous_response_id": first["id"], "input": [output(call)]}
        async with server.http() as http, failing(fake, fault):
            answer = await http.post("/v1/responses", json=BODY | asked)
        fake.say(SUN)
        last = await post(server, **asked)
        rest = await other.rest()

        assert answer.status_code == fault.status
        check_error(answer.json()["error"], fault)
        assert text_in(last) == "It is sunny."
        assert messages(fake) == [QUESTION, said(call, thoughts="Hm. Oslo."), told(call)]
        assert text_in(rest) == "Rain and sun."


@pytest.mark.parametrize("fault", SOME.values(), ids=SOME)
async def test_in_an_event_stream_it_is_an_error_and_its_end(fault: Fault) -> None:
    async with served(**HASTY) as (server, fake):
        async with failing(fake, fault):
            *_, error, failed = await failed_stream(server)

        assert error["type"] == "error"
        check_error(error, fault)
        assert failed["type"] == "response.failed"
        check_error(failed["response"]["error"], fault)


@pytest.mark.parametrize("fault", SOME.values(), ids=SOME)
async def test_in_the_background_the_response_fails_and_the_one_before_can_be_followed(
    fault: Fault,
) -> None:
    async with served(CALL, **HASTY) as (server, fake), server.http() as http:
        first = await post(server, input=[QUESTION])
        call = first["output"][-1]
        asked: Event = {"previous_response_id": first["id"], "input": [output(call)]}
        async with failing(fake, fault):
            *_, event = await failed_stream(server, background=True, **asked)
        failed = (await http.get(f"/v1/responses/{event['response']['id']}")).json()
        fake.say(SUN)
        last = await post(server, **asked)

        check_error(failed["error"], fault)
        assert text_in(last) == "It is sunny."
        assert messages(fake) == [QUESTION, said(call, thoughts="Hm. Oslo."), told(call)]


async def test_a_conversation_that_cannot_be_compacted_is_told_why() -> None:
    fault = FAULTS["rate limit"]
    async with served(**HASTY) as (server, fake), server.http() as http:
        asked = {"model": MODEL, "input": [QUESTION, {"role": "assistant", "content": "Yes."}]}
        async with failing(fake, fault):
            answer = await http.post("/v1/responses/compact", json=asked)

        assert answer.status_code == 429
        check_error(answer.json()["error"], fault)


async def test_a_response_whose_conversation_cannot_be_compacted_fails() -> None:
    fault = FAULTS["cut in a text"]
    asked = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
    talk = [QUESTION, {"role": "assistant", "content": "Rain. " * 1200}, QUESTION]
    async with served(**HASTY) as (server, fake), server.connect() as client:
        async with failing(fake, fault):
            failed = await client.create(input=talk, **asked)
        fake.say(says("It rained."), SUN)
        last = await client.create(input=talk, **asked)

        check_error(error_of(failed), fault)
        assert failed[-1]["response"]["output"] == []
        assert text_in(last[-1]["response"]) == "It is sunny."


async def test_other_lanes_of_a_connection_go_on() -> None:
    fault = FAULTS["cut in a text"]
    async with served([*calls(("get_weather", OSLO))], **HASTY) as (server, fake):
        async with server.connect("append") as client:
            (call,) = calls_in(await client.create(stream_id="a"))
            async with failing(fake, fault):
                failed = await client.create(stream_id="b")
            fake.say(SUN)
            last = await client.append(output(call), stream_id="a")

        check_error(error_of(failed), fault)
        assert failed[-1]["stream_id"] == "b"
        assert text_in(last[-1]["response"]) == "It is sunny."


async def test_outputs_that_come_after_a_failure_are_given_back() -> None:
    async with served(BOTH, **HASTY) as (server, fake), server.connect("inject") as client:
        await client.send("response.create", **BODY | {"store": False})
        one, two = await client.calls(2)
        response = client.streams[0][0]["response"]
        async with failing(fake, FAULTS["cut in a text"]):
            await client.send(
                "response.inject", response_id=response["id"], input=[output(one), output(two)]
            )
            await client.segment()
        await client.send("response.inject", response_id=response["id"], input=[output(two)])
        (refused,) = await client.up_to("response.inject.failed")
        fake.say(SUN)
        last = await client.follow(response, output(one), *refused["input"])

        assert refused["error"]["code"] == "response_already_completed"
        assert text_in(last[-1]["response"]) == "It is sunny."
        assert messages(fake) == [QUESTION, said(one, two), told(one), told(two)]


async def test_what_was_appended_to_a_run_that_failed_is_said_again_and_no_more() -> None:
    """With two appends before the fault, both are to come again; a wish in words as well."""
    both = calls(("get_weather", OSLO), ("get_weather", "{}"))
    user: Event = {"role": "user", "content": "Be quick."}
    async with served(CALL, both, **HASTY) as (server, fake):
        async with server.connect("append") as client:
            first = await client.create(store=False)
            response, (call,) = first[-1]["response"], calls_in(first)
            one, two = calls_in(await client.append(output(call)))
            await client.send("response.append", input=[output(two, "rain"), user])
            async with failing(fake, FAULTS["cut in a text"]):
                await client.append(output(one, "sun"))
            fake.say(SUN)
            await client.send("response.append", input=[output(one), output(two)])
            lost = await client.error()
            last = await client.follow(response, output(one, "sun"), output(two, "rain"), user)

        assert lost["error"]["code"] == "no_suspended_response"
        assert text_in(last[-1]["response"]) == "It is sunny."
        assert messages(fake) == [
            QUESTION,
            said(call, thoughts="Hm. Oslo."),
            told(call),
            said(one, two),
            told(one, "sun"),
            told(two, "rain"),
            user,
        ]


async def test_a_chain_that_is_not_stored_is_said_again_whole() -> None:
    """A response that is followed by a failure is forgotten (WebSocket mode, eviction)."""
    async with served(CALL, **HASTY) as (server, fake), server.connect() as client:
        first = (await client.create(store=False))[-1]["response"]
        call = first["output"][-1]
        async with failing(fake, FAULTS["cut in a text"]):
            await client.follow(first, output(call))
        fake.say(SUN)
        await client.send("response.create", **BODY | {"previous_response_id": first["id"]})
        lost = await client.error()
        last = await client.create(input=[QUESTION, *first["output"], output(call)])

        assert lost["error"]["code"] == "previous_response_not_found"
        assert text_in(last[-1]["response"]) == "It is sunny."
        assert messages(fake) == [QUESTION, said(call, thoughts="Hm. Oslo."), told(call)]


async def test_a_run_that_failed_is_followed_from_the_store_as_well() -> None:
    async with served(CALL, **HASTY) as (server, fake):
        async with server.connect("append") as client:
            first = await client.create()
            response, (call,) = first[-1]["response"], calls_in(first)
            async with failing(fake, FAULTS["cut in a text"]):
                await client.append(output(call))
        fake.say(SUN)
        last = await post(server, previous_response_id=response["id"], input=[output(call)])
        async with server.http() as http:
            path = f"/v1/responses/{last['id']}/input_items"
            listed = (await http.get(path, params={"order": "asc"})).json()["data"]

        assert text_in(last) == "It is sunny."
        assert messages(fake) == [QUESTION, said(call, thoughts="Hm. Oslo."), told(call)]
        assert [item["type"] for item in listed].count("function_call_output") == 1


# --- It passes -----------------------------------------------------------------------------------

PASSING = {
    "overloaded": refuses(503),
    "rate limit": refuses(429, retry_after_ms="20"),
    "cut before the answer": cut(),
    "a page that says no": [HttpError(502, b"<html>")],
    "overloaded in the stream": breaks(503),
    "rate limit in the stream": breaks(429),
    "overloaded before a word": [*deltas({}), *breaks(503)],
    "cut before a word": [*deltas({}), *cut()],
    "the endpoint's own end before a word": [*deltas({}), *ends("insufficient_system_resource")],
    "a proxy's error": refuses(524),
    "no end before a word": [*deltas({}), *ends(None)],
    "cut after white space": [*says("\n\n"), *cut()],
    "nothing at all": ends(None),
}


@pytest.mark.parametrize("script", PASSING.values(), ids=PASSING)
async def test_a_fault_that_passes_takes_time_and_nothing_else(script: Script) -> None:
    async with served(script, CALL, script, script, SUN) as (server, fake):
        async with server.connect("append") as client:
            (call,) = calls_in(await client.create())
            last = await client.append(output(call))

        assert text_in(last[-1]["response"]) == "It is sunny."
        assert len(fake.requests) == 5
        assert messages(fake) == [QUESTION, said(call, thoughts="Hm. Oslo."), told(call)]
        usage = last[-1]["response"]["usage"]
        assert usage["input_tokens"] == fake.requests[-1].prompt_tokens


DONE = Chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
MANY = 4
"""More than a client of OpenAI's would try."""


@pytest.mark.parametrize("status", [429, 503])
async def test_what_breaks_before_a_word_again_and_again_is_waited_for(status: int) -> None:
    script = [*deltas({"role": "assistant", "content": ""}), *breaks(status)]
    async with served(*[script] * MANY, SUN) as (server, fake):
        response = await post(server)

        (turn,) = response["suspend:run"]["turns"]
        assert text_in(response) == "It is sunny."
        assert turn["endpoint"]["tries"] == len(fake.requests) == MANY + 1


def num_failures(server: Running) -> int:
    """Return how many failures of its own the endpoint is held to have had."""
    endpoint: Endpoint = server.any_engine._endpoint  # type: ignore[attr-defined]
    return endpoint.failures


AFTER = {
    "cut": cut(),
    "an error": breaks(503),
    "no [DONE]": ends(None, says_done=False),
    "silence": silence(),
}


@pytest.mark.parametrize("script", AFTER.values(), ids=AFTER)
async def test_what_goes_wrong_when_all_was_said_is_no_fault(script: Script) -> None:
    async with served([*says("It rains."), DONE, *script], read_timeout_seconds=0.1) as (server, _):
        response = await post(server)

        assert text_in(response) == "It rains."
        assert response["status"] == "completed"
        assert num_failures(server) == 0


async def test_an_answer_that_ends_without_a_reason_to_is_a_failure_of_the_endpoint() -> None:
    async with served([*says("It rains."), *ends(None)]) as (server, _), server.http() as http:
        answer = await http.post("/v1/responses", json=BODY)

        assert answer.status_code == 500
        assert num_failures(server) == 1


@asynccontextmanager
async def down_and_up(
    *scripts: Script, **settings: Any
) -> AsyncIterator[tuple[Running, FakeEndpoint, AsyncExitStack]]:
    """Serve an endpoint that can be taken down, by closing the stack."""
    async with AsyncExitStack() as stack, AsyncExitStack() as endpoint:
        fake = await endpoint.enter_async_context(fake_endpoint(*scripts))
        engine = chat_engine(fake, **settings)
        server = await stack.enter_async_context(serving(engine=engine))
        yield server, fake, endpoint


async def test_an_endpoint_that_is_down_while_a_run_is_suspended_is_not_noticed() -> None:
    async with down_and_up(CALL) as (server, fake, endpoint), server.connect("append") as client:
        (call,) = calls_in(await client.create())
        await endpoint.aclose()
        async with fake_endpoint(SUN, port=fake.port) as again:
            last = await client.append(output(call))

        assert text_in(last[-1]["response"]) == "It is sunny."
        assert len(again.requests) == 1


async def test_an_endpoint_that_comes_up_in_time_is_waited_for() -> None:
    async with down_and_up(CALL) as (server, fake, endpoint), server.connect("append") as client:
        (call,) = calls_in(await client.create())
        await endpoint.aclose()
        await client.send("response.append", input=[output(call)])
        await client.until_taken()
        async with fake_endpoint(SUN, port=fake.port) as again:
            last = await client.segment()

        assert text_in(last[-1]["response"]) == "It is sunny."
        assert len(again.requests) == 1


async def test_an_endpoint_that_stays_down_fails_the_run_and_serves_it_when_it_is_up() -> None:
    async with (
        down_and_up(CALL, **HASTY) as (server, fake, endpoint),
        server.connect("append") as client,
    ):
        first = await client.create(store=False)
        (call,) = calls_in(first)
        await endpoint.aclose()
        failed = await client.append(output(call))
        refused = await client.create(store=False)
        async with fake_endpoint(SUN, port=fake.port) as again:
            last = await client.follow(first[-1]["response"], output(call))

        assert error_of(failed)["code"] == error_of(refused)["code"] == "server_error"
        assert "could not be reached" in error_of(failed)["message"]
        assert text_in(last[-1]["response"]) == "It is sunny."
        assert len(again.requests) == 1


async def test_a_connection_that_was_closed_meanwhile_is_no_fault() -> None:
    async with served(CALL, SUN) as (server, fake), server.connect("append") as client:
        (call,) = calls_in(await client.create())
        fake.disconnect_all()
        last = await client.append(output(call))

        assert text_in(last[-1]["response"]) == "It is sunny."
        assert last[-1]["response"]["suspend:run"]["turns"][0]["endpoint"]["tries"] <= 2


# --- Everybody at once ---------------------------------------------------------------------------

NUM_RUNS = 50
LIMIT = 5
"""How many requests the endpoint answers at a time."""


@pytest.mark.slow
async def test_fifty_runs_in_a_storm_of_429_all_finish_in_order_without_a_herd() -> None:
    def answer(body: Event) -> Script:
        if fake.in_flight > LIMIT:
            return refuses(429, retry_after_ms="20")
        has_called = body["messages"][-1]["role"] == "tool"
        return [*waits(0.002), *(SUN if has_called else calls(("get_weather", OSLO)))]

    async def hold(number: int) -> str:
        async with server.connect("append") as client:
            (call,) = calls_in(await client.create(input=f"run {number}"))
            last = await client.append(output(call))
        return text_in(last[-1]["response"])

    async with served(patience_seconds=30.0) as (server, fake):
        fake.answer = answer
        texts = await asyncio.gather(*map(hold, range(NUM_RUNS)))

        answered = [request for request in fake.requests if request.status == 200]
        first_come = dict.fromkeys(who(request.body) for request in fake.requests)
        first_served = dict.fromkeys(who(request.body) for request in answered)
        places = {name: place for place, name in enumerate(first_come)}
        assert texts == ["It is sunny."] * NUM_RUNS
        assert len(answered) == 2 * NUM_RUNS
        assert len(fake.requests) < 3 * len(answered)
        assert (
            max(abs(places[name] - place) for place, name in enumerate(first_served)) <= 3 * LIMIT
        )


def who(body: Event) -> str:
    """Return which run a request is of."""
    words: str = body["messages"][0]["content"]
    return words
