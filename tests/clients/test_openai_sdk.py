"""The openai package, over HTTP and WebSocket, waiting and asynchronous, as its users write it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from sampler.local_engine import LocalEngine
from server.settings import Settings
from tests.server.models import OSLO, THOUGHT, held_at, scripted_engine
from tests.server.running import TOOL, Running, serving, until
from tests.tiny_model import tiny_model

KEEPING = Settings(recent_responses=4)
QUESTION = "Is it dry in Oslo?"
TOOLS: Any = [TOOL | {"strict": True}]
T = TypeVar("T")


@asynccontextmanager
async def client_of(server: Running) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@asynccontextmanager
async def talking(*script: str, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """Serve ``script`` and give a client."""
    options = {"settings": KEEPING} | options
    async with serving(*script, **options) as server, client_of(server) as client:
        yield client


def output_for(call: ResponseFunctionToolCall, text: str = "dry") -> Any:
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


def only_call(response: Response) -> ResponseFunctionToolCall:
    (call,) = (item for item in response.output if item.type == "function_call")
    return call


def cached_tokens(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


# --- HTTP ----------------------------------------------------------------------------------------


async def test_a_tool_loop_with_the_items_of_the_package() -> None:
    async with talking(OSLO, "Sun.") as client:
        history: Any = [{"role": "user", "content": QUESTION}]
        first = await client.responses.create(model="tiny", input=history, tools=TOOLS)
        call = only_call(first)
        history += [*first.output, output_for(call)]
        last = await client.responses.create(model="tiny", input=history, tools=TOOLS)

        assert json.loads(call.arguments) == {"city": "Oslo"}
        assert last.output_text == "Sun."
        assert cached_tokens(last) > 0


async def test_a_chained_tool_loop() -> None:
    async with talking(OSLO, "Sun.") as client:
        first = await client.responses.create(model="tiny", input=QUESTION, tools=TOOLS)
        last = await client.responses.create(
            model="tiny",
            previous_response_id=first.id,
            input=[output_for(only_call(first))],
            tools=TOOLS,
        )

        assert last.output_text == "Sun."


async def test_a_stream_is_events_up_to_the_completed_response() -> None:
    async with talking(f"Rain.{OSLO}") as client:
        stream = await client.responses.create(
            model="tiny", input=QUESTION, tools=TOOLS, stream=True
        )
        events = [event async for event in stream]

        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"


async def test_the_stream_helper_follows_all_kinds_of_items() -> None:
    """The helper accepts no event that comes at the wrong place."""
    engine = scripted_engine(f"{THOUGHT}Rain.{OSLO}", thinks=True)
    async with talking(engine=engine) as client:
        async with client.responses.stream(
            model="tiny",
            input=QUESTION,
            tools=TOOLS,
            include=["message.output_text.logprobs"],
            reasoning={"summary": "auto"},
        ) as stream:
            kinds = {event.type async for event in stream}
            response = await stream.get_final_response()

        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert {
            "response.reasoning_summary_text.delta",
            "response.output_text.delta",
            "response.function_call_arguments.delta",
            "response.completed",
        } <= kinds


class Report(BaseModel):
    city: str
    is_dry: bool


REPORT = '{"city": "Oslo", "is_dry": true}'


async def test_an_answer_is_parsed_into_the_type_asked_for() -> None:
    async with talking(REPORT) as client:
        response = await client.responses.parse(model="tiny", input=QUESTION, text_format=Report)

        assert response.output_parsed == Report(city="Oslo", is_dry=True)


async def test_an_answer_is_parsed_after_a_round_of_calls() -> None:
    async with talking(OSLO, REPORT) as client:
        first = await client.responses.parse(
            model="tiny", input=QUESTION, tools=TOOLS, text_format=Report
        )
        (call,) = first.output
        assert call.type == "function_call"
        last = await client.responses.parse(
            model="tiny",
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "dry"}],
            tools=TOOLS,
            text_format=Report,
        )

        assert call.parsed_arguments == {"city": "Oslo"}
        assert last.output_parsed == Report(city="Oslo", is_dry=True)


async def test_the_stream_helper_parses_an_answer() -> None:
    async with talking(REPORT) as client:
        async with client.responses.stream(
            model="tiny", input=QUESTION, text_format=Report
        ) as stream:
            response = await stream.get_final_response()

        assert response.output_parsed == Report(city="Oslo", is_dry=True)


async def test_what_is_wrong_is_raised_before_a_stream_begins() -> None:
    async with talking("Sun.") as client:
        with pytest.raises(openai.BadRequestError) as hot:
            await client.responses.create(model="tiny", input="Hi", temperature=9, stream=True)
        with pytest.raises(openai.BadRequestError) as orphan:
            await client.responses.create(model="tiny", input="Hi", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="gpt-9", input="Hi")

        assert hot.value.param == "temperature"
        assert orphan.value.code == "previous_response_not_found"
        assert unknown.value.code == "model_not_found"


async def test_input_tokens_are_counted() -> None:
    async with talking("Sun.") as client:
        counted = await client.responses.input_tokens.count(
            model="tiny", input=QUESTION, tools=TOOLS
        )
        response = await client.responses.create(model="tiny", input=QUESTION, tools=TOOLS)

        assert response.usage is not None
        assert counted.input_tokens == response.usage.input_tokens


async def test_the_models_are_listed() -> None:
    async with talking("Sun.") as client:
        models = [model.id async for model in client.models.list()]

        assert models == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"


# --- In the background ---------------------------------------------------------------------------


async def test_a_response_in_the_background_is_polled_to_its_end() -> None:
    async with serving("Sun.Sun.", settings=KEEPING) as server, client_of(server) as client:
        with held_at(2, server.engine) as model:
            queued = await client.responses.create(model="tiny", input=QUESTION, background=True)
            await model.reached.wait()
            running = await client.responses.retrieve(queued.id)
            model.release()
            async with await client.responses.retrieve(queued.id, stream=True) as stream:
                last = [event async for event in stream][-1]
        done = await client.responses.retrieve(queued.id)

        assert queued.status == "queued"
        assert running.status == "in_progress"
        assert last.type == "response.completed"
        assert (done.status, done.output_text) == ("completed", "Sun.Sun.")


async def test_a_stream_in_the_background_is_taken_up_again() -> None:
    async with serving("Sun.Sun.", settings=KEEPING) as server, client_of(server) as client:
        with held_at(2, server.engine) as model:
            stream = await client.responses.create(
                model="tiny", input=QUESTION, background=True, stream=True
            )
            async with stream:
                created = await anext(aiter(stream))
            assert created.type == "response.created"
            model.release()
            async with await client.responses.retrieve(
                created.response.id, stream=True, starting_after=created.sequence_number
            ) as rest:
                events = [event async for event in rest]

        assert events[0].sequence_number == created.sequence_number + 1
        assert events[-1].type == "response.completed"


async def test_a_response_in_the_background_is_cancelled_and_followed() -> None:
    async with serving("Sun.Sun.", "Rain.", settings=KEEPING) as server:
        async with client_of(server) as client:
            with held_at(2, server.engine) as model:
                queued = await client.responses.create(
                    model="tiny", input=QUESTION, background=True
                )
                await model.reached.wait()
                (run,) = server.engine.runs
                async with asyncio.TaskGroup() as tasks:
                    cancelling = tasks.create_task(client.responses.cancel(queued.id))
                    await until(lambda: run.wanted_stop is not None)
                    model.release()
            cancelled = cancelling.result()
            follower = await client.responses.create(
                model="tiny", input="And now?", previous_response_id=cancelled.id
            )

        assert cancelled.status == "cancelled"
        assert follower.output_text == "Rain."


async def test_what_was_stored_is_looked_up_and_deleted() -> None:
    async with talking("Sun.") as client:
        response = await client.responses.create(model="tiny", input=QUESTION)
        items = [item async for item in client.responses.input_items.list(response.id)]
        found = await client.responses.retrieve(response.id)
        await client.responses.delete(response.id)

        assert [item.type for item in items] == ["message"]
        assert found.output_text == "Sun."
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


# --- WebSocket -----------------------------------------------------------------------------------


async def test_a_chained_tool_loop_over_a_websocket() -> None:
    async with talking(OSLO, "Sun.") as client, client.responses.connect() as connection:
        await connection.response.create(model="tiny", input=QUESTION, tools=TOOLS, store=False)
        first = await completed(connection)
        await connection.response.create(
            model="tiny",
            previous_response_id=first.id,
            input=[output_for(only_call(first))],
            tools=TOOLS,
            store=False,
        )
        last = await completed(connection)

        assert last.output_text == "Sun."
        assert cached_tokens(last) > 0


async def completed(connection: Any) -> Response:
    """Return the response that the next completed event brings."""
    async for event in connection:
        if event.type == "response.completed":
            response: Response = event.response
            return response
        assert event.type != "error", event
    raise AssertionError("the connection was closed")


async def test_an_error_over_a_websocket_leaves_it_usable() -> None:
    async with talking("Sun.") as client, client.responses.connect() as connection:
        await connection.response.create(model="tiny", input="Hi", previous_response_id="resp_1")
        error: Any = await connection.recv()
        await connection.response.create(model="tiny", input="Hi")
        response = await completed(connection)

        assert error.type == "error"
        assert error.error.code == "previous_response_not_found"
        assert response.output_text == "Sun."


# --- Waiting -------------------------------------------------------------------------------------


def whole_loop(client: OpenAI) -> str:
    """Go through a tool loop by streams."""
    with client.responses.stream(model="tiny", input=QUESTION, tools=TOOLS) as stream:
        first = stream.get_final_response()
    (call,) = first.output
    assert call.type == "function_call"
    answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    with client.responses.stream(
        model="tiny", previous_response_id=first.id, input=[answer], tools=TOOLS
    ) as stream:
        return stream.get_final_response().output_text


def whole_loop_over_a_websocket(client: OpenAI) -> str:
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", input=QUESTION, tools=TOOLS)
        first = next(e.response for e in connection if e.type == "response.completed")
        answer = [output_for(only_call(first))]
        connection.response.create(
            model="tiny", previous_response_id=first.id, input=answer, tools=TOOLS
        )
        last = next(e.response for e in connection if e.type == "response.completed")
        return last.output_text


@pytest.mark.parametrize("loop", [whole_loop, whole_loop_over_a_websocket])
async def test_a_tool_loop_of_a_client_that_waits(loop: Any) -> None:
    def talk(url: str) -> Any:
        with OpenAI(base_url=url, api_key="x", max_retries=0) as client:
            return loop(client)

    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        assert await asyncio.to_thread(talk, f"{server.url}/v1") == "Sun."


async def test_a_report_of_a_model_that_says_anything() -> None:
    class Sky(BaseModel):
        is_dry: bool
        degrees: int

    async with talking(engine=LocalEngine(tiny_model())) as client:
        response = await client.responses.parse(
            model="tiny", input=QUESTION, text_format=Sky, extra_body={"seed": 0}
        )

        assert isinstance(response.output_parsed, Sky)
