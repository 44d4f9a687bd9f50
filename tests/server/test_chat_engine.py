"""Runs at a chat-completions endpoint, in all dialects: what a client sees, and what is sent."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, _AsyncGeneratorContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import decode_object, encode
from sampler.engine_error import EngineError
from sampler.engines.chat.dialect import CEREBRAS
from sampler.engines.chat.engine import ChatEngine
from sampler.engines.endpoint.client import Begins, Endpoint, EndpointSettings, EventStream
from sampler.run import RunState
from server.ledger import LEDGER_FILE
from server.settings import Settings
from tests.sampler.engines.fake_endpoint import (
    MODEL,
    Chunk,
    FakeEndpoint,
    FakeRequest,
    Script,
    Step,
    calls,
    deltas,
    ends,
    fake_endpoint,
    refuses,
    says,
    silence,
    thinks,
    waits,
)
from tests.server.designs import SUSPENDED, Design, calls_of, hold
from tests.server.http_client import post, post_streamed
from tests.server.running import (
    BODY,
    DEADLINE_SECONDS,
    TOOL,
    Event,
    Running,
    calls_in,
    output,
    serving,
    text_in,
    until,
)

OSLO, ROME = '{"city":"Oslo"}', '{"city": "Rome"}'
CALL = [*thinks("Hm. Oslo."), *calls(("get_weather", OSLO))]
BOTH = calls(("get_weather", OSLO), ("get_weather", ROME))
SUN = says("It is sunny.")
QUESTION: Event = {"role": "user", "content": BODY["input"]}

RECENT = Settings(recent_responses=8)


class SpyingEndpoint(Endpoint):
    """An endpoint's client that keeps what it sent, byte for byte."""

    def __init__(self, settings: EndpointSettings) -> None:
        super().__init__(settings)
        self.sent: list[bytes] = []

    def stream(
        self, path: str, body: bytes, begins: Begins
    ) -> _AsyncGeneratorContextManager[EventStream, None]:
        """Send it, and keep it."""
        self.sent.append(body)
        return super().stream(path, body, begins)


def chat_engine(fake: FakeEndpoint, **settings: Any) -> ChatEngine:
    """Return an engine that samples at ``fake``, and is quick to try again."""
    settings = {"backoff_seconds": 0.01, "patience_seconds": 5.0} | settings
    endpoint = SpyingEndpoint(EndpointSettings(fake.url, fake.api_key, **settings))
    return ChatEngine(MODEL, endpoint, CEREBRAS, cache_seconds=300)


@asynccontextmanager
async def served(
    *scripts: Script, settings: Settings | None = None, **endpoint_settings: Any
) -> AsyncIterator[tuple[Running, FakeEndpoint]]:
    """Serve what ``scripts`` say, one to each segment."""
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(fake_endpoint(*scripts))
        engine = chat_engine(fake, **endpoint_settings)
        server = await stack.enter_async_context(serving(engine=engine, settings=settings))
        yield server, fake


def sent(server: Running) -> list[bytes]:
    """Return the bodies that were sent, in order."""
    endpoint = server.any_engine._endpoint  # type: ignore[attr-defined]
    assert isinstance(endpoint, SpyingEndpoint)
    return endpoint.sent


def messages(fake: FakeEndpoint, index: int = -1) -> list[Event]:
    """Return the messages of a request."""
    told: list[Event] = fake.requests[index].body["messages"]
    return told


def said(*made: Event, text: str | None = None, thoughts: str | None = None) -> Event:
    """Return the message in which the assistant made some calls, as it goes back."""
    message: Event = {"role": "assistant", "content": text}
    if thoughts is not None:
        message["reasoning"] = thoughts
    functions = [
        {
            "id": call["call_id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in made
    ]
    return message | ({"tool_calls": functions} if functions else {})


def told(call: Event, text: str = "sunny") -> Event:
    """Return the message that brings the output of a call."""
    return {"role": "tool", "tool_call_id": call["call_id"], "content": text}


def turns_in(responses: Sequence[Event]) -> list[Event]:
    return [turn for response in responses for turn in response["suspend:run"]["turns"]]


def types(events: Sequence[Event]) -> list[str]:
    return [event["type"] for event in events]


async def left(request: FakeRequest) -> bool:
    """Wait until nothing more is said to ``request``, and tell whether it was left."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        await request.over.wait()
    return request.was_left


# --- All dialects --------------------------------------------------------------------------------


async def test_a_run_is_suspended_and_resumed_by_an_append() -> None:
    async with served(CALL, SUN) as (server, fake):
        async with server.connect("append") as client:
            first = await client.create()
            (call,) = calls_in(first)
            last = await client.append(output(call, "sunny"))

        assert call["arguments"] == OSLO
        assert first[-1]["type"] == "response.done"
        assert text_in(last[-1]["response"]) == "It is sunny."
        assert messages(fake, 1) == [
            *messages(fake, 0),
            said(call, thoughts="Hm. Oslo."),
            told(call),
        ]


@pytest.mark.parametrize("design", Design)
async def test_in_each_dialect_the_same_is_sent_and_only_at_the_end(design: Design) -> None:
    ids = ("one", "two", "three")
    again = [*says("And Rome."), *calls(("get_weather", OSLO), ("get_weather", ROME), ids=ids[1:])]
    first = [*thinks("Hm. Oslo."), *calls(("get_weather", OSLO), ids=ids)]
    async with served(first, again, SUN, settings=RECENT) as (server, fake):
        responses = await hold(server, design)

        requests = [request.body for request in fake.requests]
        one, two, three = (
            {"call_id": call_id, "name": "get_weather", "arguments": arguments}
            for call_id, arguments in zip(ids, (OSLO, OSLO, ROME), strict=True)
        )
        assert text_in(responses[-1]).endswith("It is sunny.")
        assert [body["messages"] for body in requests] == [
            history := [QUESTION],
            history := [*history, said(one, thoughts="Hm. Oslo."), told(one, "dry")],
            [*history, said(two, three, text="And Rome."), told(two, "dry"), told(three, "dry")],
        ]
        # Not only do they mean the same: the endpoint's cache finds the same bytes.
        assert [body.removesuffix(b"]}") for body in sent(server)] == sorted(
            (body.removesuffix(b"]}") for body in sent(server)), key=len
        )
        (one_key,) = {body["prompt_cache_key"] for body in requests}
        assert one_key
        assert all(body["max_completion_tokens"] == 8192 for body in requests)
        assert all(body["clear_thinking"] is False for body in requests)
        assert [body["stream_options"] for body in requests] == [{"include_usage": True}] * 3


@pytest.mark.parametrize("design", Design)
async def test_usage_and_times_are_what_the_endpoint_tells(design: Design) -> None:
    long: Event = {"instructions": "Be brief. " * 200}
    async with served(CALL, BOTH, SUN, settings=RECENT) as (server, fake):
        responses = await hold(server, design, **long)

        turns = turns_in(responses)
        counts = [
            (request.prompt_tokens, request.cached_tokens, request.completion_tokens)
            for request in fake.requests
        ]
        assert [
            (turn["input_tokens"], turn["cached_tokens"], turn["output_tokens"]) for turn in turns
        ] == counts
        assert [cached > 0 for _, cached, _ in counts] == [False, True, True]
        for turn in turns:
            assert turn["endpoint"]["tries"] == 1
            assert turn["endpoint"]["admission"] >= 0
            assert turn["endpoint"]["time_info"]["total_time"] >= 0
            assert turn["endpoint"].keys() == {"tries", "admission", "time_info"}
        usages = [response["usage"] for response in responses]
        assert sum(usage["input_tokens"] for usage in usages) == sum(n for n, _, _ in counts)
        assert sum(usage["output_tokens"] for usage in usages) == sum(n for _, _, n in counts)
        thought = [usage["output_tokens_details"]["reasoning_tokens"] for usage in usages]
        assert sum(thought) == fake.requests[0].reasoning_tokens > 0
        if design in SUSPENDED:
            report = responses[-1]["suspend:run"]
            assert report["segments"] == 3
            assert report["tokens_forwarded"] == sum(
                read - cached + written for read, cached, written in counts
            )


STOP = Chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
"""An end without any usage."""


async def test_usage_that_the_endpoint_does_not_tell_is_estimated_and_said_to_be() -> None:
    script = [*thinks("Hm."), *says("It is sunny."), STOP, *ends(None)]
    async with served(script) as (server, fake):
        response = await post(server, tools=[])

        (turn,) = turns_in([response])
        usage = response["usage"]
        assert turn["endpoint"]["usage_is_estimated"] is True
        assert usage["output_tokens"] == turn["output_tokens"] == 4
        assert usage["output_tokens_details"]["reasoning_tokens"] == 1
        assert usage["input_tokens"] == pytest.approx(fake.requests[0].prompt_tokens, abs=2)


@pytest.mark.parametrize(
    ("counted", "input_tokens", "output_tokens"),
    [
        ({"prompt_tokens": 777}, 777, 4),
        ({"prompt_tokens": 777, "completion_tokens": 0}, 777, 4),
        ({"prompt_tokens": 0, "completion_tokens": 99}, None, 99),
    ],
)
async def test_of_usage_only_that_is_estimated_which_was_not_counted(
    counted: Event, input_tokens: int | None, output_tokens: int
) -> None:
    usage = Chunk({"choices": [], "usage": counted})
    async with served([*says("It is sunny out."), STOP, usage, *ends(None)]) as (server, _):
        response = await post(server, tools=[])

        (turn,) = turns_in([response])
        assert turn["endpoint"]["usage_is_estimated"] is True
        assert response["usage"]["output_tokens"] == output_tokens
        assert input_tokens in (None, response["usage"]["input_tokens"])


async def test_what_was_said_before_a_client_wants_no_more_is_estimated() -> None:
    async with served([*says("It is sunny."), *silence()]) as (server, _), server.http() as http:
        response = (await http.post("/v1/responses", json=BODY | {"background": True})).json()
        (run,) = server.any_engine.runs
        await until(lambda: run.state is RunState.DECODING)
        await http.post(f"/v1/responses/{response['id']}/cancel")
        await server.until_free()

        (segment,) = run.segments
        assert segment.endpoint is not None
        assert segment.endpoint["usage_is_estimated"] is True
        assert 0 < segment.output_tokens <= 3


async def test_a_run_over_http_goes_on_from_what_is_stored() -> None:
    async with served(CALL, SUN) as (server, fake):
        first = await post(server, input=[QUESTION])
        (call,) = calls_of(first)
        last = await post(server, previous_response_id=first["id"], input=[output(call)])

        assert text_in(last) == "It is sunny."
        assert messages(fake) == [QUESTION, said(call, thoughts="Hm. Oslo."), told(call)]


async def test_a_stream_over_http_is_told_what_a_socket_is() -> None:
    async with served(CALL) as (server, _):
        events = await post_streamed(server)

        (call,) = calls_in(events)
        assert call["arguments"] == OSLO
        assert events[-1]["type"] == "response.completed"
        assert "response.reasoning_text.delta" in types(events)


async def test_a_run_in_the_background_goes_on_from_what_is_stored() -> None:
    async with served(CALL, SUN) as (server, fake):
        first = await in_background(server)
        (call,) = calls_of(first)
        last = await in_background(server, previous_response_id=first["id"], input=[output(call)])

        assert first["status"] == last["status"] == "completed"
        assert text_in(last) == "It is sunny."
        assert messages(fake) == [QUESTION, said(call, thoughts="Hm. Oslo."), told(call)]


async def test_a_run_in_the_background_can_be_followed_while_it_is_sampled() -> None:
    async with served(CALL) as (server, _):
        events = await post_streamed(server, background=True)

        assert types(events)[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert calls_in(events)[0]["arguments"] == OSLO
        assert events[-1]["type"] == "response.completed"


async def in_background(server: Running, **members: Any) -> Event:
    """Return a response that was asked for in the background, once it is over."""
    async with server.http() as http, asyncio.timeout(DEADLINE_SECONDS):
        response: Event = await post(server, background=True, **members)
        while response["status"] in ("queued", "in_progress"):
            response = (await http.get(f"/v1/responses/{response['id']}")).json()
        return response


# --- Calls ---------------------------------------------------------------------------------------


async def test_parallel_calls_are_answered_in_any_order_and_in_several_appends() -> None:
    async with served(BOTH, SUN) as (server, fake), server.connect("append") as client:
        oslo, rome = calls_in(await client.create())
        await client.send("response.append", input=[output(rome, "rain")])
        await client.until_taken()
        assert len(fake.requests) == 1
        last = await client.append(output(oslo, "sun"), {"role": "user", "content": "Well?"})

        assert text_in(last[-1]["response"]) == "It is sunny."
        assert messages(fake) == [
            QUESTION,
            said(oslo, rome),
            told(oslo, "sun"),
            told(rome, "rain"),
            {"role": "user", "content": "Well?"},
        ]


async def test_an_append_that_cannot_be_leaves_the_run_suspended() -> None:
    async with served(CALL, SUN) as (server, fake), server.connect("append") as client:
        (call,) = calls_in(await client.create())
        await client.send("response.append", input=[output("call_unknown")])
        refused = await client.error()
        last = await client.append(output(call))

        assert refused["error"]["code"] == "unknown_call_id"
        assert text_in(last[-1]["response"]) == "It is sunny."
        assert len(fake.requests) == 2


async def test_free_form_tools_are_functions_there_and_free_form_here() -> None:
    shell: Event = {
        "type": "custom",
        "name": "shell",
        "format": {"type": "grammar", "syntax": "regex", "definition": "ls .*"},
    }
    script = calls(("shell", '{"input": "ls \\"a b\\""}'))
    async with served(script, SUN) as (server, fake), server.connect("append") as client:
        (call,) = calls_in(await client.create(tools=[shell]))
        await client.append(output(call, "a b"))

        (declared,) = fake.requests[0].body["tools"]
        (_, sampled, brought) = messages(fake)
        assert call["type"] == "custom_tool_call"
        assert call["input"] == 'ls "a b"'
        assert "ls .*" in declared["function"]["description"]
        arguments = decode_object(sampled["tool_calls"][0]["function"]["arguments"])
        assert arguments == {"input": 'ls "a b"'}
        assert brought == told(call, "a b")


async def test_arguments_that_are_no_json_are_the_clients_to_report() -> None:
    async with served(calls(("get_weather", '{"city": Oslo')), SUN) as (server, fake):
        async with server.connect("append") as client:
            (call,) = calls_in(await client.create())
            last = await client.append(output(call, "error: no JSON"))

        assert call["arguments"] == '{"city": Oslo'
        assert messages(fake)[1] == said(call)
        assert text_in(last[-1]["response"]) == "It is sunny."


async def test_a_call_of_a_tool_that_nobody_declared_is_the_clients_to_report() -> None:
    async with served(calls(("get_time", "{}")), SUN) as (server, fake):
        async with server.connect("append") as client:
            (call,) = calls_in(await client.create())
            await client.append(output(call, "error: no such tool"))

        assert call["name"] == "get_time"
        assert messages(fake)[1] == said(call)


async def test_an_id_that_comes_again_is_another_calls() -> None:
    again = calls(("get_weather", OSLO), ids=["one"])
    async with served(again, again, SUN) as (server, fake), server.connect("append") as client:
        (first,) = calls_in(await client.create())
        (second,) = calls_in(await client.append(output(first)))
        await client.append(output(second))

        assert first["call_id"] == "one" != second["call_id"]
        assert messages(fake)[1:] == [said(first), told(first), said(second), told(second)]


NEWS: Event = {"type": "function", "name": "get_news", "parameters": {"type": "object"}}
BY_NAME: Event = {"type": "function", "name": "get_news"}
CHOICES = {
    "auto": ("auto", "auto", ["get_weather", "get_news"]),
    "none": ("none", "none", ["get_weather", "get_news"]),
    "required": ("required", "required", ["get_weather", "get_news"]),
    "named": (
        BY_NAME,
        {"type": "function", "function": {"name": "get_news"}},
        ["get_weather", "get_news"],
    ),
    "allowed": (
        {"type": "allowed_tools", "mode": "auto", "tools": [BY_NAME]},
        "auto",
        ["get_news"],
    ),
    "one allowed and required": (
        {"type": "allowed_tools", "mode": "required", "tools": [BY_NAME]},
        {"type": "function", "function": {"name": "get_news"}},
        ["get_weather", "get_news"],
    ),
}


@pytest.mark.parametrize(("choice", "sent_choice", "names"), CHOICES.values(), ids=CHOICES)
async def test_the_choice_among_tools_is_passed_on(
    choice: Any, sent_choice: Any, names: list[str]
) -> None:
    async with served(SUN) as (server, fake):
        await post(server, tools=[TOOL, NEWS], tool_choice=choice)

        body = fake.requests[0].body
        assert body["tool_choice"] == sent_choice
        assert [tool["function"]["name"] for tool in body["tools"]] == names


async def test_a_forced_choice_binds_once() -> None:
    async with served(CALL, SUN) as (server, fake), server.connect("append") as client:
        (call,) = calls_in(await client.create(tool_choice="required", parallel_tool_calls=False))
        await client.append(output(call))

        forced, free = (request.body for request in fake.requests)
        assert forced["tool_choice"]["function"]["name"] == "get_weather"
        assert free["tool_choice"] == "auto"
        assert forced["parallel_tool_calls"] is free["parallel_tool_calls"] is False


# --- What is asked for ---------------------------------------------------------------------------


async def test_a_format_is_passed_on_whenever_the_turn_may_end_in_text() -> None:
    schema = {"type": "object", "properties": {"dry": {"type": "boolean"}}, "required": ["dry"]}
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    async with served(CALL, says('{"dry": true}')) as (server, fake):
        async with server.connect("append") as client:
            (call,) = calls_in(await client.create(text=text))
            last = await client.append(output(call))

        named = {"name": "answer", "schema": schema, "strict": True}
        formats = [request.body["response_format"] for request in fake.requests]
        assert formats == [{"type": "json_schema", "json_schema": named}] * 2
        assert text_in(last[-1]["response"]) == '{"dry": true}'


async def test_how_to_sample_is_passed_on_to_each_segment() -> None:
    asked: Event = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "max_output_tokens": 100,
        "reasoning": {"effort": "high"},
    }
    async with served(CALL, SUN) as (server, fake), server.connect("append") as client:
        (call,) = calls_in(await client.create(**asked))
        await client.append(output(call))

        expected = asked | {"max_completion_tokens": 100, "reasoning_effort": "high"}
        del expected["max_output_tokens"], expected["reasoning"]
        for request in fake.requests:
            assert {name: request.body.get(name) for name in expected} == expected


async def test_what_the_endpoint_does_not_take_is_renamed_or_left_out() -> None:
    omitted = frozenset({"seed", "stream_options", "prompt_cache_key", "clear_thinking"})
    async with served(SUN, omitted=omitted, max_tokens_member="max_tokens") as (server, fake):
        await post(server, max_output_tokens=100)

        body = fake.requests[0].body
        assert body["max_tokens"] == 100
        assert not body.keys() & {*omitted, "max_completion_tokens"}


async def test_logprobs_are_passed_on_both_ways() -> None:
    def said_token(text: str) -> Step:
        top = [{"token": text, "logprob": -0.5, "bytes": list(text.encode())}]
        logprobs = {"content": [top[0] | {"top_logprobs": top}]}
        choice = {"index": 0, "delta": {"content": text}, "logprobs": logprobs}
        return Chunk({"choices": [choice]})

    include = ["message.output_text.logprobs"]
    async with served([said_token("It"), said_token(" rains.")]) as (server, fake):
        response = await post(server, include=include, top_logprobs=1, tools=[])

        (part,) = response["output"][0]["content"]
        assert part["text"] == "It rains."
        assert [entry["token"] for entry in part["logprobs"]] == ["It", " rains."]
        assert part["logprobs"][0]["top_logprobs"][0]["logprob"] == -0.5
        assert fake.requests[0].body["logprobs"] is True
        assert fake.requests[0].body["top_logprobs"] == 1


async def test_thoughts_are_a_summary_where_one_is_asked_for_and_come_back_sealed() -> None:
    asked: Event = {
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    async with served(CALL, SUN) as (server, fake):
        first = await post(server, input=[QUESTION], **asked)
        thoughts, call = first["output"]
        sealed = thoughts | {"summary": []}
        last = await post(server, input=[QUESTION, sealed, call, output(call)], **asked)

        assert thoughts["summary"][0]["text"] == "Hm. Oslo."
        assert text_in(last) == "It is sunny."
        assert messages(fake) == [QUESTION, said(call, thoughts="Hm. Oslo."), told(call)]


async def test_input_tokens_are_not_ours_to_count() -> None:
    async with served() as (server, _), server.http() as http:
        answer = await http.post("/v1/responses/input_tokens", json=BODY)

        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_parameter"


async def test_what_is_to_be_truncated_is_sent_whole_as_nobody_here_can_tell_its_length() -> None:
    async with served(SUN) as (server, fake):
        await post(server, input="Rain. " * 30_000, truncation="auto")

        assert len(messages(fake)[0]["content"]) == 6 * 30_000


# --- How a turn ends -----------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["append", "inject", "chained"])
async def test_a_budget_ends_the_response_early_and_the_chain_goes_on(dialect: str) -> None:
    async with served(says("It rains in Oslo."), SUN) as (server, fake):
        async with server.connect(dialect) as client:
            cut = (await client.create(max_output_tokens=2))[-1]["response"]
            last = (await client.follow(cut, {"role": "user", "content": "Go on."}))[-1]

        assert cut["status"] == "incomplete"
        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
        assert cut["usage"]["output_tokens"] == 2
        assert text_in(last["response"]) == "It is sunny."
        assert messages(fake)[1] == said(text="It rains")


async def test_a_call_that_is_cut_short_was_never_made() -> None:
    async with served(calls(("get_weather", OSLO)), SUN) as (server, fake):
        async with server.connect("append") as client:
            cut = (await client.create(max_output_tokens=2))[-1]["response"]
            await client.follow(cut, {"role": "user", "content": "Go on."})

        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in cut["output"]] == ["incomplete"]
        assert messages(fake) == [QUESTION, {"role": "user", "content": "Go on."}]


@pytest.mark.parametrize("dialect", ["append", "inject", "chained"])
async def test_what_the_endpoints_filter_ends_is_incomplete(dialect: str) -> None:
    async with served([*says("It is"), *ends("content_filter")]) as (server, _):
        async with server.connect(dialect) as client:
            response = (await client.create())[-1]["response"]

        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "content_filter"}
        assert text_in(response) == "It is"


async def test_a_turn_that_says_nothing_is_an_empty_message() -> None:
    async with served([*deltas({"content": ""})], SUN) as (server, fake):
        first = await post(server, input=[QUESTION])
        more = {"role": "user", "content": "Hello?"}
        await post(server, input=[more], previous_response_id=first["id"])

        assert first["status"] == "completed"
        assert text_in(first) == ""
        assert messages(fake) == [QUESTION, more]


async def test_steered_in_its_thoughts_a_response_ends_and_is_followed() -> None:
    held = asyncio.Event()
    endless = [*thinks("Hm. Oslo."), *waits(held), *says("It"), *silence()]
    async with served(endless, SUN) as (server, fake), server.connect("chained") as client:
        await client.send("response.create", **BODY)
        began = await client.up_to("response.reasoning_text.delta")
        parent = began[0]["response"]["id"]
        await client.send("response.steer", previous_response_id=parent, input="In Rome, I mean.")
        await client.until_taken()
        held.set()
        first, last = await client.segment(), await client.segment()

        assert "response.steer.accepted" in types(first)
        assert first[-1]["response"]["incomplete_details"] == {"reason": "steered"}
        assert text_in(last[-1]["response"]) == "It is sunny."
        assert await left(fake.requests[0])
        assert messages(fake)[1:] == [
            {"role": "assistant", "content": "", "reasoning": "Hm. Oslo."},
            {"role": "user", "content": "In Rome, I mean."},
        ]


async def test_what_is_steered_while_calls_wait_follows_their_outputs() -> None:
    async with served(CALL, SUN) as (server, fake), server.connect("append") as client:
        first = await client.create()
        (call,) = calls_in(first)
        response_id = first[0]["response"]["id"]
        await client.send("response.steer", previous_response_id=response_id, input="Be quick.")
        await client.up_to("response.steer.pending")
        await client.append(output(call))

        assert messages(fake)[-2:] == [told(call), {"role": "user", "content": "Be quick."}]


# --- Nobody wants it any more --------------------------------------------------------------------


async def test_cancelled_in_the_background_it_closes_the_upstream_stream() -> None:
    async with served([*BOTH, *silence()]) as (server, fake), server.http() as http:
        response = (await http.post("/v1/responses", json=BODY | {"background": True})).json()
        request = await fake.received()
        (run,) = server.any_engine.runs
        await until(lambda: run.state is RunState.DECODING)
        cancelled = (await http.post(f"/v1/responses/{response['id']}/cancel")).json()

        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][-1]["status"] == "incomplete"
        assert await left(request)


async def test_cancelled_while_the_endpoint_takes_nobody_it_asks_no_more() -> None:
    closed = refuses(429, retry_after="3")
    async with served(closed) as (server, fake), server.http() as http:
        response = (await http.post("/v1/responses", json=BODY | {"background": True})).json()
        await fake.received()
        cancelled = (await http.post(f"/v1/responses/{response['id']}/cancel")).json()

        assert cancelled["status"] == "cancelled"
        assert len(fake.requests) == 1


@pytest.mark.parametrize("dialect", ["append", "inject", "chained"])
async def test_a_client_that_goes_away_closes_the_upstream_stream(dialect: str) -> None:
    async with served([*says("It rains."), *silence()]) as (server, fake):
        async with server.connect(dialect) as client:
            await client.send("response.create", **BODY)
            await client.up_to("response.output_text.delta")

        assert await left(fake.requests[0])
        await server.until_free()


@pytest.mark.parametrize("streams", [False, True])
async def test_over_http_a_client_that_goes_away_closes_the_upstream_stream(streams: bool) -> None:
    async with served(silence()) as (server, fake):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = encode(BODY | {"stream": streams})
        head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        request = await fake.received()
        writer.close()
        await writer.wait_closed()

        assert await left(request)
        await server.until_free()


@pytest.mark.parametrize("dialect", ["append", "inject"])
async def test_a_client_that_goes_away_while_it_is_waited_for_leaves_nothing(dialect: str) -> None:
    async with served(CALL) as (server, fake):
        async with server.connect(dialect) as client:
            await client.send("response.create", **BODY)
            await client.calls(1)
            await until(
                lambda: [run.state for run in server.any_engine.runs] == [RunState.SUSPENDED]
            )
        await server.until_free()

        assert not fake.requests[0].was_left
        assert fake.in_flight == 0


async def test_a_create_gives_a_suspended_run_up() -> None:
    async with served(CALL, SUN) as (server, fake), server.connect("append") as client:
        await client.create()
        last = await client.create(input="And in Rome?")

        assert text_in(last[-1]["response"]) == "It is sunny."
        assert messages(fake) == [{"role": "user", "content": "And in Rome?"}]


@pytest.mark.slow
async def test_a_client_that_reads_nothing_slows_its_own_stream_alone() -> None:
    much = deltas(*[{"content": "a" * 20_000}] * 2000)
    async with served([*much, *silence()], SUN) as (server, fake):
        async with server.connect() as slow, server.connect() as quick:
            slow.socket.transport.pause_reading()
            await slow.send("response.create", input="Hi", user="a" * 6_000_000)
            request = await fake.received()
            last = await quick.create()
            num_said = -1
            while request.completion_tokens > num_said:
                num_said = request.completion_tokens
                await asyncio.sleep(0.1)
            slow.abort()

        assert text_in(last[-1]["response"]) == "It is sunny."
        assert 0 < num_said < len(much)
        assert await left(request)


@pytest.mark.slow
async def test_a_client_that_reads_nothing_for_too_long_loses_its_run() -> None:
    settings = Settings(send_timeout_seconds=0.05)
    async with served([*says("Rain."), *silence()], settings=settings) as (server, fake):
        async with server.connect() as slow:
            slow.socket.transport.pause_reading()
            await slow.send("response.create", input="Hi", user="a" * 6_000_000)
            request = await fake.received()
            assert await left(request)
            slow.abort()
        await server.until_free()


# --- What else there is --------------------------------------------------------------------------


async def test_a_warm_up_asks_nothing_and_can_be_followed() -> None:
    async with served(SUN) as (server, fake), server.connect() as client:
        warm = (await client.create(generate=False, input=[], store=False))[-1]["response"]
        assert fake.requests == []
        last = (await client.follow(warm, QUESTION))[-1]["response"]

        assert text_in(last) == "It is sunny."
        assert messages(fake) == [QUESTION]


COMPACTS: Event = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
TALK = [QUESTION, {"role": "assistant", "content": "Rain. " * 1200}, QUESTION]


async def test_a_long_conversation_is_compacted_before_it_is_answered() -> None:
    async with served(says("It rained a lot."), SUN) as (server, fake):
        response = await post(server, input=TALK, **COMPACTS)

        summary, answer = fake.requests
        usage = response["usage"]
        assert [item["type"] for item in response["output"]] == ["compaction", "message"]
        assert text_in(response) == "It is sunny."
        assert summary.body["tool_choice"] == "none"
        assert messages(fake, 0)[: len(TALK)] == TALK
        assert "It rained a lot." in messages(fake)[1]["content"]
        assert messages(fake)[0] == messages(fake)[-1] == QUESTION
        assert usage["input_tokens"] == summary.prompt_tokens + answer.prompt_tokens


async def test_a_conversation_is_compacted_on_demand() -> None:
    async with served(says("It rained a lot."), SUN) as (server, fake), server.http() as http:
        asked = {"model": MODEL, "input": TALK}
        compacted = (await http.post("/v1/responses/compact", json=asked)).json()
        await post(server, input=[*compacted["output"], QUESTION])

        assert compacted["object"] == "response.compaction"
        assert "It rained a lot." in messages(fake)[1]["content"]


async def test_a_suspension_longer_than_the_cache_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(fake_endpoint(CALL, SUN))
        endpoint = Endpoint(EndpointSettings(fake.url, fake.api_key))
        engine = ChatEngine(MODEL, endpoint, CEREBRAS, cache_seconds=0.0)
        server = await stack.enter_async_context(serving(engine=engine))
        client = await stack.enter_async_context(server.connect("append"))
        (call,) = calls_in(await client.create())
        last = await client.append(output(call))

        (turn,) = last[-1]["response"]["suspend:run"]["turns"]
        assert turn["endpoint"]["cache_may_be_gone"] is True
        assert "may read it all again" in caplog.text


async def test_the_books_have_each_run_once_with_what_the_endpoint_counted(tmp_path: Path) -> None:
    settings = Settings(recent_responses=0, data_dir=tmp_path)
    async with (
        served(CALL, SUN, settings=settings) as (server, fake),
        server.connect("append") as client,
    ):
        (call,) = calls_in(await client.create())
        await client.append(output(call))

    columns = "model, status, num_segments, input_tokens, cached_tokens, output_tokens"
    with closing(sqlite3.connect(tmp_path / LEDGER_FILE)) as database:
        rows = database.execute(f"SELECT {columns} FROM runs").fetchall()
    assert rows == [
        (
            MODEL,
            "completed",
            2,
            sum(request.prompt_tokens for request in fake.requests),
            sum(request.cached_tokens for request in fake.requests),
            sum(request.completion_tokens for request in fake.requests),
        )
    ]


async def test_models_tell_what_cannot_be_relied_on() -> None:
    async with served() as (server, _), server.http() as http:
        (model,) = (await http.get("/v1/models")).json()["data"]

        assert model["id"] == MODEL
        assert set(model["suspend:capabilities"].values()) == {False}


async def test_metrics_count_what_the_endpoint_says() -> None:
    async with served(CALL, SUN) as (server, fake), server.connect("append") as client:
        (call,) = calls_in(await client.create())
        suspended = await server.metrics()
        await client.append(output(call))
        metrics = await server.metrics()

        sampled = sum(request.completion_tokens for request in fake.requests)
        read = sum(request.prompt_tokens - request.cached_tokens for request in fake.requests)
        assert suspended["suspend_runs{suspended}"] == 1
        assert metrics["suspend_runs{suspended}"] == 0
        assert metrics["suspend_tokens_sampled_total"] == sampled
        assert metrics["suspend_tokens_forwarded_total"] == read + sampled
        assert metrics["suspend_post_inference_total"] == 1
        assert metrics["suspend_kv_tokens"] == 0


async def test_lanes_are_sampled_side_by_side() -> None:
    held = asyncio.Event()
    async with served([*waits(held), *SUN], [*waits(held), *SUN]) as (server, fake):
        async with server.connect() as client:
            await client.send("response.create", stream_id="a", **BODY)
            await client.send("response.create", stream_id="b", **BODY)
            await until(lambda: fake.in_flight == 2)
            held.set()
            ended: set[str] = set()
            while len(ended) < 2:
                event = await client.receive()
                if event["type"] == "response.completed":
                    ended.add(event["stream_id"])

        assert ended == {"a", "b"}


# --- The start -----------------------------------------------------------------------------------


async def test_an_endpoint_that_lists_no_models_is_taken_at_its_word() -> None:
    async with served(SUN) as (server, fake):
        fake.has_models_route = False
        await server.any_engine.start()


@pytest.mark.parametrize(
    ("attribute", "value", "says_so"),
    [("api_key", "another", "refused the API key"), ("models", ["a", "b"], "but a, b")],
)
async def test_a_model_that_cannot_be_had_is_found_at_the_start(
    attribute: str, value: Any, says_so: str
) -> None:
    async with served() as (server, fake):
        setattr(fake, attribute, value)
        with pytest.raises(EngineError, match=says_so):
            await server.any_engine.start()


async def test_an_endpoint_that_is_down_at_the_start_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fake_endpoint() as fake:
        engine = chat_engine(fake, patience_seconds=0.02)
    await engine.start()
    await engine.stop()

    assert "could not be reached" in caplog.text
