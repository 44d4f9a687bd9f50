"""Several creates on one socket: in order, one at a time, and what they do to a suspended run."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from sampler.run import RunState
from tests.server.models import OSLO, context_of, held_at
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
        (abandoned,) = server.engine.runs
        held = await server.metrics()
        again = await client.create(tool_choice="none")
        freed = await server.metrics()

        assert held["suspend_runs{suspended}"] == 1
        assert held["suspend_kv_tokens"] > 0
        assert abandoned.state is RunState.CANCELLED
        assert freed["suspend_runs{suspended}"] == 0
        assert freed["suspend_kv_tokens"] == again[-1]["response"]["usage"]["total_tokens"] - 1


async def test_a_create_after_a_suspended_run_is_answered_as_any_other() -> None:
    async with suspended() as (server, client, call):
        first_context = context_of(server.engine)
        again = await client.create()

        assert context_of(server.engine) == first_context
        assert again[-1]["response"]["id"] != client.streams[0][0]["response"]["id"]
        assert calls_in(again)[0]["call_id"] != call["call_id"]


async def test_a_create_computes_nothing_again_that_the_suspended_run_has_computed() -> None:
    async with suspended() as (_, client, _):
        again = await client.create()

        usage = again[-1]["response"]["usage"]
        # The last token of the prompt is forwarded once more, for its logits.
        assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1


@pytest.mark.slow
async def test_two_hundred_runs_suspended_and_abandoned_leave_no_more_than_the_last() -> None:
    async with serving(OSLO) as server, server.connect("append") as client:
        for _ in range(200):
            await client.create()
        metrics = await server.metrics()

        usage = client.streams[-1][-1]["response"]["usage"]
        assert len(server.engine.runs) == 1
        assert metrics["suspend_kv_tokens"] == usage["total_tokens"] - 1
        assert metrics["suspend_pre_inference_total"] == 200
        assert metrics["suspend_post_inference_total"] == 199


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
            await client.until_taken()
            model.release()
            await client.segment()
        second = await client.segment()
        last = await client.append(output(calls_in(second)[0]))

        assert second[0]["response"]["user"] == "second"
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_create_that_came_during_sampling_abandons_the_run_in_the_append_dialect() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        with held_at(1, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            await client.send("response.create", **BODY, user="second")
            await client.until_taken()
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
        last = await client.segment()
        error = await client.error()

        assert last[-1]["type"] == "response.completed"
        assert error["error"]["param"] == "input"


async def test_suspended_runs_of_many_connections_do_not_hinder_each_other() -> None:
    async with serving(OSLO, "Sun.") as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(server.connect("append")) for _ in range(10)]
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


async def test_appends_beyond_what_a_lane_holds_are_refused() -> None:
    async with serving("Sun.") as server, server.connect("append") as client:
        with held_at(1, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            for _ in range(100):
                await client.send("response.append", input=[{"role": "user", "content": "a"}])
            *_, error = await client.up_to("error")
            client.abort()  # or all the others would be answered

        assert error["error"]["code"] == "rate_limit_exceeded"
        assert error["status"] == 429
