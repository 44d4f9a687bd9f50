"""Several creates on one socket: in order, one at a time, and what they do to a suspended run."""

import asyncio
from contextlib import AsyncExitStack

from sampler.run import RunState
from tests.server.models import OSLO, held_at, inputs_of
from tests.server.running import (
    BODY,
    CLOSING,
    calls_in,
    output,
    serving,
    suspended,
    text_in,
)


async def test_a_create_abandons_a_suspended_run_and_frees_what_it_held() -> None:
    async with suspended() as (server, client, _):
        held = await server.metrics()
        with held_at(1, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            freed = await server.metrics()
            model.release()
            await client.segment()

        assert held["suspend_runs{suspended}"] == 1
        assert held["suspend_kv_tokens"] > 0
        assert freed["suspend_runs{suspended}"] == 0
        assert freed["suspend_kv_tokens"] == 0


async def test_a_create_after_a_suspended_run_is_answered_as_any_other() -> None:
    async with suspended() as (server, client, call):
        first_inputs = inputs_of(server.engine)
        again = await client.create()

        assert inputs_of(server.engine) == 2 * first_inputs
        assert again[-1]["response"]["id"] != client.streams[0][0]["response"]["id"]
        assert calls_in(again)[0]["call_id"] != call["call_id"]


async def test_an_abandoned_call_cannot_be_answered() -> None:
    async with suspended() as (_, client, call):
        await client.create()
        await client.send("response.append", input=[output(call)])
        error = await client.error()

        assert error["error"]["code"] == "unknown_call_id"


async def test_a_create_is_answered_though_the_one_before_it_was_suspended_after_it_came() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        with held_at(1, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            await client.send("response.create", **BODY, user="second")
            await client.send_raw("{}")
            while not client.errors:  # until the second was taken
                await client.receive()
            model.release()
            await client.segment()
        second = await client.segment()
        last = await client.append(output(calls_in(second)[0]))

        assert second[0]["response"]["user"] == "second"
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_create_that_came_during_sampling_abandons_the_run_in_the_append_dialect() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect(append=True) as client:
        with held_at(1, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            await client.send("response.create", **BODY, user="second")
            await client.send_raw("{}")
            while not client.errors:
                await client.receive()
            model.release()
            first = await client.segment()
        second = await client.segment()

        assert first[-1]["type"] == "response.done"
        assert second[0]["response"]["user"] == "second"
        assert [run.state for run in server.engine.runs] == [RunState.SUSPENDED]


async def test_creates_sent_back_to_back_are_answered_in_order_and_never_overlap() -> None:
    users = ["a", "b", "c", "d"]
    async with serving("Rain.Sun.") as server, server.connect() as client:
        for user in users:
            await client.send("response.create", **BODY, user=user)
        events = [event for _ in users for event in await client.segment()]

        # A stream of the client begins with each response.created; the grammar checks the rest.
        assert [stream[0]["response"]["user"] for stream in client.streams] == users
        assert [event["type"] in CLOSING for event in events].count(True) == len(users)


async def test_two_creates_sent_to_a_suspended_run_are_both_answered() -> None:
    async with suspended() as (_, client, _):
        for user in ("a", "b"):
            await client.send("response.create", **BODY, user=user, tool_choice="none")
        for _ in range(2):
            events = await client.segment()
            assert events[-1]["type"] == "response.completed"

        assert [stream[0]["response"]["user"] for stream in client.streams[1:]] == ["a", "b"]


async def test_an_append_behind_a_create_finds_nothing_to_resume() -> None:
    async with suspended() as (_, client, call):
        await client.send("response.create", **BODY, tool_choice="none")
        await client.send("response.append", input=[output(call)])
        while not client.errors:
            await client.receive()
        if client.streams[-1][-1]["type"] not in CLOSING:
            await client.segment()

        assert client.errors[0]["error"]["code"] in (
            "no_suspended_response",
            "response_in_progress",
        )


async def test_suspended_runs_of_many_connections_do_not_hinder_each_other() -> None:
    async with serving(OSLO, "Sun.") as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(server.connect(append=True)) for _ in range(10)]
        first = await asyncio.gather(*(client.create() for client in clients))
        states = {run.state for run in server.engine.runs}
        last = await asyncio.gather(
            *(
                client.append(output(calls_in(events)[0]))
                for client, events in zip(clients, first, strict=True)
            )
        )

        assert states == {RunState.SUSPENDED}
        assert {text_in(events[-1]["response"]) for events in last} == {"Sun."}
