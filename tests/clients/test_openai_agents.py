"""The Agents SDK over all its transports: with the whole history, and by response ids."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    RunConfig,
    Runner,
    RunResult,
    RunResultStreaming,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from server.settings import Settings
from tests.server.models import BERGEN, BOTH, OSLO, THOUGHT, inputs_of, scripted_engine
from tests.server.running import Running, serving

KEEPING = Settings(recent_responses=4)
QUESTION = "Is it dry in Oslo?"
# Traces would be sent to OpenAI.
QUIETLY = RunConfig(tracing_disabled=True)

Model = OpenAIResponsesModel | OpenAIResponsesWSModel


@function_tool
def get_weather(city: str) -> str:
    """Current weather in a city."""
    return f"dry in {city}"


@asynccontextmanager
async def model_of(server: Running, kind: type[Model]) -> AsyncIterator[Model]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        model = kind("tiny", client)
        yield model
        await model.close()


def agent_of(model: Model, **members: Any) -> Agent[None]:
    return Agent("weather", instructions="Be brief.", model=model, tools=[get_weather], **members)


def check_nothing_was_read_twice(server: Running, result: RunResult | RunResultStreaming) -> None:
    usage = result.raw_responses[-1].usage
    assert len(inputs_of(server.engine)) == usage.input_tokens + usage.output_tokens - 1


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIResponsesWSModel])
@pytest.mark.parametrize("by_id", [False, True])
async def test_an_agent_run_ends_and_nothing_is_read_twice(kind: type[Model], by_id: bool) -> None:
    engine = scripted_engine(f"{THOUGHT}Rain.{BOTH}", OSLO, "Sun.", thinks=True)
    async with serving(engine=engine, settings=KEEPING) as server, model_of(server, kind) as model:
        result = await Runner.run(
            agent_of(model), QUESTION, run_config=QUIETLY, auto_previous_response_id=by_id
        )

        assert result.final_output == "Sun."
        assert len(result.raw_responses) == 3
        check_nothing_was_read_twice(server, result)


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIResponsesWSModel])
async def test_a_streamed_agent_run_ends_and_nothing_is_read_twice(kind: type[Model]) -> None:
    async with serving(OSLO, BERGEN, "Sun.", settings=KEEPING) as server:
        async with model_of(server, kind) as model:
            result = Runner.run_streamed(agent_of(model), QUESTION, run_config=QUIETLY)
            kinds = {event.type async for event in result.stream_events()}

        assert result.final_output == "Sun."
        assert kinds >= {"raw_response_event", "run_item_stream_event"}
        check_nothing_was_read_twice(server, result)


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIResponsesWSModel])
async def test_a_second_question_goes_on_from_the_first_answer(kind: type[Model]) -> None:
    async with serving(OSLO, "Sun.", "Rain.", settings=KEEPING) as server:
        async with model_of(server, kind) as model:
            agent = agent_of(model)
            first = await Runner.run(agent, QUESTION, run_config=QUIETLY)
            history: Any = [*first.to_input_list(), {"role": "user", "content": "And now?"}]
            second = await Runner.run(agent, history, run_config=QUIETLY)

        assert second.final_output == "Rain."
        check_nothing_was_read_twice(server, second)


class Report(BaseModel):
    city: str
    is_dry: bool


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIResponsesWSModel])
async def test_an_agent_that_owes_a_report_calls_first(kind: type[Model]) -> None:
    report = '{"city": "Oslo", "is_dry": true}'
    async with serving(OSLO, report, settings=KEEPING) as server:
        async with model_of(server, kind) as model:
            settings = ModelSettings(tool_choice="required")
            agent = agent_of(model, output_type=Report, model_settings=settings)
            result = await Runner.run(agent, QUESTION, run_config=QUIETLY)

        assert result.final_output == Report(city="Oslo", is_dry=True)
