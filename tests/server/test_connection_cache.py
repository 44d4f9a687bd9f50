"""What a connection keeps of its responses, for whom, and what makes it forget."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.server.http_client import cached_tokens, context_length
from tests.server.models import (
    OSLO,
    context_of,
    failing_at,
    held_at,
    inputs_of,
    scripted_engine,
    spelled_out,
)
from tests.server.running import (
    BODY,
    Client,
    Event,
    Running,
    calls_in,
    output,
    serving,
    text_in,
    until,
)

QUESTION: Event = {"role": "user", "content": BODY["input"]}
NOT_FOUND = "previous_response_not_found"


async def created(client: Client, **members: Any) -> Event:
    """Return a response that nobody stores."""
    events = await client.create(**({"store": False} | members))
    response: Event = events[-1]["response"]
    return response


async def followed(client: Client, parent: Event, *items: Event, **members: Any) -> Event:
    """Return a response that follows ``parent``."""
    events = await client.follow(parent, *(items or (QUESTION,)), **members)
    response: Event = events[-1]["response"]
    return response


async def refusal(client: Client, parent: Event, *items: Event, **members: Any) -> Event:
    """Ask for a follower of ``parent`` that cannot be, and return what is said about it."""
    asked = {"previous_response_id": parent["id"], "input": list(items or (QUESTION,))}
    await client.send("response.create", **(BODY | {"store": False} | asked | members))
    error = await client.error()
    assert error["status"] == 400
    assert error["error"]["type"] == "invalid_request_error"
    return error


async def refusal_code(client: Client, parent: Event, *items: Event, **members: Any) -> str | None:
    """Return the code of a refusal."""
    error = await refusal(client, parent, *items, **members)
    code: str | None = error["error"]["code"]
    return code


# --- The latest of each lane ---------------------------------------------------------------------


async def test_a_newer_response_takes_the_place_of_its_lane_s_older_one() -> None:
    async with serving("Rain.", "Sun.", "Wind.") as server, server.connect() as client:
        first = await created(client)
        second = await followed(client, first)
        error = await refusal(client, first)
        third = await followed(client, second)

        assert error["error"]["code"] == NOT_FOUND
        assert error["error"]["param"] == "previous_response_id"
        assert third["status"] == "completed"


async def test_each_lane_has_a_latest_response_of_its_own() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        lanes = ("a", "b", None)
        parents = [await created(client, stream_id=lane, input=f"On {lane}?") for lane in lanes]
        lasts = [
            await followed(client, parent, stream_id=lane)
            for lane, parent in zip(lanes, parents, strict=True)
        ]

        for parent, last in zip(parents, lasts, strict=True):
            assert last["previous_response_id"] == parent["id"]
            assert cached_tokens(last) == context_length(parent)


async def test_a_miss_evicts_nothing() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = await created(client)
        await refusal(client, first | {"id": "resp_of_yesterday"})
        second = await followed(client, first)

        assert text_in(second) == "Sun."


# --- What a failure evicts -----------------------------------------------------------------------


async def not_found(client: Client, parent: Event) -> None:
    await refusal(client, parent, output("call_of_nobody"))


async def not_valid(client: Client, parent: Event) -> None:
    await refusal(client, parent, temperature=5)


async def not_readable(client: Client, parent: Event) -> None:
    await refusal(client, parent, {"role": "judge", "content": "Guilty!"})


async def not_fitting(client: Client, parent: Event) -> None:
    await refusal(client, parent, {"role": "user", "content": "x" * 5000})


FAILURES = [not_found, not_valid, not_readable, not_fitting]


@pytest.mark.parametrize("fail", FAILURES)
async def test_a_continuation_that_fails_evicts_its_parent(
    fail: Callable[[Client, Event], Awaitable[None]],
) -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = await created(client)
        await fail(client, first)
        code = await refusal_code(client, first)
        again = await created(client)

        assert code == NOT_FOUND
        assert text_in(again) == "Rain."


async def test_an_evicted_response_holds_nothing() -> None:
    async with serving("Rain.") as server, server.connect() as client:
        first = await created(client)
        held = server.engine.kv_tokens
        await refusal(client, first, output("call_of_nobody"))
        await until(lambda: server.engine.kv_tokens == 0)

        assert held == context_length(first)


@pytest.mark.parametrize(
    "members", [{"input": [output("call_of_nobody")]}, {"temperature": 5}], ids=["items", "value"]
)
async def test_a_fork_that_fails_leaves_its_parent_alone(members: Event) -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = await created(client)
        error = await refusal(client, first, stream_id="b", **members)
        second = await followed(client, first)

        assert error["stream_id"] == "b"
        assert text_in(second) == "Sun."
        assert cached_tokens(second) == context_length(first)


async def test_a_failing_create_without_a_parent_leaves_the_latest_response_alone() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = await created(client)
        await client.send("response.create", **BODY, temperature=5)
        await client.error()
        second = await followed(client, first)

        assert text_in(second) == "Sun."


async def test_a_response_that_fails_while_it_is_sampled_evicts_its_parent() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = await created(client)
        with failing_at(1, server.engine):
            failed = await followed(client, first)
        codes = [await refusal_code(client, parent) for parent in (first, failed)]

        assert failed["status"] == "failed"
        assert codes == [NOT_FOUND, NOT_FOUND]


async def test_a_fork_that_fails_while_it_is_sampled_leaves_its_parent_alone() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = await created(client)
        with failing_at(1, server.engine):
            failed = await followed(client, first, stream_id="b")
        second = await followed(client, first)

        assert failed["status"] == "failed"
        assert text_in(second) == "Sun."


async def test_a_lane_s_failure_does_not_disturb_what_another_says() -> None:
    async with serving("Rain." * 10) as server, server.connect() as client:
        with held_at(3, server.engine) as model:
            await client.send("response.create", **BODY, stream_id="a")
            await model.reached.wait()
            await client.send("response.create", **BODY, stream_id="b", temperature=5)
            while not client.errors:
                await client.receive()
            model.release()
            events = await client.segment()

        assert client.errors[0]["stream_id"] == "b"
        assert text_in(events[-1]["response"]) == "Rain." * 10


async def test_a_create_is_refused_in_its_turn_and_evicts_nothing_before_it() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = await created(client)
        asked = {"previous_response_id": first["id"], "input": [QUESTION], "store": False}
        with held_at(1, server.engine) as model:
            await client.send("response.create", **BODY)
            await client.send("response.create", **(BODY | asked))
            await client.send("response.create", **(BODY | asked), temperature=5)
            await model.reached.wait()
            model.release()
            await client.segment()
        error = await client.error()
        last = await client.error()

        # The one in front has taken the parent's place by then, and so both are in vain.
        assert error["error"]["code"] == NOT_FOUND
        assert last["error"]["param"] == "temperature"


# --- Who does not see it -------------------------------------------------------------------------


async def test_another_connection_does_not_know_it() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = await created(client)
        async with server.connect() as other:
            code = await refusal_code(other, first)
        second = await followed(client, first)

        assert code == NOT_FOUND
        assert text_in(second) == "Sun."


async def test_the_same_client_does_not_find_it_after_it_has_reconnected() -> None:
    async with serving("Rain.") as server:
        async with server.connect() as client:
            first = await created(client)
        async with server.connect() as client:
            code = await refusal_code(client, first)
            again = await created(client)

        assert code == NOT_FOUND
        assert text_in(again) == "Rain."


async def test_a_request_over_http_does_not_know_it() -> None:
    async with serving("Rain.") as server, server.connect() as client, server.http() as http:
        first = await created(client)
        posted = await http.post("/v1/responses", json=BODY | {"previous_response_id": first["id"]})
        got = await http.get(f"/v1/responses/{first['id']}")

        assert posted.status_code == 400
        assert posted.json()["error"]["code"] == NOT_FOUND
        assert posted.json()["error"]["param"] == "previous_response_id"
        assert got.status_code == 404


async def test_what_was_said_over_http_only_is_not_on_a_connection() -> None:
    async with serving("Rain.") as server, server.connect() as client, server.http() as http:
        posted = (await http.post("/v1/responses", json=BODY | {"store": False})).json()
        code = await refusal_code(client, posted)

        assert code == NOT_FOUND


async def test_nothing_is_left_of_a_connection_that_is_gone() -> None:
    async with serving("Rain.", "Sun.") as server:
        async with server.connect() as client:
            for lane in (None, "a", "b"):
                await created(client, stream_id=lane)
            held = server.engine.kv_tokens
        await server.until_free()

        assert held > 0


async def test_nothing_is_left_of_a_connection_that_broke() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        await created(client)
        client.abort()
        await server.until_free()


# --- What is stored ------------------------------------------------------------------------------


async def over_websocket(server: Running, parent: Event, *items: Event) -> Event:
    async with server.connect() as other:
        return await followed(other, parent, *items)


async def over_http(server: Running, parent: Event, *items: Event) -> Event:
    asked = {"previous_response_id": parent["id"], "input": list(items), "store": False}
    async with server.http() as http:
        response: Event = (await http.post("/v1/responses", json=BODY | asked)).json()
        return response


@pytest.mark.parametrize("follow", [over_websocket, over_http])
async def test_a_stored_response_can_be_followed_elsewhere(
    follow: Callable[..., Awaitable[Event]],
) -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        events = await client.create(store=True)
        first, (call,) = events[-1]["response"], calls_in(events)
        elsewhere = await follow(server, first, output(call))
        slow = context_of(server.engine)
        here = await followed(client, first, output(call))

        # The very tokens that were sampled, at the price of a prefill.
        assert context_of(server.engine) == slow
        assert text_in(elsewhere) == text_in(here) == "Sun."
        assert cached_tokens(elsewhere) == 0
        assert cached_tokens(here) == context_length(first)


async def test_what_was_sampled_comes_back_from_the_store_as_it_was_sampled() -> None:
    engine = scripted_engine(spelled_out("Rain."), "Sun.")
    async with serving(engine=engine) as server, server.connect() as client:
        first = (await client.create(store=True))[-1]["response"]
        await over_websocket(server, first, QUESTION)
        slow = context_of(engine)
        await followed(client, first)

        assert context_of(engine) == slow
        assert list(slow[: context_length(first)]) == inputs_of(engine)[: context_length(first)]


async def test_a_stored_response_is_found_again_after_it_was_evicted() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = (await client.create(store=True))[-1]["response"]
        await refusal(client, first, output("call_of_nobody"))
        second = await followed(client, first)

        assert text_in(second) == "Sun."
        assert cached_tokens(second) == 0


async def test_a_stored_response_is_found_again_though_its_lane_has_gone_on() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = (await client.create(store=True))[-1]["response"]
        await followed(client, first)
        again = await followed(client, first)

        assert text_in(again) == "Sun."
        # What followed shares all of it.
        assert cached_tokens(again) >= context_length(first)


async def test_a_chain_of_which_only_the_end_is_stored_is_stored_as_a_whole() -> None:
    async with serving("Rain.", OSLO, "Sun.") as server, server.connect() as client:
        first = await created(client)
        events = await client.follow(first, QUESTION, store=True)
        second, (call,) = events[-1]["response"], calls_in(events)
        elsewhere = await over_websocket(server, second, output(call))
        slow = context_of(server.engine)
        await followed(client, second, output(call))

        assert text_in(elsewhere) == "Sun."
        assert context_of(server.engine) == slow
