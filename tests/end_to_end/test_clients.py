"""The real server on the real model, spoken to by the openai package and by hand."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel, Field
from websockets.asyncio.client import connect

from protocol.codec import decode_object
from protocol.conformance.stream_grammar import check_stream
from protocol.dialect import APPEND_BETA
from tests.end_to_end.process import ServerProcess, started

pytestmark = pytest.mark.slow

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Current weather in a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
QUESTION = "What is the weather in Oslo?"
FORCED: dict[str, Any] = {
    "input": QUESTION,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    stderr = tmp_path_factory.mktemp("server") / "stderr"
    with started(stderr, "--seed", "0") as server:
        server.wait_until_it_listens()
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def only_call(response: Response) -> ResponseFunctionToolCall:
    """Return the one output item of ``response``, a call whose arguments fit its schema."""
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments)["city"] in ("Oslo", "Bergen")
    return call


def cached_tokens(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def tokens_left_by(response: Response) -> int:
    """Return how many tokens a response leaves in a cache: all but the last, which was not read."""
    assert response.usage is not None
    return response.usage.total_tokens - 1


def test_create_returns_a_response(client: OpenAI) -> None:
    response = client.responses.create(model=_model(client), input="Say hi.", max_output_tokens=8)

    assert response.output_text
    assert response.usage is not None
    assert 0 < response.usage.output_tokens <= 8


def test_create_streams_events(client: OpenAI) -> None:
    events = list(
        client.responses.create(
            model=_model(client), input="Say hi.", max_output_tokens=8, stream=True
        )
    )

    check_stream([json.loads(event.to_json()) for event in events])
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_the_stream_helper_follows_a_call(client: OpenAI) -> None:
    with client.responses.stream(model=_model(client), **FORCED) as stream:
        types = [event.type for event in stream]
        response = stream.get_final_response()

    assert "response.function_call_arguments.delta" in types
    assert types[-1] == "response.completed"
    only_call(response)


def test_a_tool_loop_with_the_whole_history_ends(client: OpenAI) -> None:
    first = client.responses.create(model=_model(client), **FORCED)
    call = only_call(first)
    history: Any = [
        {"role": "user", "content": QUESTION},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12 °C, rain"},
    ]
    last = client.responses.create(
        model=_model(client),
        input=history,
        tools=[TOOL],
        tool_choice="none",
        max_output_tokens=16,
    )

    assert last.output_text
    assert cached_tokens(last) >= tokens_left_by(first)


def test_a_chained_tool_loop_ends(client: OpenAI) -> None:
    first = client.responses.create(model=_model(client), **FORCED)
    answer: Any = {"type": "function_call_output", "call_id": only_call(first).call_id}
    last = client.responses.create(
        model=_model(client),
        previous_response_id=first.id,
        input=[answer | {"output": "12 °C, rain"}],
        tools=[TOOL],
        tool_choice="none",
        max_output_tokens=16,
    )

    assert last.output_text
    assert cached_tokens(last) >= tokens_left_by(first)


class Report(BaseModel):
    city: Literal["Oslo", "Bergen"]
    is_dry: bool
    degrees: int = Field(ge=-40, le=40)


def test_an_answer_is_parsed_into_the_type_asked_for(client: OpenAI) -> None:
    response = client.responses.parse(
        model=_model(client), input=QUESTION, text_format=Report, temperature=0
    )

    assert isinstance(response.output_parsed, Report)


def test_an_answer_fits_the_schema_that_the_ai_sdk_sends(client: OpenAI) -> None:
    schema: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "n": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
        },
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    response = client.responses.create(
        model=_model(client),
        input="Name a city and say how many people live there.",
        text={"format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True}},
        temperature=0,
        max_output_tokens=200,
    )

    assert response.status == "completed"
    jsonschema.validate(json.loads(response.output_text), schema)


async def test_connect_follows_a_forced_call(server: ServerProcess) -> None:
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
        client.responses.connect() as connection,
    ):
        await connection.response.create(model="smollm2-135m-instruct", **FORCED)
        events = []
        async for event in connection:
            events.append(event)
            if event.type in ("response.completed", "response.incomplete"):
                break

    last = events[-1]
    assert last.type == "response.completed"
    only_call(last.response)


async def test_a_run_goes_on_by_append(server: ServerProcess) -> None:
    events: list[dict[str, Any]] = []
    url = f"{server.url.replace('http', 'ws')}/v1/responses"
    async with connect(url, additional_headers={"OpenAI-Beta": APPEND_BETA}) as socket:
        create = {"type": "response.create", "max_output_tokens": 64, **FORCED}
        await socket.send(json.dumps(create))
        events += await _until_closed(socket)
        (call,) = events[-1]["response"]["output"]
        item = {"type": "function_call_output", "call_id": call["call_id"], "output": "12 °C"}
        append = {"type": "response.append", "input": [item], "tool_choice": "none"}
        await socket.send(json.dumps(append))
        events += await _until_closed(socket)

    run = events[-1]["response"]["suspend:run"]
    usage = events[-1]["response"]["usage"]
    check_stream(events)
    assert [event["type"] for event in events].count("response.done") == 1
    assert (run["segments"], run["seed"], run["tokens_reforwarded"]) == (2, 0, 0)
    assert usage["input_tokens_details"]["cached_tokens"] > 0


async def _until_closed(socket: Any) -> list[dict[str, Any]]:
    events = [decode_object(await socket.recv())]
    while events[-1]["type"] not in ("response.done", "response.completed", "response.incomplete"):
        events.append(decode_object(await socket.recv()))
    return events


def _model(client: OpenAI) -> str:
    return client.models.list().data[0].id
