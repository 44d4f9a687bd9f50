"""Lanes: named streams of responses on one connection, side by side."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from server.settings import Settings
from tests.server.http_client import cached_tokens, context_length
from tests.server.models import OSLO, context_text, held_at
from tests.server.running import (
    BODY,
    CLOSING,
    TERMINAL,
    Client,
    Event,
    calls_in,
    output,
    serving,
    text_in,
    until,
)

QUESTION: Event = {"role": "user", "content": BODY["input"]}
LONG = "Rain." * 12


async def until_closed(client: Client, num_streams: int) -> list[Event]:
    """Receive until so many streams are closed, and return all that came."""
    events: list[Event] = []
    while [event["type"] in CLOSING for event in events].count(True) < num_streams:
        events.append(await client.receive())
        assert events[-1]["type"] != "error", events[-1]
    return events


def streams_of(client: Client, lane: str | None) -> list[list[Event]]:
    """Return the streams of a lane, in the order in which they began."""
    return [stream for stream in client.streams if stream[0].get("stream_id") == lane]


def response_of(stream: Sequence[Event]) -> Event:
    response: Event = stream[-1]["response"]
    return response


async def follow_on(client: Client, lane: str | None, parent: Event, **members: Any) -> None:
    """Ask on a lane for a response that follows ``parent``, and wait for nothing."""
    asked = {"previous_response_id": parent["id"], "input": [QUESTION], "store": False}
    await client.send("response.create", **(BODY | asked | {"stream_id": lane} | members))


# --- Names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "agent-1.main_A", "7", "x" * 256])
async def test_all_that_a_lane_says_carries_its_name(name: str) -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create(stream_id=name, store=False)
        await follow_on(client, name, response_of(first), input=[output(calls_in(first)[0])])
        last = await client.segment()

        assert {event["stream_id"] for event in [*first, *last]} == {name}


@pytest.mark.parametrize("name", [None, ...], ids=["null", "absent"])
async def test_the_default_lane_has_no_name_anywhere(name: object) -> None:
    async with serving("Sun.") as server, server.connect() as client:
        members = {} if name is ... else {"stream_id": name}
        events = await client.create(**members)
        await client.send("response.create", **BODY, temperature=5)
        error = await client.error()

        assert not any("stream_id" in event for event in [*events, error])


@pytest.mark.parametrize("name", ["", "a b", "ä", "a/b", "a\n", "x" * 257, 7, True, ["a"], {}])
async def test_a_name_that_is_none_is_refused_and_not_repeated(name: object) -> None:
    async with serving("Sun.") as server, server.connect() as client:
        await client.send("response.create", **BODY, stream_id=name)
        error = await client.error()
        events = await client.create()

        assert error["status"] == 400
        assert error["error"]["code"] == "invalid_stream_id"
        assert error["error"]["param"] == "stream_id"
        assert "stream_id" not in error
        assert text_in(response_of(events)) == "Sun."


@pytest.mark.parametrize(
    "members",
    [{"temperature": 5}, {"previous_response_id": "resp_0"}, {"input": [output("call_0")]}],
    ids=["value", "parent", "items"],
)
async def test_an_error_carries_the_name_of_its_lane(members: Event) -> None:
    async with serving("Sun.") as server, server.connect() as client:
        await client.send("response.create", **(BODY | members), stream_id="a")
        error = await client.error()

        assert error["stream_id"] == "a"


async def test_another_lane_too_many_is_refused_and_the_others_go_on() -> None:
    async with (
        serving("Sun.", settings=Settings(recent_responses=0, max_lanes=2)) as server,
        server.connect() as client,
    ):
        for name in ("a", "b"):
            await client.create(stream_id=name)
        await client.send("response.create", **BODY, stream_id="c")
        error = await client.error()
        await client.create(stream_id="a")
        await client.create()  # the default lane is not counted

        assert error["status"] == 400
        assert error["error"]["code"] == "websocket_stream_limit_reached"
        assert error["error"]["param"] == "stream_id"
        assert error["stream_id"] == "c"


async def test_a_lane_has_no_lineage_of_its_own() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        await client.create(stream_id="a", store=False)
        again = response_of(await client.create(stream_id="a", store=False))

        assert again["previous_response_id"] is None
        assert text_in(again) == "Rain."


# --- Order ---------------------------------------------------------------------------------------


async def test_responses_of_one_lane_come_in_order_and_never_overlap() -> None:
    async with serving("Rain.") as server, server.connect() as client:
        for user in "abcd":
            await client.send("response.create", **BODY, user=user, stream_id="x")
        events = await until_closed(client, 4)

        responses = [event["response"] for event in events if "response" in event]
        assert [response["user"] for response in responses] == list("aaabbbcccddd")


async def test_responses_of_two_lanes_overlap() -> None:
    async with serving(LONG) as server, server.connect() as client:
        with held_at(3, server.engine) as model:
            await client.send("response.create", **BODY, stream_id="a")
            await model.reached.wait()
            await client.send("response.create", **BODY, stream_id="b")
            await until(lambda: len(server.engine.runs) == 2)
            model.release()
            events = await until_closed(client, 2)

        begins = [i for i, event in enumerate(events) if event["type"] == "response.in_progress"]
        ends = [i for i, event in enumerate(events) if event["type"] in TERMINAL]
        assert max(begins) < min(ends)


async def test_numbers_are_of_each_response_however_they_are_interleaved() -> None:
    async with serving(LONG) as server, server.connect() as client:
        with held_at(3, server.engine) as model:
            for lane in ("a", "b", None):
                await client.send("response.create", **BODY, stream_id=lane)
            await model.reached.wait()
            await until(lambda: len(server.engine.runs) == 3)
            model.release()
            events = await until_closed(client, 3)

        lanes = [event.get("stream_id") for event in events]
        changes = sum(one != other for one, other in pairwise(lanes))
        assert changes > 10
        for lane in ("a", "b", None):
            (stream,) = streams_of(client, lane)
            numbers = [event["sequence_number"] for event in stream]
            assert numbers == list(range(len(stream)))
            assert text_in(response_of(stream)) == LONG


async def test_one_response_too_many_in_flight_waits_and_is_not_refused() -> None:
    async with (
        serving(LONG, settings=Settings(recent_responses=0, max_in_flight=2)) as server,
        server.connect() as client,
    ):
        with held_at(3, server.engine) as model:
            for lane in ("a", "b", "c"):
                await client.send("response.create", **BODY, stream_id=lane)
            await model.reached.wait()
            await until(lambda: len(server.engine.runs) == 3)
            model.release()
            events = await until_closed(client, 3)

        ends = [event["stream_id"] for event in events if event["type"] in TERMINAL]
        begins = [event["stream_id"] for event in events if event["type"] == "response.created"]
        first_end = next(i for i, event in enumerate(events) if event["type"] in TERMINAL)
        assert set(begins) == set(ends) == {"a", "b", "c"}
        begun = [event for event in events[:first_end] if event["type"] == "response.created"]
        assert len(begun) == 2


async def test_a_response_that_waits_for_outputs_is_not_in_flight() -> None:
    async with (
        serving(OSLO, "Sun.", settings=Settings(recent_responses=0, max_in_flight=1)) as server,
        server.connect("append") as client,
    ):
        first = await client.create(stream_id="a")
        other = await client.create(stream_id="b", tool_choice="none")
        last = await client.append(output(calls_in(first)[0]), stream_id="a")

        assert first[-1]["type"] == "response.done"
        assert other[-1]["type"] == "response.completed"
        assert text_in(response_of(last)) == "Sun."


@pytest.mark.parametrize("lane", [None, "a"])
async def test_too_many_creates_that_wait_are_refused(lane: str | None) -> None:
    async with (
        serving("Rain.", settings=Settings(recent_responses=0, max_queued_creates=2)) as server,
        server.connect() as client,
    ):
        for user in "abcd":
            await client.send("response.create", **BODY, user=user, stream_id=lane)
        await client.send("response.create", **BODY, user="e", stream_id="other")
        while not client.errors:
            await client.receive()
        while sum(stream[-1]["type"] in TERMINAL for stream in client.streams) < 4:
            await client.receive()

        (error,) = client.errors
        assert error["status"] == 429
        assert error["error"]["code"] == "rate_limit_exceeded"
        assert error.get("stream_id") == lane
        users = [stream[0]["response"]["user"] for stream in streams_of(client, lane)]
        assert users == ["a", "b", "c"]


async def test_creates_that_are_wrong_wait_like_others() -> None:
    async with (
        serving(LONG, settings=Settings(recent_responses=0, max_queued_creates=1)) as server,
        server.connect() as client,
    ):
        with held_at(3, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            for temperature in (5, 6):
                await client.send("response.create", **BODY, temperature=temperature)
            while not client.errors:
                await client.receive()
            model.release()
            await client.segment()
        await client.error()

        assert [error["status"] for error in client.errors] == [429, 400]


# --- Forks ---------------------------------------------------------------------------------------


async def test_a_lane_may_go_on_from_another_lane_s_response() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        parent = response_of(await client.create(store=False))
        for lane in ("a", "b", None):
            await follow_on(client, lane, parent, input=f"And on {lane}?")
            response = response_of(await client.segment())

            assert text_in(response) == "Sun."
            assert response["previous_response_id"] == parent["id"]
            assert cached_tokens(response) >= context_length(parent)


async def test_forks_share_what_was_computed_and_part_from_there() -> None:
    async with serving("Rain.", "Sun.", "Rain.") as server, server.connect() as client:
        parent = response_of(await client.create(store=False))
        told = {"a": "And tomorrow?", "b": "And in Bergen?"}
        before = server.engine.counters.tokens_forwarded
        for lane, text in told.items():
            await follow_on(client, lane, parent, input=text)
            await client.segment()
        after, contexts = server.engine.counters.tokens_forwarded, {}
        for lane in told:
            await follow_on(client, lane, response_of(streams_of(client, lane)[-1]))
            await client.segment()
            contexts[lane] = context_text(server.engine)

        forks = [response_of(streams_of(client, lane)[0]) for lane in told]
        assert cached_tokens(forks[0]) == context_length(parent)
        assert after - before == sum(context_length(fork) - cached_tokens(fork) for fork in forks)
        for lane, text in told.items():
            assert [other for other in told.values() if other in contexts[lane]] == [text]


async def test_a_fork_in_progress_keeps_its_parent_though_the_lane_goes_on() -> None:
    async with serving("Rain.", LONG, "Sun.") as server, server.connect() as client:
        parent = response_of(await client.create(stream_id="a", store=False))
        with held_at(2, server.engine) as model:
            await follow_on(client, "b", parent, user="fork")
            while client.streams[-1][-1]["type"] != "response.in_progress":
                await client.receive()
            await model.reached.wait()
            await follow_on(client, "a", parent, instructions="Be brief.", tools=[])
            await until(lambda: len(server.engine.runs) == 2)
            model.release()
            await until_closed(client, 2)

        ((fork,), (_, other)) = streams_of(client, "b"), streams_of(client, "a")
        assert text_in(response_of(fork)) == text_in(response_of(other)) == LONG
        assert cached_tokens(response_of(fork)) == context_length(parent)
        assert response_of(fork)["usage"]["input_tokens"] > parent["usage"]["total_tokens"]


async def test_a_fork_that_waits_for_its_turn_keeps_its_parent_too() -> None:
    settings = Settings(recent_responses=0, max_in_flight=1)
    async with serving("Rain.", LONG, settings=settings) as server, server.connect() as client:
        parent = response_of(await client.create(stream_id="a", store=False))
        with held_at(2, server.engine) as model:
            await client.send("response.create", **BODY, stream_id="a")  # takes its place
            await model.reached.wait()
            await follow_on(client, "b", parent)
            await until(lambda: len(server.engine.runs) == 2)
            model.release()
            await until_closed(client, 2)

        (fork,) = streams_of(client, "b")
        assert cached_tokens(response_of(fork)) == context_length(parent)


async def test_a_fork_of_what_its_lane_has_replaced_is_refused() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        parent = response_of(await client.create(stream_id="a", store=False))
        await client.create(stream_id="a", store=False)
        await follow_on(client, "b", parent)
        error = await client.error()

        assert error["error"]["code"] == "previous_response_not_found"
        assert error["stream_id"] == "b"


# --- Suspended lanes -----------------------------------------------------------------------------


async def test_each_lane_may_hold_a_suspended_response() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        firsts = {lane: await client.create(stream_id=lane) for lane in ("a", "b", None)}
        num_suspended = (await server.metrics())["suspend_runs{suspended}"]
        lasts = {
            lane: await client.append(output(calls_in(first)[0]), stream_id=lane)
            for lane, first in reversed(firsts.items())
        }

        assert num_suspended == 3
        for lane, first in firsts.items():
            assert lasts[lane][-1]["response"]["id"] == first[-1]["response"]["id"]
            assert text_in(response_of(lasts[lane])) == "Sun."


async def test_an_append_to_another_lane_finds_nothing_there() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        (call,) = calls_in(await client.create(stream_id="a"))
        await client.send("response.append", input=[output(call)], stream_id="b")
        error = await client.error()
        last = await client.append(output(call), stream_id="a")

        assert error["error"]["code"] == "no_suspended_response"
        assert error["stream_id"] == "b"
        assert text_in(response_of(last)) == "Sun."
