"""Which tools a model may call, and whether it must, is a hard constraint, and no part of what it
reads."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sampler.local_engine import LocalEngine
from server.settings import Settings
from tests.server.http_client import cached_tokens, context_length, post, post_refused
from tests.server.models import OSLO, inputs_of
from tests.server.refusals import Refusal
from tests.server.running import BODY, TOOL, Event, Running, calls_in, output, serving, text_in
from tests.tiny_model import tiny_model

NO_ARGUMENTS: Event = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    TOOL,
    {"type": "function", "name": "a", "parameters": NO_ARGUMENTS},
    {"type": "custom", "name": "b", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "c",
        "description": "",
        "tools": [{"type": "function", "name": "d", "parameters": NO_ARGUMENTS}],
    },
    {"type": "web_search"},
]


def allowed(*tools: Event, mode: str = "auto") -> Event:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


A: Event = {"type": "function", "name": "a"}
B: Event = {"type": "custom", "name": "b"}
D: Event = {"type": "function", "namespace": "c", "name": "d"}
SEARCH: Event = {"type": "web_search"}
QUALIFIED = {"a": A, "b": B, "c.d": D}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def random_server() -> AsyncIterator[Running]:
    """A server whose model says anything."""
    async with serving(engine=LocalEngine(tiny_model(), max_forced_string=4)) as server:
        yield server


def called(response: Event) -> list[str]:
    """Return the qualified names of the tools that a response calls."""
    return [
        ".".join(filter(None, (item.get("namespace"), item["name"])))
        for item in response["output"]
        if item["type"] in ("function_call", "custom_tool_call")
    ]


# --- What may be called --------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", QUALIFIED)
async def test_a_named_tool_is_called_once(name: str, random_server: Running) -> None:
    response = await post(random_server, tools=TOOLS, tool_choice=QUALIFIED[name], seed=0)

    assert called(response) == [name]


@pytest.mark.asyncio(loop_scope="module")
async def test_required_allowed_tools_are_called_and_no_other(random_server: Running) -> None:
    choice = allowed(A, D, SEARCH, mode="required")
    names = set()
    for seed in range(4):
        response = await post(
            random_server,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=seed,
        )

        (name,) = called(response)
        names.add(name)
    assert names == {"a", "c.d"}


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        allowed(A, B),
        allowed(SEARCH),
    ],
)
async def test_a_tool_that_may_not_be_called_is_not_called_by_a_model_that_would(
    choice: Event | str,
) -> None:
    async with serving(OSLO) as server:
        response = await post(server, tools=TOOLS, tool_choice=choice, seed=0, max_output_tokens=20)

        assert "get_weather" not in called(response)
        assert response["tool_choice"] == choice


@pytest.mark.parametrize("choice", ["required", allowed(A, mode="required"), A])
async def test_a_call_is_made_by_a_model_that_would_rather_talk(choice: Event | str) -> None:
    async with serving("Sun.") as server:
        response = await post(
            server, tools=[A | {"parameters": NO_ARGUMENTS}], tool_choice=choice, seed=0
        )

        assert called(response)[:1] == ["a"]
        assert text_in(response) == ""


async def test_one_call_is_made_where_no_parallel_ones_are_wanted() -> None:
    async with serving(f"{OSLO}\n{OSLO}") as server:
        both = await post(server)
        one = await post(server, parallel_tool_calls=False)

        assert (len(called(both)), len(called(one))) == (2, 1)


# --- What is read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice", ["none", "required", allowed(A), allowed(A, mode="required"), A, B, D]
)
async def test_a_choice_leaves_the_prompt_and_its_cache_as_they_are(choice: Event | str) -> None:
    settings = Settings(recent_responses=4)
    async with serving("Sun.", settings=settings) as server:
        auto = await post(server, tools=TOOLS)
        chosen = await post(server, tools=TOOLS, tool_choice=choice, max_output_tokens=1, seed=0)

        assert chosen["usage"]["input_tokens"] == auto["usage"]["input_tokens"]
        assert cached_tokens(chosen) == auto["usage"]["input_tokens"] - 1


async def test_a_choice_may_change_from_round_to_round() -> None:
    weather = {"type": "function", "name": "get_weather"}
    settings = Settings(recent_responses=4)
    async with serving(OSLO, "Sun.", settings=settings) as server:
        first = await post(server, tools=TOOLS, tool_choice=allowed(weather, mode="required"))
        (call,) = first["output"]
        question = {"role": "user", "content": BODY["input"]}
        history = [question, call, output(call)]
        last = await post(server, tools=TOOLS, tool_choice="none", input=history)

        assert cached_tokens(last) == context_length(first)
        assert text_in(last) == "Sun."


async def test_in_a_suspended_run_required_binds_once_and_allowed_tools_go_on() -> None:
    weather = {"type": "function", "name": "get_weather"}
    async with serving(OSLO, OSLO, "Sun.") as server, server.connect("append") as client:
        choice = allowed(weather, mode="required")
        first = await client.create(tools=TOOLS, tool_choice=choice)
        second = await client.append(output(calls_in(first)[0]))
        last = await client.append(output(calls_in(second)[0]))

        assert text_in(last[-1]["response"]) == "Sun."
    async with serving(OSLO, OSLO) as server, server.connect("append") as client:
        first = await client.create(tools=TOOLS, tool_choice=weather)
        last = await client.append(output(calls_in(first)[0]), tool_choice=allowed(A), seed=0)

        assert all(call["name"] != "get_weather" for call in calls_in(last))


async def test_a_prompt_has_the_tools_that_may_not_be_called() -> None:
    async with serving("Sun.") as server:
        await post(server, tools=TOOLS, tool_choice=allowed(A))
        tokenizer = server.engine.model.tokenizer
        read = b"".join(map(tokenizer.token_bytes, inputs_of(server.engine))).decode()

        assert "get_weather(city: string)" in read


# --- Choices that cannot be honoured -------------------------------------------------------------

BAD_CHOICES: dict[str, tuple[Event, Refusal]] = {
    "a tool that is not there": (
        {"type": "function", "name": "x"},
        Refusal(400, "invalid_value", "tool_choice.name"),
    ),
    "an allowed tool that is not there": (
        allowed(A, {"type": "function", "name": "x"}),
        Refusal(400, "invalid_value", "tool_choice.tools[1].name"),
    ),
    "a tool of another namespace": (
        {"type": "function", "namespace": "x", "name": "d"},
        Refusal(400, "invalid_value", "tool_choice.name"),
    ),
    "none of the allowed ones can be called": (
        allowed(SEARCH, mode="required"),
        Refusal(400, "invalid_value", "tool_choice"),
    ),
    "a hosted tool": (
        {"type": "web_search"},
        Refusal(400, "unsupported_parameter", "tool_choice"),
    ),
    "a mode that is none": (
        allowed(A, mode="maybe"),
        Refusal(400, "invalid_value", "tool_choice.mode"),
    ),
}


@pytest.mark.parametrize("name", BAD_CHOICES)
async def test_a_choice_that_cannot_be_honoured_is_refused(name: str) -> None:
    choice, expected = BAD_CHOICES[name]
    async with serving("Sun.") as server:
        assert await post_refused(server, tools=TOOLS, tool_choice=choice) == expected


async def test_a_call_cannot_be_required_without_tools() -> None:
    async with serving("Sun.") as server:
        refused = await post_refused(server, tools=[SEARCH], tool_choice="required")

        assert refused == Refusal(400, "invalid_value", "tool_choice")
