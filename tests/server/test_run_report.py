"""What a response tells of its run: turn by turn, in total, and which tokens there were."""

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import pytest
import pytest_asyncio

from sampler.run import RunState
from server.responder import TOKEN_IDS
from server.settings import Settings
from tests.server.designs import SUSPENDED, Design, hold
from tests.server.models import BOTH, OSLO, encoded, failing_at, held_at, inputs_of
from tests.server.running import (
    BODY,
    Client,
    Event,
    Running,
    output,
    serving,
    suspended,
    until,
)

SCRIPT = (OSLO, BOTH, "Sun.")
NUM_TURNS = len(SCRIPT)
TIMES = ("queue", "pre_inference", "prefill", "decode", "post_inference")
"""In seconds, of a turn and of all of them; the totals also have how long a run was suspended."""
COUNTS = ("input_tokens", "cached_tokens", "output_tokens")

Runs = Mapping[Design, Sequence[Event]]

every_design = pytest.mark.parametrize("design", Design, ids=lambda design: design.value)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runs() -> Runs:
    """The reports of a run of three turns in each design, each on a server of its own."""
    found = {}
    for design in Design:
        async with serving(*SCRIPT, settings=Settings()) as server:
            responses = await hold(server, design, include=[TOKEN_IDS])
        found[design] = [report_of(response) for response in responses]
    return found


def report_of(response: Event) -> Event:
    report: Event = response["suspend:run"]
    return report


def told_in(reports: Sequence[Event]) -> list[Event]:
    """Return all turns that ``reports`` tell of."""
    return [turn for report in reports for turn in report["turns"]]


def whole_runs(design: Design, runs: Runs) -> list[tuple[list[Event], Event]]:
    """Return the turns of each run that was held in ``design``, with its last report."""
    reports = runs[design]
    if design in SUSPENDED:
        return [(told_in(reports), reports[-1])]
    return [(told_in([report]), report) for report in reports]


# --- Turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("design", "numbers"),
    [
        (Design.APPEND, [1, 1, 1]),
        (Design.INJECT, [3]),
        (Design.CHAINED, [1, 1, 1]),
        (Design.CACHED, [1, 1, 1]),
        (Design.STATELESS, [1, 1, 1]),
    ],
)
def test_a_closing_event_tells_of_the_turns_that_none_before_it_has_told_of(
    design: Design, numbers: list[int], runs: Runs
) -> None:
    assert [len(report["turns"]) for report in runs[design]] == numbers


@every_design
def test_the_turns_come_to_the_totals(design: Design, runs: Runs) -> None:
    for turns, report in whole_runs(design, runs):
        assert report["segments"] == len(turns)
        assert report["tokens_forwarded"] == sum(turn["tokens_forwarded"] for turn in turns)
        for name in COUNTS:
            assert report["usage"][name] == sum(turn[name] for turn in turns)
        for name in TIMES:
            total = sum(turn[name] for turn in turns)
            assert report["time_info"][name] == pytest.approx(total, abs=1e-9)


@every_design
def test_no_time_is_negative(design: Design, runs: Runs) -> None:
    for report in runs[design]:
        assert min(report["time_info"].values()) >= 0
        assert min(turn[name] for turn in report["turns"] for name in TIMES) >= 0


@every_design
def test_what_comes_before_the_first_token_is_its_time(design: Design, runs: Runs) -> None:
    for turn in told_in(runs[design]):
        before = turn["queue"] + turn["pre_inference"] + turn["prefill"]
        assert turn["time_to_first_token"] == pytest.approx(before, abs=1e-9)
        assert min(turn["pre_inference"], turn["prefill"], turn["post_inference"]) > 0


@every_design
def test_a_turn_forwards_what_was_not_cached(design: Design, runs: Runs) -> None:
    for turn in told_in(runs[design]):
        length = turn["input_tokens"] + turn["output_tokens"] - 1
        assert turn["tokens_forwarded"] == length - turn["cached_tokens"]


@pytest.mark.parametrize("design", [Design.CHAINED, Design.CACHED, Design.STATELESS])
def test_only_a_run_that_was_suspended_has_a_time_for_it(design: Design, runs: Runs) -> None:
    assert runs[Design.APPEND][-1]["time_info"]["suspended"] > 0
    assert [report["time_info"]["suspended"] for report in runs[design]] == [0] * NUM_TURNS


async def test_outputs_that_come_before_the_turn_ends_make_no_time_negative() -> None:
    last_step = len(encoded(OSLO)) + 1  # in which the turn is ended
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        with held_at(last_step, server.engine) as model:
            await client.send("response.create", **BODY)
            [call] = await client.calls(1)
            response_id = client.streams[0][0]["response"]["id"]
            await client.send("response.inject", response_id=response_id, input=[output(call)])
            await client.until_taken()
            model.release()
        events = await client.segment()

    report = report_of(events[-1]["response"])
    assert report["segments"] == 2
    assert min(report["time_info"].values()) >= 0
    assert min(turn[name] for turn in report["turns"] for name in TIMES) >= 0


# --- Waiting -------------------------------------------------------------------------------------


async def hold_up(client: Client, server: Running, *lanes: str | None) -> float:
    """Ask for a response on each of ``lanes`` and hold the model at the first for a while; return
    for how many seconds the last one has waited then, at least."""
    with held_at(1, server.engine) as model:
        await client.send("response.create", **BODY, stream_id=lanes[0])
        await model.reached.wait()
        await client.send("response.create", **BODY, stream_id=lanes[1])
        await client.until_taken()
        taken_at = time.monotonic()
        await until(lambda: time.monotonic() - taken_at > 0.05)
        waited = time.monotonic() - taken_at
        model.release()
    return waited


@pytest.mark.parametrize(
    "lanes", [("a", "a"), ("a", "b")], ids=["for its lane", "for the connection"]
)
async def test_a_response_that_waits_behind_another_is_queued_and_not_worked_on(
    lanes: tuple[str, str],
) -> None:
    settings = Settings(recent_responses=0, max_in_flight=1)
    async with serving("Sun.", settings=settings) as server, server.connect() as client:
        waited = await hold_up(client, server, *lanes)
        await client.segment()
        events = await client.segment()

    [turn] = report_of(events[-1]["response"])["turns"]
    before = turn["queue"] + turn["pre_inference"] + turn["prefill"]
    assert turn["queue"] >= waited
    assert turn["time_to_first_token"] == pytest.approx(before, abs=1e-9)


async def test_a_request_that_waits_for_the_model_is_queued() -> None:
    settings = Settings(recent_responses=0)
    async with (
        serving("Sun.", settings=settings) as server,
        server.connect() as first,
        server.connect() as second,
    ):
        with held_at(1, server.engine) as model:
            await first.send("response.create", **BODY)
            await model.reached.wait()
            await second.send("response.create", **BODY)
            await until(lambda: len(server.engine.runs) == 2)
            waits_since = time.monotonic()
            await until(lambda: time.monotonic() - waits_since > 0.05)
            waited = time.monotonic() - waits_since
            model.release()
            await first.segment()
            events = await second.segment()

    [turn] = report_of(events[-1]["response"])["turns"]
    assert turn["queue"] + turn["prefill"] >= waited
    assert turn["queue"] >= 0


# --- Ends that are none --------------------------------------------------------------------------


async def test_a_turn_that_is_cut_short_is_told_of() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        events = await client.create(max_output_tokens=1)

    report = report_of(events[-1]["response"])
    assert events[-1]["type"] == "response.incomplete"
    assert [turn["output_tokens"] for turn in report["turns"]] == [1]
    assert min(report["time_info"].values()) >= 0


@pytest.mark.parametrize("step", [1, 2], ids=["prefill", "decode"])
async def test_a_turn_that_fails_is_told_of(step: int) -> None:
    async with serving("Sun.") as server, server.connect() as client:
        with failing_at(step, server.engine):
            events = await client.create()

    report = report_of(events[-1]["response"])
    assert events[-1]["type"] == "response.failed"
    assert [turn["output_tokens"] for turn in report["turns"]] == [step - 1]
    assert min(report["time_info"].values()) >= 0


async def test_a_response_that_fails_when_it_goes_on_tells_of_that_turn_alone() -> None:
    async with suspended() as (server, client, call):
        with failing_at(1, server.engine):
            events = await client.append(output(call))

    report = report_of(events[-1]["response"])
    assert report["segments"] == 2
    assert len(report["turns"]) == 1
    assert min(report["time_info"].values()) >= 0


async def test_a_response_that_is_given_up_tells_of_its_turns() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        await client.send("response.create", **BODY)
        await client.calls(1)
        await until(lambda: {run.state for run in server.engine.runs} == {RunState.SUSPENDED})
        await client.send("response.create", **BODY, tool_choice="none")
        given_up = await client.segment()
        await client.segment()

    report = report_of(given_up[-1]["response"])
    assert len(report["turns"]) == report["segments"] == 1
    assert min(report["time_info"].values()) >= 0


async def test_a_response_that_is_cancelled_tells_of_its_turn() -> None:
    async with serving("Sun." * 3) as server, server.http() as http:
        with held_at(2, server.engine) as model:
            queued = (await http.post("/v1/responses", json=BODY | {"background": True})).json()
            await model.reached.wait()
            async with asyncio.TaskGroup() as tasks:
                cancel = f"/v1/responses/{queued['id']}/cancel"
                answer = tasks.create_task(http.post(cancel))
                await until(lambda: server.engine.runs[0].wanted_stop is not None)
                model.release()
        cancelled = answer.result().json()

    assert cancelled["status"] == "cancelled"
    assert len(report_of(cancelled)["turns"]) == 1


# --- Tokens --------------------------------------------------------------------------------------


def tokens_in(reports: Sequence[Event]) -> list[Event]:
    return [turn["token_ids"] for turn in told_in(reports)]


def test_designs_that_sample_the_same_from_the_same_can_be_told_by_their_tokens(
    runs: Runs,
) -> None:
    tokens = tokens_in(runs[Design.APPEND])

    assert len({token_ids["context_digest"] for token_ids in tokens}) == NUM_TURNS
    for design in Design:
        assert tokens_in(runs[design]) == tokens


@every_design
def test_as_many_tokens_are_told_of_as_were_sampled(design: Design, runs: Runs) -> None:
    for turn in told_in(runs[design]):
        assert len(turn["token_ids"]["sampled"]) == turn["output_tokens"]


async def test_the_tokens_are_those_that_the_model_knows_of() -> None:
    async with serving(OSLO) as server, server.connect() as client:
        events = await client.create(include=[TOKEN_IDS])
        known = inputs_of(server.engine)

    [told] = tokens_in([report_of(events[-1]["response"])])
    num_read = events[-1]["response"]["usage"]["input_tokens"]
    read = array("I", known[:num_read]).tobytes()
    assert told["context_digest"] == blake2b(read, digest_size=16).hexdigest()
    assert told["sampled"][:-1] == known[num_read:]


async def test_another_context_has_another_digest() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        first = await client.create(include=[TOKEN_IDS])
        other = await client.create(include=[TOKEN_IDS], input="Is it dry in Rome?")

    tokens = tokens_in([report_of(events[-1]["response"]) for events in (first, other)])
    assert tokens[0]["context_digest"] != tokens[1]["context_digest"]
    assert tokens[0]["sampled"] == tokens[1]["sampled"]


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
async def test_nobody_is_told_of_tokens_who_does_not_ask(include: list[str]) -> None:
    async with suspended() as (_, client, call):
        first = client.streams[0][-1]["response"]
        last = (await client.append(output(call)))[-1]["response"]
        other = (await client.create(tool_choice="none", include=include))[-1]["response"]

    for response in (first, last, other):
        assert all("token_ids" not in turn for turn in told_in([report_of(response)]))
