"""Requests that have a trace replayed: the model says what it says there, however the client asks.

Without being forced, neither a model of random weights nor a simulated one would say so.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sampler.local_engine import LocalEngine
from sampler.traces import Trace, TraceCall, TraceTurn, write_traces
from server.responder import TOKEN_IDS
from server.settings import Settings
from tests.sampler.test_simulated import TALK, model_of
from tests.server.designs import QUESTION, Design, hold, post
from tests.server.models import OSLO, scripted_engine, steps_of
from tests.server.refusals import Refusal, refusal
from tests.server.running import (
    BODY,
    TOOL,
    Event,
    calls_in,
    output,
    serving,
    text_in,
)

NOTE: Event = {"type": "custom", "name": "note", "description": "Keep in mind"}
TOOLS = [TOOL, NOTE]
TURNS = (
    TraceTurn(
        text="Let me look.",
        calls=(
            TraceCall(name="get_weather", arguments='{"city":"Troms\\u00f8"}', output="dry"),
            TraceCall(name="get_weather", arguments='{"city": "Oslo", "x": [1]}', output="dry"),
        ),
    ),
    TraceTurn(calls=(TraceCall(name="note", input="It is dry.\n", output="dry"),)),
    TraceTurn(text="Dry: naïve, but so it is 🙂."),
)
TRIP = Trace(name="trip", tools=(TOOL, NOTE), input=BODY["input"], turns=TURNS)
SHORT = Trace(name="short", input="Hi", turns=(TraceTurn(text="Sun."),))
MEMBERS: Event = {"tools": TOOLS, "metadata": {"replay": "trip"}}

SAID = [
    [
        ("message", "Let me look."),
        ("get_weather", '{"city":"Troms\\u00f8"}'),
        ("get_weather", '{"city": "Oslo", "x": [1]}'),
    ],
    [("note", "It is dry.\n")],
    [("message", "Dry: naïve, but so it is 🙂.")],
]
"""What the trace says, turn by turn."""

UNKNOWN = Refusal(400, "invalid_value", "metadata.replay")
OVER = UNKNOWN

NewEngine = Callable[[], LocalEngine]


def weighted_engine() -> LocalEngine:
    """Return an engine on random weights."""
    return scripted_engine()


def simulated_engine() -> LocalEngine:
    """Return an engine without a model."""
    return LocalEngine(model_of(TALK))


on_both_models = pytest.mark.parametrize(
    "new_engine", [weighted_engine, simulated_engine], ids=["weights", "simulated"]
)
every_design = pytest.mark.parametrize("design", Design, ids=lambda design: design.value)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """With two traces, in a file each."""
    paths = tmp_path / "trip.jsonl", tmp_path / "short.jsonl"
    write_traces(paths[0], [TRIP])
    write_traces(paths[1], [SHORT])
    return Settings(replay_files=paths, recent_responses=4)


def said_in(items: Sequence[Event]) -> list[tuple[str, str]]:
    """Return what output ``items`` say: texts, and what is called with what."""
    said = []
    for item in items:
        match item["type"]:
            case "message":
                said.append(("message", "".join(part["text"] for part in item["content"])))
            case "function_call":
                said.append((item["name"], item["arguments"]))
            case "custom_tool_call":
                said.append((item["name"], item["input"]))
            case other:
                raise AssertionError(other)
    return said


def said_by(responses: Sequence[Event], design: Design) -> list[tuple[str, str]]:
    """Return what the responses of a run say together."""
    if design is Design.APPEND:
        return said_in(responses[-1]["output"])  # which is of all segments
    return [said for response in responses for said in said_in(response["output"])]


def flat(turns: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    return [said for turn in turns for said in turn]


def error_of(event: Event) -> Refusal:
    return refusal(event["status"], event["error"])


# --- What is said --------------------------------------------------------------------------------


@every_design
@on_both_models
async def test_a_run_says_what_the_trace_does(
    new_engine: NewEngine, design: Design, settings: Settings
) -> None:
    async with serving(engine=new_engine(), settings=settings) as server:
        responses = await hold(server, design, **MEMBERS)

    assert said_by(responses, design) == flat(SAID)
    assert responses[-1]["status"] == "completed"
    assert responses[-1]["metadata"] == {"replay": "trip"}


@on_both_models
async def test_each_turn_is_said_in_its_turn(new_engine: NewEngine, settings: Settings) -> None:
    async with serving(engine=new_engine(), settings=settings) as server:
        responses = await hold(server, Design.CHAINED, **MEMBERS)

    assert [said_in(response["output"]) for response in responses] == SAID


@pytest.mark.slow
@on_both_models
async def test_the_tokens_are_the_same_in_all_designs(
    new_engine: NewEngine, settings: Settings
) -> None:
    tokens = {}
    for design in Design:
        async with serving(engine=new_engine(), settings=settings) as server:
            responses = await hold(server, design, **MEMBERS, include=[TOKEN_IDS])
        tokens[design] = [
            turn["token_ids"] for response in responses for turn in response["suspend:run"]["turns"]
        ]

    assert len(tokens[Design.APPEND]) == len(TURNS)
    for design in Design:
        assert tokens[design] == tokens[Design.APPEND]


async def test_as_much_is_forwarded_as_if_it_were_sampled(settings: Settings) -> None:
    async with serving(engine=weighted_engine(), settings=settings) as server:
        responses = await hold(server, Design.APPEND, **MEMBERS)
        metrics = await server.metrics()

    sampled = [response["usage"]["output_tokens"] for response in responses]
    assert metrics["suspend_tokens_sampled_total"] == sum(sampled)
    length = responses[-1]["usage"]["total_tokens"] - 1
    assert metrics["suspend_tokens_forwarded_total"] == length


@every_design
async def test_what_the_request_forces_makes_no_difference(
    design: Design, settings: Settings
) -> None:
    asked = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 2, "seed": 7}
    async with serving(engine=weighted_engine(), settings=settings) as server:
        responses = await hold(server, design, **(MEMBERS | asked))

    assert said_by(responses, design) == flat(SAID)


async def test_a_trace_without_tools_is_replayed_over_any_request(settings: Settings) -> None:
    async with serving(engine=weighted_engine(), settings=settings) as server:
        response = await post(server, input="Whatever.", metadata={"replay": "short"})

    assert text_in(response) == "Sun."


async def test_messages_may_come_with_the_outputs(settings: Settings) -> None:
    hurry = {"role": "user", "content": "Be quick."}
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.connect("append") as client,
    ):
        events = await client.create(**MEMBERS)
        events = await client.append(*map(output, calls_in(events)), hurry)
        events = await client.append(*map(output, calls_in(events)))

    assert said_in(events[-1]["response"]["output"]) == flat(SAID)


async def test_a_chain_may_go_on_where_a_suspended_run_was(settings: Settings) -> None:
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.connect("append") as client,
    ):
        events = await client.create(**MEMBERS)
        parent = events[-1]["response"]
        outputs = list(map(output, calls_in(events)))
        events = await client.create(previous_response_id=parent["id"], input=outputs, **MEMBERS)

    assert said_in(events[-1]["response"]["output"]) == SAID[1]


async def test_a_warm_up_is_replayed_by_what_follows_it(settings: Settings) -> None:
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.connect() as client,
    ):
        warm = (await client.create(generate=False, **MEMBERS))[-1]["response"]
        events = await client.follow(warm, QUESTION, **MEMBERS)

    assert said_in(events[-1]["response"]["output"]) == SAID[0]


# --- Side by side --------------------------------------------------------------------------------


async def test_requests_that_name_no_trace_are_sampled_beside_those_that_do(
    settings: Settings,
) -> None:
    async with serving(engine=scripted_engine(OSLO, "Sun."), settings=settings) as server:
        replayed, sampled, short = await asyncio.gather(
            hold(server, Design.APPEND, **MEMBERS),
            hold(server, Design.CHAINED),
            post(server, metadata={"replay": "short"}),
        )

    assert said_by(replayed, Design.APPEND) == flat(SAID)
    assert said_by(sampled, Design.CHAINED) == [
        ("get_weather", '{"city": "Oslo"}'),
        ("message", "Sun."),
    ]
    assert text_in(short) == "Sun."


@pytest.mark.slow
async def test_the_same_trace_may_be_replayed_several_times_at_once(settings: Settings) -> None:
    async with serving(engine=weighted_engine(), settings=settings) as server:
        runs = await asyncio.gather(*(hold(server, design, **MEMBERS) for design in Design))

    for design, responses in zip(Design, runs, strict=True):
        assert said_by(responses, design) == flat(SAID)


async def test_without_traces_the_metadata_is_only_metadata() -> None:
    async with serving("Sun.") as server:
        response = await post(server, metadata={"replay": "trip"})

    assert text_in(response) == "Sun."
    assert response["metadata"] == {"replay": "trip"}


async def test_other_metadata_replays_nothing(settings: Settings) -> None:
    async with serving(engine=scripted_engine("Sun."), settings=settings) as server:
        response = await post(server, metadata={"trace": "trip"})

    assert text_in(response) == "Sun."


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tour", "", "TRIP"])
async def test_an_unknown_trace_is_refused_over_http(name: str, settings: Settings) -> None:
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.http() as http,
    ):
        answer = await http.post("/v1/responses", json=BODY | {"metadata": {"replay": name}})

        error = answer.json()["error"]
        assert refusal(answer.status_code, error) == UNKNOWN
        assert f"expected the name of a trace, got {name!r}" in error["message"]
        assert steps_of(server.engine) == []


@pytest.mark.parametrize("dialect", ["append", "inject", "chained"])
async def test_an_unknown_trace_is_refused_and_the_socket_stays_usable(
    dialect: str, settings: Settings
) -> None:
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.connect(dialect) as client,
    ):
        await client.send("response.create", **BODY, metadata={"replay": "tour"})
        error = await client.error()
        events = await client.create(metadata={"replay": "short"})

    assert error_of(error) == UNKNOWN
    assert text_in(events[-1]["response"]) == "Sun."


async def test_a_suspended_run_is_not_given_up_for_a_trace_that_is_none(
    settings: Settings,
) -> None:
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.connect("append") as client,
    ):
        events = await client.create(**MEMBERS)
        await client.send("response.create", **BODY, metadata={"replay": "tour"})
        error = await client.error()
        events = await client.append(*map(output, calls_in(events)))
        events = await client.append(*map(output, calls_in(events)))

    assert error_of(error) == UNKNOWN
    assert said_in(events[-1]["response"]["output"]) == flat(SAID)


@pytest.mark.parametrize("query", ["", "?cache=off"])
async def test_a_turn_after_the_last_one_is_refused_over_http(
    query: str, settings: Settings
) -> None:
    design = Design.CACHED if query == "" else Design.STATELESS
    short: Event = {"metadata": {"replay": "short"}}
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.http() as http,
    ):
        [response] = await hold(server, design, **short)
        history = [QUESTION, *response["output"], QUESTION]
        body = BODY | short | {"input": history}
        answer = await http.post(f"/v1/responses{query}", json=body)

    error = answer.json()["error"]
    assert refusal(answer.status_code, error) == OVER
    assert "trace 'short' is over: all of its 1 turns were said" in error["message"]


@pytest.mark.parametrize("dialect", ["append", "inject", "chained"])
async def test_a_turn_after_the_last_one_is_refused_and_the_socket_stays_usable(
    dialect: str, settings: Settings
) -> None:
    short: Event = {"metadata": {"replay": "short"}}
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.connect(dialect) as client,
    ):
        last = (await client.create(**short))[-1]["response"]
        asked = {"previous_response_id": last["id"], "input": [QUESTION]}
        await client.send("response.create", **(BODY | short | asked))
        error = await client.error()
        events = await client.create(**short)

    assert error_of(error) == OVER
    assert text_in(events[-1]["response"]) == "Sun."


async def test_what_is_appended_to_a_trace_that_is_over_is_refused(settings: Settings) -> None:
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.connect("append") as client,
    ):
        await client.create(metadata={"replay": "short"})
        await client.send("response.append", input=[QUESTION])
        error = await client.error()
        events = await client.create(metadata={"replay": "short"})

    assert error_of(error) == OVER
    assert text_in(events[-1]["response"]) == "Sun."


async def test_nothing_of_a_refused_request_is_left(settings: Settings) -> None:
    async with (
        serving(engine=weighted_engine(), settings=settings) as server,
        server.connect() as client,
    ):
        await client.send("response.create", **BODY, metadata={"replay": "tour"})
        await client.error()

        assert server.engine.runs == ()
        assert (await server.metrics())["suspend_pre_inference_total"] == 0
