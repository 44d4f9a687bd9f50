"""``previous_response_id`` over HTTP: what it names is in the store, and nowhere else."""

import asyncio
from pathlib import Path

import pytest
import pytest_asyncio

from server.settings import Settings
from tests.server.http_client import (
    cached_tokens,
    context_length,
    post,
    post_refused,
    post_streamed,
)
from tests.server.models import (
    BOTH,
    OSLO,
    encoded,
    failing_at,
    held_at,
    inputs_of,
    scripted_engine,
    spelled_out,
)
from tests.server.refusals import Refusal, refusal
from tests.server.running import BODY, Event, Running, calls_in, output, serving, text_in, until

KEEPING = Settings(recent_responses=4)
NOT_FOUND = Refusal(400, "previous_response_not_found", "previous_response_id")

# Two rounds of calls, said in tokens that nobody would choose.
SCRIPT = ((*spelled_out("Rain."), *encoded(BOTH)), (*spelled_out("Rain."), *encoded(OSLO)), "Sun.")


def outputs_for(response: Event) -> list[Event]:
    """Return outputs for the calls of ``response``, the last first."""
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return [output(call, f"{call['arguments']} is dry") for call in reversed(calls)]


async def follow(server: Running, parent: Event) -> Event:
    """Return the response to the outputs of the calls of ``parent``."""
    return await post(server, previous_response_id=parent["id"], input=outputs_for(parent))


async def three_hops(server: Running) -> list[Event]:
    """Return the responses of an agent run with two rounds of calls."""
    first = await post(server)
    second = await follow(server, first)
    return [first, second, await follow(server, second)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def read_suspended() -> list[int]:
    """What the model reads where the run is suspended at each round of calls."""
    engine = scripted_engine(*SCRIPT)
    async with serving(engine=engine) as server, server.connect("append") as client:
        events = await client.create()
        while calls := calls_in(events):
            outputs = [output(call, f"{call['arguments']} is dry") for call in calls]
            events = await client.append(*outputs)
    return inputs_of(engine)


# --- Parents that are there ----------------------------------------------------------------------


async def test_a_chain_reads_what_a_suspended_run_reads(read_suspended: list[int]) -> None:
    async with serving(engine=scripted_engine(*SCRIPT), settings=KEEPING) as server:
        first, second, third = await three_hops(server)

        assert inputs_of(server.engine) == read_suspended
        assert cached_tokens(second) == context_length(first)
        assert cached_tokens(third) == context_length(second)
        assert third["previous_response_id"] == second["id"]
        assert text_in(third) == "Sun."


async def test_a_chain_keeps_the_sampled_tokens_where_no_cache_is_kept(
    read_suspended: list[int],
) -> None:
    async with serving(engine=scripted_engine(*SCRIPT)) as server:
        *_, last = await three_hops(server)

        num_read = last["usage"]["input_tokens"]
        assert cached_tokens(last) == 0
        assert (
            inputs_of(server.engine)[-context_length(last) :][:num_read]
            == (read_suspended[:num_read])
        )


async def test_a_chain_keeps_the_sampled_tokens_when_the_server_starts_again(
    tmp_path: Path, read_suspended: list[int]
) -> None:
    settings = Settings(recent_responses=4, data_dir=tmp_path)
    async with serving(engine=scripted_engine(*SCRIPT), settings=settings) as server:
        first = await post(server)
    async with serving(engine=scripted_engine(*SCRIPT), settings=settings) as server:
        second = await follow(server, first)

        num_read = second["usage"]["input_tokens"]
        assert inputs_of(server.engine)[:num_read] == read_suspended[:num_read]


async def test_a_streamed_response_can_be_followed_at_once() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        parent = (await post_streamed(server))[-1]["response"]
        events = await post_streamed(
            server, previous_response_id=parent["id"], input=outputs_for(parent)
        )

        assert cached_tokens(events[-1]["response"]) == context_length(parent)


async def test_a_response_can_be_followed_in_two_ways() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        parent = await post(server)
        followers = [await follow(server, parent) for _ in range(2)]

        assert [text_in(follower) for follower in followers] == ["Sun.", "Sun."]
        assert all(cached_tokens(each) >= context_length(parent) for each in followers)


async def test_a_response_that_was_cut_short_can_be_followed() -> None:
    async with serving("Sun.Sun.", "Rain.", settings=KEEPING) as server:
        parent = await post(server, max_output_tokens=1)
        follower = await post(server, previous_response_id=parent["id"], input="And now?")

        assert parent["status"] == "incomplete"
        assert text_in(follower) == "Rain."


@pytest.mark.parametrize("kind", ["whole", "by reference"])
async def test_what_the_parent_said_may_be_said_again(kind: str) -> None:
    """Codex 0.99 echoes the calls beside the id."""
    async with serving(f"Let me look.{OSLO}", "Sun.", settings=KEEPING) as server:
        parent = await post(server)
        echo = [
            item if kind == "whole" else {"type": "item_reference", "id": item["id"]}
            for item in parent["output"]
        ]
        follower = await post(
            server, previous_response_id=parent["id"], input=[*echo, *outputs_for(parent)]
        )

        assert cached_tokens(follower) == context_length(parent)
        assert follower["usage"]["input_tokens"] == await length_of_a_plain_follower()


async def length_of_a_plain_follower() -> int:
    async with serving(f"Let me look.{OSLO}", "Sun.") as server:
        follower = await follow(server, await post(server))
        return int(follower["usage"]["input_tokens"])


async def test_neither_instructions_nor_tools_are_inherited() -> None:
    async with serving("Rain.", "Sun.", settings=KEEPING) as server:
        parent = await post(server, instructions="Be brief.")
        plain = await post(server, previous_response_id=parent["id"], input="?", tools=[])
        history = [{"role": "user", "content": BODY["input"]}, *parent["output"]]
        asked = {"role": "user", "content": "?"}
        fresh = await post(server, input=[*history, asked], tools=[])

        assert plain["instructions"] is None
        assert plain["tools"] == []
        assert plain["usage"]["input_tokens"] == fresh["usage"]["input_tokens"]


async def test_followers_may_come_at_once() -> None:
    async with serving(OSLO, "Sun.", settings=Settings(recent_responses=1)) as server:
        parent = await post(server)
        followers = await asyncio.gather(*(follow(server, parent) for _ in range(4)))

        assert [text_in(follower) for follower in followers] == ["Sun."] * 4


async def test_a_follower_whose_client_leaves_costs_the_parent_nothing() -> None:
    async with serving(OSLO, "Sun.Sun.", settings=KEEPING) as server:
        parent = await post(server)
        following: Event = {"previous_response_id": parent["id"], "input": outputs_for(parent)}
        with held_at(2, server.engine) as model:
            async with server.http() as http:
                leaving = asyncio.create_task(http.post("/v1/responses", json=BODY | following))
                await model.reached.wait()
                leaving.cancel()
            model.release()
        await until(lambda: server.num_requests == 0)
        follower = await follow(server, parent)

        assert text_in(follower) == "Sun.Sun."
        assert cached_tokens(follower) >= context_length(parent)


async def test_a_follower_that_fails_costs_the_parent_nothing() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        parent = await post(server)
        with failing_at(2, server.engine):
            following: Event = {"previous_response_id": parent["id"], "input": outputs_for(parent)}
            failure = await post_refused(server, **following)
        follower = await follow(server, parent)

        assert failure == Refusal(500, "server_error")
        assert text_in(follower) == "Sun."
        assert cached_tokens(follower) >= context_length(parent)


# --- Across the transports -----------------------------------------------------------------------


async def test_a_stored_response_of_a_socket_can_be_followed() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        async with server.connect() as client:
            parent = (await client.create(store=True))[-1]["response"]
        follower = await follow(server, parent)

        assert text_in(follower) == "Sun."


async def test_a_response_of_a_socket_that_was_not_stored_is_not_found() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server, server.connect() as client:
        parent = (await client.create(store=False))[-1]["response"]
        refused = await post_refused(
            server, previous_response_id=parent["id"], input=outputs_for(parent)
        )

        assert refused == NOT_FOUND


async def test_a_stored_response_can_be_followed_over_a_socket() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server, server.connect() as client:
        parent = await post(server)
        events = await client.create(previous_response_id=parent["id"], input=outputs_for(parent))

        assert text_in(events[-1]["response"]) == "Sun."


# --- Parents that cannot be followed -------------------------------------------------------------


async def test_a_parent_that_was_not_stored_is_not_found() -> None:
    """Though its cache is kept: an id names nothing that the client did not ask to be stored."""
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        parent = await post(server, store=False)
        refused = await post_refused(
            server, previous_response_id=parent["id"], input=outputs_for(parent)
        )

        assert parent["store"] is False
        assert refused == NOT_FOUND


@pytest.mark.parametrize("over_socket", [False, True])
async def test_what_was_not_stored_cannot_be_looked_up(over_socket: bool) -> None:
    async with serving(OSLO, settings=KEEPING) as server, server.http() as http:
        async with server.connect() as client:
            if over_socket:
                response = (await client.create(store=False))[-1]["response"]
            else:
                response = await post(server, store=False)
            path = f"/v1/responses/{response['id']}"
            answers = [
                await http.get(path),
                await http.get(f"{path}/input_items"),
                await http.post(f"{path}/cancel"),
                await http.delete(path),
            ]

        for answer in answers:
            refused = refusal(answer.status_code, answer.json()["error"])
            assert refused == Refusal(404, "response_not_found")


async def test_a_response_that_is_still_being_made_cannot_be_followed() -> None:
    async with serving("Sun.Sun.", "Rain.", settings=KEEPING) as server, server.http() as http:
        with held_at(2, server.engine) as model:
            parent = await post(server, background=True)
            await model.reached.wait()
            members: Event = {"previous_response_id": parent["id"], "input": "And now?"}
            refused = await post_refused(server, **members)
            model.release()
            await http.get(f"/v1/responses/{parent['id']}", params={"stream": True})
        follower = await post(server, **members)

        assert refused == Refusal(400, "response_in_progress", "previous_response_id")
        assert text_in(follower) == "Rain."


async def test_where_nothing_is_stored_no_parent_is_found() -> None:
    settings = Settings(recent_responses=4, store=False)
    async with serving(OSLO, "Sun.", settings=settings) as server:
        parent = await post(server, store=True)
        refused = await post_refused(
            server, previous_response_id=parent["id"], input=outputs_for(parent)
        )

        assert parent["store"] is False
        assert refused == NOT_FOUND


async def test_a_deleted_parent_is_not_found() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server, server.http() as http:
        parent = await post(server)
        deleted = await http.delete(f"/v1/responses/{parent['id']}")
        refused = await post_refused(
            server, previous_response_id=parent["id"], input=outputs_for(parent)
        )

        assert deleted.json()["deleted"] is True
        assert refused == NOT_FOUND


async def test_a_follower_outlives_its_deleted_parent() -> None:
    async with serving(OSLO, "Sun.", "Rain.", settings=KEEPING) as server, server.http() as http:
        parent = await post(server)
        follower = await follow(server, parent)
        await http.delete(f"/v1/responses/{parent['id']}")
        last = await post(server, previous_response_id=follower["id"], input="And now?")

        assert text_in(last) == "Rain."
        assert cached_tokens(last) == context_length(follower)


async def test_a_deleted_response_leaves_no_cache() -> None:
    async with serving("Sun.", settings=KEEPING) as server, server.http() as http:
        response = await post(server)
        await http.delete(f"/v1/responses/{response['id']}")

        assert server.engine.kv_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parent_that_nobody_knows_is_refused_before_a_stream_starts(stream: bool) -> None:
    async with serving("Sun.", settings=KEEPING) as server:
        refused = await post_refused(server, previous_response_id="resp_1", stream=stream)

        assert refused == NOT_FOUND


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_that_are_not_answered_are_refused_before_a_stream_starts(stream: bool) -> None:
    async with serving(BOTH, "Sun.", settings=KEEPING) as server:
        parent = await post(server)
        members: Event = {"previous_response_id": parent["id"], "stream": stream}
        one_missing = await post_refused(server, **members, input=outputs_for(parent)[:1])
        one_unknown = await post_refused(
            server, **members, input=[*outputs_for(parent), output("call_1")]
        )

        assert one_missing == Refusal(400, None, "input")
        assert one_unknown == Refusal(400, None, "input")


async def test_a_refused_follower_costs_the_parent_nothing() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        parent = await post(server)
        await post_refused(server, previous_response_id=parent["id"], input="Never mind.")
        follower = await follow(server, parent)

        assert cached_tokens(follower) == context_length(parent)
