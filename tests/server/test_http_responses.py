"""``POST /v1/responses``: each request brings the whole history."""

import asyncio
import json
from typing import Any

import pytest
import pytest_asyncio

from protocol.codec import encode
from sampler.local_engine import LocalEngine
from server.settings import Settings
from tests.server.http_client import post, post_streamed
from tests.server.models import OSLO, held_at, inputs_of, scripted_engine
from tests.server.refusals import BAD_BODIES, Refusal, body_text, refusal
from tests.server.running import (
    BODY,
    Event,
    Running,
    calls_in,
    check_events,
    output,
    parse_sse,
    serving,
    text_in,
    until,
)
from tests.tiny_model import call_text, tiny_model

STREAMED: Event = BODY | {"stream": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def any_server() -> Any:
    """A server for requests that leave no trace."""
    async with serving("Sun.") as server:
        yield server


# --- One request ---------------------------------------------------------------------------------


async def test_a_request_is_answered_with_the_whole_response() -> None:
    async with serving("Sun.") as server:
        response = await post(server)

        assert response["status"] == "completed"
        assert text_in(response) == "Sun."
        assert response["usage"]["input_tokens_details"]["cached_tokens"] == 0


async def test_a_tool_that_takes_a_set_of_strings_can_be_called() -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    parameters = {"type": "object", "properties": {"tags": tags}, "required": ["tags"]}
    tool = {"type": "function", "name": "tag", "parameters": parameters}
    arguments = '{"tags": ["dry", "mild"]}'
    async with serving(call_text("tag", arguments)) as server:
        response = await post(server, tools=[tool])

        assert response["output"][0]["arguments"] == arguments
        assert response["tools"][0]["parameters"] == parameters


async def test_a_call_completes_the_response_and_holds_nothing() -> None:
    async with serving(OSLO, "Sun.") as server:
        response = await post(server)

        assert response["status"] == "completed"
        assert response["output"][0]["arguments"] == '{"city": "Oslo"}'
        assert server.engine.runs == ()


async def test_a_budget_that_runs_out_makes_the_response_incomplete() -> None:
    async with serving("Sun.Sun.") as server:
        response = await post(server, max_output_tokens=1)

        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert text_in(response) == "Sun."


async def test_what_was_asked_is_repeated() -> None:
    asked: Event = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 9,
        "metadata": {"k": "v"},
        "user": "u",
        "reasoning": {"effort": "xhigh", "summary": None},
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "truncation": "auto",
    }
    async with serving("Sun.") as server:
        response = await post(server, **asked)

        assert {member: response[member] for member in asked} == asked


async def test_what_clients_send_beside_is_read_over() -> None:
    async with serving("Sun.") as server:
        response = await post(
            server,
            tools=[{"type": "function", "name": "f"}, {"type": "web_search"}],
            include=["reasoning.encrypted_content"],
            client_metadata={"x": "y"},
            stream_options={"include_obfuscation": False},
            nobody_knows=[1],
        )

        assert response["status"] == "completed"


# --- As an event stream --------------------------------------------------------------------------


async def test_a_stream_is_made_of_events_and_ends_with_done() -> None:
    async with serving(f"Let me look.{OSLO}") as server, server.http() as http:
        answer = await http.post("/v1/responses", json=STREAMED)

        *frames, done = parse_sse(answer.text)
        events = [json.loads(data) for _, data in frames]
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert [event for event, _ in frames] == [event["type"] for event in events]
        assert done == ("", "[DONE]")
        assert answer.text.endswith("data: [DONE]\n\n")
        check_events(events)


async def test_a_stream_is_sent_as_it_is_sampled() -> None:
    async with serving("Sun.") as server, server.http() as http:
        with held_at(2, server.engine) as model:
            async with http.stream("POST", "/v1/responses", json=STREAMED) as answer:
                chunks = answer.aiter_text()
                text = ""
                while "output_text.delta" not in text:  # the model has not said the rest
                    text += await anext(chunks)
                model.release()
                text += "".join([chunk async for chunk in chunks])

        assert "response.completed" in text


async def test_a_stream_says_what_the_whole_response_says() -> None:
    async with serving(f"Let me look.{OSLO}") as server:
        response = await post(server)
        events = await post_streamed(server)

        last = events[-1]["response"]
        assert text_in(last) == text_in(response)
        assert calls_in(events)[0]["arguments"] == response["output"][1]["arguments"]
        assert last["usage"] == response["usage"]


async def test_two_streams_are_sampled_side_by_side() -> None:
    async with serving("Sun.Sun.") as server:
        first, second = await asyncio.gather(post_streamed(server), post_streamed(server))

        assert first[0]["response"]["id"] != second[0]["response"]["id"]


# --- The whole history ---------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_whole_history_gives_what_the_suspended_run_gives() -> None:
    """The model is not scripted here: what it says depends on every token it has read."""
    options: Event = {"temperature": 0, "max_output_tokens": 90}
    forced = options | {"tool_choice": "required"}
    question = {"role": "user", "content": "Is it dry in Oslo?"}
    async with serving(engine=LocalEngine(tiny_model(), max_forced_string=8)) as server:
        async with server.connect("append") as client:
            first = (await client.create(**forced, input=[question]))[-1]["response"]
            (call,) = first["output"]
            suspended = (await client.append(output(call, "døgnvilt ☀")))[-1]["response"]
        alone = await post(server, **forced, input=[question])
        history = [question, *alone["output"], output(alone["output"][0], "døgnvilt ☀")]
        again = await post(server, **options, input=history)

        assert alone["output"][0]["arguments"] == call["arguments"]
        assert text_in(again) == text_in(suspended)
        assert again["usage"]["input_tokens"] == suspended["usage"]["input_tokens"]
        assert suspended["usage"]["input_tokens_details"]["cached_tokens"] > 0
        assert again["usage"]["input_tokens_details"]["cached_tokens"] == 0


async def test_the_whole_history_is_read_as_the_suspended_run_read_it() -> None:
    async with serving(f"Let me look.{OSLO}", "Sun.") as server:
        async with server.connect("append") as client:
            first = await client.create()
            await client.append(output(calls_in(first)[0], "dry"))
        read_suspended = inputs_of(server.engine)
        items = first[-1]["response"]["output"]
        question = {"role": "user", "content": BODY["input"]}
        history = [question, *items, output(items[-1], "dry")]
        response = await post(server, input=history)

        read_again = inputs_of(server.engine)[len(read_suspended) :]
        prompt = read_again[: response["usage"]["input_tokens"]]
        assert prompt == read_suspended[: len(prompt)]


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_body_is_refused_before_a_stream_starts(
    name: str, stream: bool, any_server: Running
) -> None:
    body, expected = BAD_BODIES[name]
    async with any_server.http() as http:
        answer = await http.post("/v1/responses", content=body_text(body, stream=stream))

    assert answer.headers["content-type"] == "application/json"
    assert refusal(answer.status_code, answer.json()["error"]) == expected
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert any_server.engine.runs == ()


async def test_an_oversized_body_is_refused() -> None:
    async with serving("Sun.", settings=Settings(max_frame_bytes=100)) as server:
        async with server.http() as http:
            answer = await http.post("/v1/responses", content=encode({"input": "a" * 100}))

        expected = Refusal(400, "payload_too_large")
        assert refusal(answer.status_code, answer.json()["error"]) == expected


async def test_a_stream_over_http_asks_for_no_lane() -> None:
    async with serving("Sun.") as server:
        events = await post_streamed(server, stream_id=None)

        assert all("stream_id" not in event for event in events)


# --- Clients that leave --------------------------------------------------------------------------


async def leave_during_sampling(server: Running, body: Event, step: int) -> None:
    """Send a request and drop the connection in the ``step``-th step of the model."""
    content = encode(body)
    head = (
        f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    with held_at(step, server.engine) as model:
        writer.write(head.encode() + content)
        await model.reached.wait()
        writer.transport.abort()
        await model.release_once_stopped()
    await server.until_free()
    await until(lambda: server.num_requests == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_run_with_it(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving("Sun." * 200) as server:
        await leave_during_sampling(server, BODY | {"stream": stream}, 5)
        metrics = await server.metrics()

        assert metrics["suspend_tokens_sampled_total"] <= 5
        assert metrics["suspend_post_inference_total"] == 1
        assert caplog.records == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_a_prefill_of_many_chunks_ends_it(stream: bool) -> None:
    engine = LocalEngine(scripted_engine().model, prefill_chunk=16)
    async with serving(engine=engine) as server:
        body = {"input": "a" * 1000, "stream": stream}
        await leave_during_sampling(server, body, 3)

        assert engine.counters.forward_passes < 8


async def test_a_client_that_leaves_before_its_body_is_whole_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving("Sun.") as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b'POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"in'
        )
        await until(lambda: server.num_requests == 1)
        writer.transport.abort()
        await until(lambda: server.num_requests == 0)

        assert caplog.records == []
