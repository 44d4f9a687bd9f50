"""How a run goes on at a tool call, as the handshake asks."""

import asyncio

import pytest
from websockets.exceptions import InvalidStatus

from protocol.codec import decode_object
from protocol.dialect import APPEND_BETA
from sampler.run import RunState
from server.settings import Settings
from tests.server.models import OSLO, context_of, held_at, inputs_of
from tests.server.refusals import Refusal, refusal
from tests.server.running import (
    BODY,
    TERMINAL,
    Client,
    Event,
    Running,
    calls_in,
    output,
    serving,
    suspended,
    text_in,
    until,
)

PATHS = ["/v1/responses", "/v1/codex/responses"]


def cached_tokens(response: Event) -> int:
    """Return how much of its context ``response`` did not have to prefill."""
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def states(server: Running) -> list[RunState]:
    """Return the states of all runs that are not over."""
    return [run.state for run in server.engine.runs]


async def refused(client: Client) -> Refusal:
    """Return what the error frame says that must come next."""
    frame = await client.error()
    return refusal(frame["status"], frame["error"])


# --- The handshake -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_the_dialect_can_be_asked_for_in_the_header(path: str) -> None:
    async with serving(OSLO) as server, server.connect(betas=[APPEND_BETA], path=path) as client:
        events = await client.create()

        assert events[-1]["type"] == "response.done"


@pytest.mark.parametrize("path", PATHS)
async def test_the_dialect_can_be_asked_for_in_the_url(path: str) -> None:
    async with serving(OSLO) as server, server.connect("append", path=path) as client:
        events = await client.create()

        assert events[-1]["type"] == "response.done"


@pytest.mark.parametrize("betas", [[f"realtime=v1, {APPEND_BETA}"], ["realtime=v1", APPEND_BETA]])
async def test_the_header_may_list_several_betas(betas: list[str]) -> None:
    async with serving(OSLO) as server, server.connect(betas=betas) as client:
        events = await client.create()

        assert events[-1]["type"] == "response.done"


async def test_the_url_overrules_the_header() -> None:
    async with serving(OSLO) as server, server.connect("chained", betas=[APPEND_BETA]) as client:
        events = await client.create()

        assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize("betas", [[], ["responses_websockets=2026-02-06"]])
async def test_to_whom_has_not_asked_for_it_a_call_completes_the_response(betas: list[str]) -> None:
    async with serving(OSLO) as server, server.connect(betas=betas) as client:
        events = await client.create()

        assert events[-1]["type"] == "response.completed"
        assert calls_in(events)[0]["status"] == "completed"
        assert states(server) == []


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_dialect_is_refused_before_the_upgrade(path: str) -> None:
    async with serving("Sun.") as server:
        with pytest.raises(InvalidStatus) as refused:
            async with server.connect("telepathy", path=path):
                pass

        response = refused.value.response
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        assert decode_object(bytes(response.body))["error"]["param"] == "dialect"


# --- One response in several segments ------------------------------------------------------------


async def test_done_carries_the_items_so_far_of_a_response_in_progress() -> None:
    async with serving(f"Let me look.{OSLO}") as server, server.connect("append") as client:
        events = await client.create()

        response = events[-1]["response"]
        assert response["status"] == "in_progress"
        assert [item["type"] for item in response["output"]] == ["message", "function_call"]
        assert response["output"][1]["arguments"] == '{"city": "Oslo"}'


async def test_an_append_resumes_the_same_response_to_its_one_completion() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        first = await client.create()
        last = await client.append(output(calls_in(first)[0]))

        (stream,) = client.streams
        terminal = [event for event in stream if event["type"] in TERMINAL]
        assert terminal == [last[-1]]
        assert last[-1]["type"] == "response.completed"
        assert last[-1]["response"]["id"] == first[0]["response"]["id"]


async def test_a_resumed_response_is_not_announced_again() -> None:
    async with suspended() as (_, client, call):
        last = await client.append(output(call))

        assert last[0]["type"] == "response.output_item.added"


async def test_a_response_may_be_suspended_several_times() -> None:
    async with serving(OSLO, OSLO, "Sun.") as server, server.connect("append") as client:
        first = await client.create()
        second = await client.append(output(calls_in(first)[0]))
        last = await client.append(output(calls_in(second)[0]))

        (stream,) = client.streams
        assert [event["type"] for event in stream].count("response.done") == 2
        assert last[-1]["response"]["suspend:run"]["segments"] == 3
        assert len(last[-1]["response"]["output"]) == 3


async def test_an_append_that_comes_before_done_waits_for_it() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        with held_at(6, server.engine) as model:  # the call is made, the turn is not over
            await client.send("response.create", **BODY)
            (call,) = await client.calls(1)
            await client.send("response.append", input=[output(call)])
            await client.until_taken()
            model.release()
            first = await client.segment()
        last = await client.segment()

        assert first[-1]["type"] == "response.done"
        assert last[-1]["response"]["id"] == first[-1]["response"]["id"]
        assert text_in(last[-1]["response"]) == "Sun."


async def test_usage_is_of_the_segment_and_counts_what_was_not_prefilled_again() -> None:
    async with suspended() as (_, client, call):
        last = await client.append(output(call))

        before = client.streams[0][-len(last) - 1]["response"]["usage"]
        after = last[-1]["response"]["usage"]
        assert before["input_tokens_details"]["cached_tokens"] == 0
        # All that was there but the pending token, which was sampled and not yet forwarded.
        assert after["input_tokens_details"]["cached_tokens"] == before["total_tokens"] - 1
        assert after["input_tokens"] > before["total_tokens"]
        assert after["output_tokens"] == len(["Sun.", "<|im_end|>"])


async def test_totals_of_the_run_ride_along() -> None:
    async with suspended() as (_, client, call):
        last = await client.append(output(call))

        usages = [
            event["response"]["usage"]
            for event in client.streams[0]
            if event["type"] in ("response.done", "response.completed")
        ]
        run = last[-1]["response"]["suspend:run"]
        assert run["id"] == last[-1]["response"]["id"]
        assert run["segments"] == 2
        assert run["tokens_reforwarded"] == 0
        assert run["tokens_forwarded"] == usages[1]["total_tokens"] - 1
        for total in ("input_tokens", "output_tokens", "total_tokens"):
            assert run["usage"][total] == sum(usage[total] for usage in usages)
        assert run["time_to_first_token"] > 0
        assert set(run["time_info"]) == {
            "queue", "pre_inference", "prefill", "decode", "suspended", "post_inference",
        }  # fmt: skip
        assert all(seconds >= 0 for seconds in run["time_info"].values())


async def test_the_output_budget_is_of_each_segment() -> None:
    async with serving(OSLO, "Sun.Sun.Sun.Sun.Sun.") as server:
        async with server.connect("append") as client:
            first = await client.create(max_output_tokens=6)
            last = await client.append(output(calls_in(first)[0]))

        assert first[-1]["response"]["usage"]["output_tokens"] == 6
        assert last[-1]["response"]["status"] == "completed"


async def test_a_segment_that_runs_out_of_budget_ends_the_response() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("append") as client:
        events = await client.create(max_output_tokens=3)
        await client.send("response.append", input=[output(events[-1]["response"]["output"][0])])
        error = await refused(client)

        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"]["reason"] == "max_output_tokens"
        assert events[-1]["response"]["output"][0]["status"] == "incomplete"
        assert error == Refusal(400, None, "input")  # what was cut short is no call


async def test_a_connection_serves_one_response_after_the_other() -> None:
    async with suspended() as (_, client, call):
        first = await client.append(output(call))
        again = await client.create()
        last = await client.append(output(calls_in(again)[0]))

        assert len(client.streams) == 2
        assert first[-1]["response"]["id"] != last[-1]["response"]["id"]


async def test_acknowledgements_are_read_over() -> None:
    async with suspended() as (_, client, call):
        await client.send("response.processed", response_id="resp_1")
        last = await client.append(output(call))

        assert last[-1]["type"] == "response.completed"
        assert client.errors == []


async def test_a_fragmented_frame_is_read_as_one() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        await client.socket.send(iter(['{"input": "Hi", ', '"type": "response', '.create"}']))
        events = await client.segment()

        assert text_in(events[-1]["response"]) == "Sun."


# --- An append at rest ---------------------------------------------------------------------------


async def test_an_append_to_a_completed_response_goes_on_as_another_and_computes_no_more() -> None:
    async with suspended() as (reference, client, call):
        await client.append(output(call))
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create()
        last = await client.append(output(calls_in(first)[0]))

        assert last[0]["type"] == "response.created"
        assert last[-1]["response"]["id"] != first[-1]["response"]["id"]
        assert last[-1]["response"]["previous_response_id"] == first[-1]["response"]["id"]
        assert text_in(last[-1]["response"]) == "Sun."
        assert inputs_of(server.engine) == inputs_of(reference.engine)


async def test_a_user_may_append_to_a_response_that_is_completed() -> None:
    async with serving(OSLO, "Sun.", "Rain.") as server, server.connect("append") as client:
        first = await client.create()
        second = (await client.append(output(calls_in(first)[0])))[-1]["response"]
        third = await client.append({"role": "user", "content": "And tomorrow?"})

        assert third[0]["type"] == "response.created"
        assert third[-1]["response"]["id"] != second["id"]
        assert text_in(third[-1]["response"]) == "Rain."
        assert cached_tokens(third[-1]["response"]) == second["usage"]["total_tokens"] - 1


# --- A create while it is suspended --------------------------------------------------------------


async def test_a_create_that_follows_the_suspended_response_goes_on_from_its_cache() -> None:
    async with suspended() as (reference, client, call):
        await client.append(output(call))
    async with suspended() as (server, client, call):
        parent = client.streams[0][-1]["response"]
        last = await client.follow(parent, output(call))

        response = last[-1]["response"]
        assert last[-1]["type"] == "response.completed"
        assert response["id"] != parent["id"] == response["previous_response_id"]
        assert cached_tokens(response) == parent["usage"]["total_tokens"] - 1
        assert inputs_of(server.engine) == inputs_of(reference.engine)


async def test_of_two_ways_to_go_on_the_first_counts() -> None:
    async with serving(OSLO, OSLO, "Sun.") as server, server.connect("append") as client:
        first = await client.create()
        (call,) = calls_in(first)
        parent = first[-1]["response"]["id"]
        await client.send("response.append", input=[output(call)])
        await client.send(
            "response.create", **(BODY | {"previous_response_id": parent, "input": [output(call)]})
        )
        second = await client.segment()
        error = await refused(client)
        last = await client.append(output(calls_in(second)[0]))

        assert second[-1]["response"]["id"] == parent
        assert error == Refusal(400, "duplicate_call_id", "input")
        assert last[-1]["response"]["id"] == parent
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_create_that_answers_only_some_calls_is_refused_and_the_response_goes_on() -> None:
    async with suspended() as (server, client, call):
        parent = client.streams[0][-1]["response"]["id"]
        await client.send("response.create", **(BODY | {"previous_response_id": parent}))
        error = await refused(client)
        while_refused = states(server)
        last = await client.append(output(call))

        assert error == Refusal(400, None, "input")
        assert while_refused == [RunState.SUSPENDED]
        assert last[-1]["response"]["id"] == parent
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_create_without_parent_abandons_the_suspended_response() -> None:
    async with suspended() as (server, client, call):
        context = context_of(server.engine)
        again = await client.create()
        await client.send("response.append", input=[output(call)])
        error = await refused(client)

        assert again[-1]["type"] == "response.done"
        assert again[-1]["response"]["previous_response_id"] is None
        assert context_of(server.engine) == context
        assert states(server) == [RunState.SUSPENDED]
        assert error == Refusal(400, "unknown_call_id", "input[0].call_id")


# --- Appends that fail ---------------------------------------------------------------------------

UNANSWERABLE: dict[str, Event] = {
    "nothing": {},
    "an output of another call": {"input": [output("call_0")]},
    "an output twice": {"input": [output("call_0"), output("call_0")]},
    "more than the context": {"input": "a" * 5000},
}


@pytest.mark.parametrize("name", UNANSWERABLE)
@pytest.mark.parametrize("betas", [[APPEND_BETA], []], ids=["header", "none"])
async def test_an_append_that_fails_closes_the_connection_of_who_named_no_dialect_in_the_url(
    betas: list[str], name: str
) -> None:
    async with serving(OSLO) as server, server.connect(betas=betas) as client:
        await client.create()
        await client.send("response.append", **UNANSWERABLE[name])
        close = await client.closed()
        await server.until_free()

        assert close.code == 1011
        assert close.reason
        assert client.errors == []


@pytest.mark.parametrize("betas", [[APPEND_BETA], []], ids=["header", "none"])
async def test_the_reason_of_the_closure_says_what_is_wrong(betas: list[str]) -> None:
    async with serving(OSLO) as server, server.connect(betas=betas) as client:
        await client.send("response.append", input=[output("call_0")])
        close = await client.closed()

        assert close.reason.startswith("no_suspended_response: ")


@pytest.mark.parametrize("name", UNANSWERABLE)
async def test_an_append_that_fails_is_an_error_to_who_named_the_dialect_in_the_url(
    name: str,
) -> None:
    async with suspended() as (server, client, call):
        await client.send("response.append", **UNANSWERABLE[name])
        error = await client.error()
        while_refused = states(server)
        last = await client.append(output(call))

        assert error["status"] == 400
        assert error["error"]["param"].startswith("input")
        assert while_refused == [RunState.SUSPENDED]
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_client_whose_connection_was_closed_goes_on_with_the_whole_history() -> None:
    async with serving(OSLO, "Sun.") as server:
        async with server.connect(betas=[APPEND_BETA]) as client:
            (call,) = calls_in(await client.create())
            await client.send("response.append", input=[output("call_0")])
            await client.closed()
        async with server.connect(betas=[APPEND_BETA]) as client:
            question = {"role": "user", "content": BODY["input"]}
            last = await client.create(input=[question, call, output(call)])

        assert text_in(last[-1]["response"]) == "Sun."


# --- Time and number -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_url", [True, False])
async def test_outputs_that_do_not_come_in_time_close_the_connection(is_in_url: bool) -> None:
    settings = Settings(suspend_ttl_seconds=0.02)
    dialect, betas = ("append", []) if is_in_url else (None, [APPEND_BETA])
    async with serving(OSLO, settings=settings) as server:
        async with server.connect(dialect, betas=betas) as client:
            events = await client.create()
            close = await client.closed()
            await server.until_free()

        assert events[-1]["type"] == "response.done"
        assert close.code == 1011
        assert "in time" in close.reason


async def test_a_response_that_nobody_follows_in_time_keeps_its_words_and_not_its_cache() -> None:
    settings = Settings(suspend_ttl_seconds=0.02)
    async with serving(OSLO, "Sun.", settings=settings) as server, server.connect() as client:
        first = await client.create(store=False)
        await until(lambda: server.engine.kv_tokens == 0)
        last = await client.follow(first[-1]["response"], output(calls_in(first)[0]))

        assert text_in(last[-1]["response"]) == "Sun."
        assert cached_tokens(last[-1]["response"]) == 0


async def test_the_run_that_has_waited_longest_makes_room() -> None:
    settings = Settings(max_suspended_per_key=2)
    async with serving(OSLO, "Sun.", settings=settings) as server:
        async with (
            server.connect("append") as first,
            server.connect("append") as second,
            server.connect("append") as third,
        ):
            calls = [calls_in(await client.create())[0] for client in (first, second, third)]
            close = await first.closed()
            last = await second.append(output(calls[1]))
            await third.append(output(calls[2]))

        assert close.code == 1011
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_response_that_was_resumed_makes_no_room_for_others() -> None:
    settings = Settings(max_suspended_per_key=1)
    async with serving(OSLO, "Sun.", settings=settings) as server:
        async with server.connect("append") as first, server.connect("append") as second:
            (call,) = calls_in(await first.create())
            await first.append(output(call))
            (call,) = calls_in(await second.create())
            last = await second.append(output(call))

        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_connection_that_has_lived_its_time_is_told_so_and_closed() -> None:
    settings = Settings(connection_lifetime_seconds=0.02)
    async with serving("Sun.", settings=settings) as server, server.connect() as client:
        error = await client.error()
        close = await client.closed()

        assert error["status"] == 400
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert error["error"]["type"] == "invalid_request_error"
        assert close.code == 1000


@pytest.mark.slow
async def test_a_response_that_is_sampled_when_the_time_is_over_is_finished() -> None:
    lifetime = 0.5
    settings = Settings(connection_lifetime_seconds=lifetime)
    async with serving("Sun.", settings=settings) as server, server.connect() as client:
        clock = asyncio.get_running_loop().time
        over = clock() + lifetime
        with held_at(2, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            await until(lambda: clock() > over)
            model.release()
            last = await client.segment()
        error = await client.error()

        assert last[-1]["type"] == "response.completed"
        assert error["error"]["code"] == "websocket_connection_limit_reached"


@pytest.mark.slow
async def test_a_response_that_takes_too_long_after_the_time_is_over_is_given_up() -> None:
    settings = Settings(connection_lifetime_seconds=0.5, drain_seconds=0.02)
    async with serving("Sun.", settings=settings) as server, server.connect() as client:
        with held_at(2, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            await client.up_to("error")
            close = await client.closed()
            model.release()
        await server.until_free()

        assert close.code == 1000


@pytest.mark.slow
async def test_a_suspended_response_does_not_prolong_the_life_of_its_connection() -> None:
    settings = Settings(connection_lifetime_seconds=0.5)
    async with suspended(OSLO, settings=settings) as (server, client, _):
        error = await client.error()
        await client.closed()
        await server.until_free()

        assert error["error"]["code"] == "websocket_connection_limit_reached"
