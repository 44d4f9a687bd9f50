"""The inject dialect: one response stays open across the client's tool calls, by its id.

Each inject is acknowledged in the response's own stream, in which the numbers go on.
"""

import pytest
from websockets.frames import CloseCode

from protocol.dialect import INJECT_BETA
from sampler.run import RunState
from server.settings import Settings
from tests.server.models import BOTH, OSLO, context_of, held_at, inputs_of
from tests.server.running import (
    BODY,
    TERMINAL,
    Client,
    Event,
    Running,
    output,
    serving,
    suspended,
    text_in,
    until,
)

CREATED, FAILED = "response.inject.created", "response.inject.failed"


async def open_calls(client: Client, count: int = 1, **members: object) -> list[Event]:
    """Ask for a response and return its calls, as soon as they are made."""
    await client.send("response.create", **(BODY | members))
    return await client.calls(count)


async def until_suspended(server: Running) -> None:
    await until(lambda: {run.state for run in server.engine.runs} == {RunState.SUSPENDED})


async def inject(client: Client, *items: Event, into: str | None = None) -> None:
    """Inject ``items`` into the latest response, or into one by its id."""
    response_id = into or client.streams[-1][0]["response"]["id"]
    await client.send("response.inject", response_id=response_id, input=list(items))


def types(events: list[Event]) -> list[str]:
    return [event["type"] for event in events]


def cached_tokens(response: Event) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


async def inputs_after(*texts: str) -> list[int]:
    """Return what the model reads when plain outputs come by append."""
    async with suspended(BOTH if len(texts) > 1 else OSLO, "Sun.") as (server, client, _):
        calls = [event["item"] for event in client.streams[0] if "item" in event]
        ids = [call["call_id"] for call in calls if call["status"] == "completed"]
        await client.append(*map(output, ids, texts))
        return inputs_of(server.engine)


# --- The one stream ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/codex/responses"])
@pytest.mark.parametrize("is_in_url", [True, False])
async def test_a_response_stays_open_until_what_its_calls_gave_is_injected(
    is_in_url: bool, path: str
) -> None:
    dialect, betas = ("inject", []) if is_in_url else (None, [INJECT_BETA])
    async with (
        serving(OSLO, "Sun.") as server,
        server.connect(dialect, betas=betas, path=path) as client,
    ):
        (call,) = await open_calls(client)
        await until_suspended(server)
        await inject(client, output(call))
        last = await client.segment()

    (stream,) = client.streams
    assert types(stream).count("response.created") == 1
    assert types(stream).count(CREATED) == 1
    assert "response.done" not in types(stream)
    assert [kind for kind in types(stream) if kind in TERMINAL] == ["response.completed"]
    assert text_in(last[-1]["response"]) == "Sun."


async def test_nothing_is_said_while_the_calls_are_open() -> None:
    async with serving(OSLO) as server, server.connect("inject") as client:
        await open_calls(client)
        await until_suspended(server)
        await client.until_taken()

        assert client.streams[0][-1]["type"] == "response.output_item.done"


async def test_an_acknowledgement_comes_before_what_is_sampled_next_and_has_its_number() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        (call,) = await open_calls(client)
        await until_suspended(server)
        number = client.streams[0][-1]["sequence_number"]
        await inject(client, output(call))
        last = await client.segment()

        assert types(last)[:2] == [CREATED, "response.output_item.added"]
        assert [event["sequence_number"] for event in last[:2]] == [number + 1, number + 2]
        assert last[0]["response_id"] == client.streams[0][0]["response"]["id"]


async def test_an_acknowledgement_is_on_the_lane_of_its_response() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        (call,) = await open_calls(client, stream_id="a")
        await inject(client, ODD)
        await inject(client, output(call))
        last = await client.segment()

        assert types(last)[:2] == [FAILED, CREATED]
        assert {event["stream_id"] for event in last} == {"a"}


async def test_a_response_may_stop_for_calls_several_times() -> None:
    async with serving(OSLO, OSLO, "Sun.") as server, server.connect("inject") as client:
        (first,) = await open_calls(client)
        await inject(client, output(first))
        (second,) = await client.calls(1)
        await inject(client, output(second))
        last = await client.segment()

        response = last[-1]["response"]
        assert response["suspend:run"]["segments"] == 3
        assert [item["type"] for item in response["output"]] == [
            "function_call", "function_call", "message",
        ]  # fmt: skip


async def test_the_model_reads_what_it_reads_when_outputs_are_appended() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        (call,) = await open_calls(client)
        await inject(client, output(call, "sunny"))
        await client.segment()

        assert inputs_of(server.engine) == await inputs_after("sunny")


async def test_usage_is_the_sum_over_the_segments() -> None:
    async with suspended() as (_, client, call):
        await client.append(output(call))
        told = [event for event in client.streams[0] if event["type"] != "response.created"]
        usages = [event["response"]["usage"] for event in told if "response" in event]
        by_segment = [usage for usage in usages if usage]
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        (call,) = await open_calls(client)
        await inject(client, output(call))
        total = (await client.segment())[-1]["response"]["usage"]

    for member in ("input_tokens", "output_tokens", "total_tokens"):
        assert total[member] == sum(usage[member] for usage in by_segment)
    assert total["input_tokens_details"]["cached_tokens"] == by_segment[0]["total_tokens"] - 1


# --- When it comes -------------------------------------------------------------------------------


async def test_the_first_of_two_outputs_may_come_while_the_second_call_is_being_made() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        with held_at(7, server.engine) as model:  # the line break between the calls is sampled
            (oslo,) = await open_calls(client)
            await model.reached.wait()
            await inject(client, output(oslo, "dry"))
            await client.until_taken()
            model.release()
            (bergen,) = await client.calls(1)
        created = await client.receive()
        await inject(client, output(bergen, "wet"))
        last = await client.segment()

        assert created["type"] == CREATED
        assert text_in(last[-1]["response"]) == "Sun."
        assert inputs_of(server.engine) == await inputs_after("dry", "wet")


async def test_all_outputs_may_come_before_the_turn_is_over() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        with held_at(6, server.engine) as model:
            (call,) = await open_calls(client)
            await inject(client, output(call, "sunny"))
            await client.until_taken()
            model.release()
            last = await client.segment()

        assert types(last).count(CREATED) == 1
        assert text_in(last[-1]["response"]) == "Sun."
        assert inputs_of(server.engine) == await inputs_after("sunny")


async def test_an_output_that_came_for_a_turn_that_was_cut_short_is_given_back() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        with held_at(7, server.engine) as model:
            (call,) = await open_calls(client, max_output_tokens=8)
            await model.reached.wait()
            await inject(client, output(call))
            await client.until_taken()
            model.release()
            cut = (await client.segment())[-1]
        failed = await client.receive()
        await client.send(
            "response.create",
            **(BODY | {"previous_response_id": cut["response"]["id"], "input": failed["input"]}),
        )
        last = await client.segment()

        assert cut["type"] == "response.incomplete"
        assert failed["type"] == FAILED
        assert failed["error"]["code"] == "response_already_completed"
        assert failed["sequence_number"] == cut["sequence_number"] + 1
        assert text_in(last[-1]["response"]) == "Sun."


@pytest.mark.parametrize("is_reversed", [False, True])
async def test_outputs_may_be_injected_one_by_one(is_reversed: bool) -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        oslo, bergen = await open_calls(client, 2)
        await until_suspended(server)
        outputs = [output(oslo, "dry"), output(bergen, "wet")]
        first, second = reversed(outputs) if is_reversed else outputs
        await inject(client, first)
        acknowledged = await client.receive()
        still = [run.state for run in server.engine.runs]
        await inject(client, second)
        last = await client.segment()

        assert acknowledged["type"] == CREATED
        assert still == [RunState.SUSPENDED]
        assert last[0]["type"] == CREATED
        assert inputs_of(server.engine) == await inputs_after("dry", "wet")


async def test_outputs_may_be_injected_together() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        oslo, bergen = await open_calls(client, 2)
        await inject(client, output(bergen, "wet"), output(oslo, "dry"))
        last = await client.segment()

        assert types(last).count(CREATED) == 1
        assert inputs_of(server.engine) == await inputs_after("dry", "wet")


async def test_what_came_early_for_a_turn_that_was_cut_short_does_not_reach_the_next() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        with held_at(7, server.engine) as model:
            (call,) = await open_calls(client, max_output_tokens=8)
            await model.reached.wait()
            await inject(client, output(call))
            await client.until_taken()
            model.release()
            cut = await client.segment()
        oslo, bergen = await open_calls(client, 2)
        await inject(client, output(oslo), output(bergen))
        last = await client.segment()

        assert cut[-1]["type"] == "response.incomplete"
        assert text_in(last[-1]["response"]) == "Sun."


# --- Injects that fail ---------------------------------------------------------------------------

ODD: Event = {
    "type": "function_call_output",
    "call_id": "call_0",
    "output": [{"type": "input_text", "text": "døgnvilt ☀", "odd": None}],
    "status": None,
    "nobody_knows": {"a": [1.5, None, True, {}]},
}


async def test_what_is_injected_into_nothing_is_given_back_as_it_came() -> None:
    async with serving(OSLO) as server, server.connect("inject") as client:
        await inject(client, ODD, into="resp_0")
        failed = await client.receive()

        assert failed["type"] == FAILED
        assert failed["response_id"] == "resp_0"
        assert failed["input"] == [ODD]
        assert failed["error"]["code"] == "response_not_found"
        assert isinstance(failed["sequence_number"], int)


@pytest.mark.parametrize("dialect", ["inject", "append", "chained"])
async def test_what_comes_after_the_end_is_given_back_as_it_came(dialect: str) -> None:
    async with serving("Sun.") as server, server.connect(dialect) as client:
        await client.create()
        await inject(client, ODD)
        failed = await client.receive()

        assert failed["type"] == FAILED
        assert failed["input"] == [ODD]
        assert failed["error"]["code"] == "response_already_completed"
        assert failed["sequence_number"] == len(client.streams[0]) - 1


async def test_what_comes_for_a_response_that_makes_no_call_is_given_back_at_its_end() -> None:
    async with serving("Sun.") as server, server.connect("inject") as client:
        with held_at(2, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            await client.up_to("response.in_progress")
            await inject(client, ODD)
            await client.until_taken()
            model.release()
            last = await client.segment()
        failed = await client.receive()

        assert last[-1]["type"] == "response.completed"
        assert failed["input"] == [ODD]
        assert failed["error"]["code"] == "response_already_completed"


async def test_a_response_of_another_connection_is_not_found() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        (call,) = await open_calls(client)
        response_id = client.streams[0][0]["response"]["id"]
        async with server.connect("inject") as other:
            await inject(other, output(call), into=response_id)
            failed = await other.receive()
        await inject(client, output(call))
        last = await client.segment()

        assert failed["error"]["code"] == "response_not_found"
        assert text_in(last[-1]["response"]) == "Sun."


async def test_outputs_given_back_can_be_brought_by_a_create() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create()
        call = first[-1]["response"]["output"][0]
        await inject(client, output(call))
        failed = await client.receive()
        last = await client.follow(first[-1]["response"], *failed["input"])

        assert failed["error"]["code"] == "response_already_completed"
        assert text_in(last[-1]["response"]) == "Sun."


async def check_nothing_changed(server: Running, client: Client, calls: list[Event]) -> None:
    """Answer both calls, which wait still, and check what the model read."""
    assert [run.state for run in server.engine.runs] == [RunState.SUSPENDED]
    await inject(client, *map(output, calls, ["dry", "wet"]))
    last = await client.segment()
    assert types(last)[0] == CREATED
    assert text_in(last[-1]["response"]) == "Sun."
    assert inputs_of(server.engine) == await inputs_after("dry", "wet")


async def test_a_call_that_was_never_made_cannot_be_answered() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        calls = await open_calls(client, 2)
        await until_suspended(server)
        await inject(client, ODD)
        failed = await client.receive()

        assert failed["type"] == FAILED
        assert failed["error"]["code"] == "unknown_call_id"
        assert failed["input"] == [ODD]
        await check_nothing_changed(server, client, calls)


async def test_a_call_cannot_be_answered_twice() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        oslo, bergen = await open_calls(client, 2)
        await until_suspended(server)
        for _ in range(2):
            await inject(client, output(oslo, "dry"))
        created, failed = await client.receive(), await client.receive()
        await inject(client, output(bergen, "wet"))
        last = await client.segment()

        assert [created["type"], failed["type"]] == [CREATED, FAILED]
        assert failed["error"]["code"] == "duplicate_call_id"
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_call_cannot_be_answered_twice_in_one_inject() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        calls = await open_calls(client, 2)
        await until_suspended(server)
        await inject(client, output(calls[0], "dry"), output(calls[0], "wet"))
        failed = await client.receive()

        assert failed["error"]["code"] == "duplicate_call_id"
        await check_nothing_changed(server, client, calls)


async def test_one_output_that_is_wrong_keeps_the_others_out() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        calls = await open_calls(client, 2)
        await until_suspended(server)
        items = [output(calls[0], "never"), output("call_0")]
        await inject(client, *items)
        failed = await client.receive()

        assert failed["error"]["code"] == "unknown_call_id"
        assert failed["input"] == items
        await check_nothing_changed(server, client, calls)


async def test_an_output_that_does_not_fit_the_context_is_given_back() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        calls = await open_calls(client, 2)
        await until_suspended(server)
        await inject(client, output(calls[0], "a" * 5000))
        failed = await client.receive()

        assert failed["error"]["code"] == "context_length_exceeded"
        await check_nothing_changed(server, client, calls)


MALFORMED: dict[str, Event] = {
    "no response": {"input": [output("call_0")]},
    "a response of a number": {"response_id": 5, "input": [output("call_0")]},
    "no input": {"response_id": "resp_0"},
    "empty input": {"response_id": "resp_0", "input": []},
    "input of a string": {"response_id": "resp_0", "input": "Hi"},
    "input of numbers": {"response_id": "resp_0", "input": [5]},
    "a message": {"response_id": "resp_0", "input": [{"role": "user", "content": "Hi"}]},
    "an output without its call": {
        "response_id": "resp_0",
        "input": [{"type": "function_call_output", "output": "dry"}],
    },
    "a member too many": {
        "response_id": "resp_0",
        "input": [output("call_0")],
        "client_metadata": {},
    },
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_inject_is_an_error_and_ends_the_connection(name: str) -> None:
    async with serving(OSLO) as server, server.connect("inject") as client:
        await open_calls(client)
        await until_suspended(server)
        await client.send("response.inject", **MALFORMED[name])
        error = await client.error()
        close = await client.closed()
        await server.until_free()

        assert error["status"] == 400
        assert error["error"]["type"] == "invalid_request_error"
        assert close.code == CloseCode.POLICY_VIOLATION


# --- Other ways to go on -------------------------------------------------------------------------


async def test_a_create_without_parent_ends_the_open_response_and_is_answered() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        await open_calls(client)
        await until_suspended(server)
        context = context_of(server.engine)
        await client.send("response.create", **BODY)
        abandoned = await client.segment()
        (call,) = await client.calls(1)
        await until_suspended(server)

        assert abandoned[-1]["type"] == "response.incomplete"
        assert abandoned[-1]["response"]["status"] == "cancelled"
        assert [len([e for e in s if e["type"] in TERMINAL]) for s in client.streams] == [1, 0]
        assert call["call_id"] != abandoned[-1]["response"]["output"][0]["call_id"]
        assert context_of(server.engine) == context


async def test_a_create_that_follows_the_open_response_ends_it_and_goes_on_from_its_cache() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        (call,) = await open_calls(client)
        await until_suspended(server)
        parent = client.streams[0][0]["response"]
        await client.send(
            "response.create",
            **(BODY | {"previous_response_id": parent["id"], "input": [output(call)]}),
        )
        ended = (await client.segment())[-1]["response"]
        response = (await client.segment())[-1]["response"]

        assert ended["status"] == "cancelled"
        assert response["previous_response_id"] == parent["id"]
        assert text_in(response) == "Sun."
        assert cached_tokens(response) == ended["usage"]["total_tokens"] - 1
        assert inputs_of(server.engine) == await inputs_after("sunny")


async def test_a_create_that_fails_leaves_the_response_open() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        (call,) = await open_calls(client)
        await until_suspended(server)
        await client.send("response.create", **BODY, temperature=5)
        error = await client.error()
        await inject(client, output(call))
        last = await client.segment()

        assert error["error"]["param"] == "temperature"
        assert text_in(last[-1]["response"]) == "Sun."


async def test_an_abandoned_response_takes_no_outputs() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        (old,) = await open_calls(client)
        await until_suspended(server)
        abandoned = client.streams[0][0]["response"]["id"]
        await client.send("response.create", **BODY)
        await client.segment()
        (new,) = await client.calls(1)
        await inject(client, output(old), into=abandoned)
        failed = await client.up_to(FAILED)
        await inject(client, output(new))
        last = await client.segment()

        assert failed[-1]["error"]["code"] == "response_already_completed"
        assert text_in(last[-1]["response"]) == "Sun."


async def test_an_append_resumes_an_open_response_too() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        (call,) = await open_calls(client)
        await until_suspended(server)
        last = await client.append(output(call), {"role": "user", "content": "And in Narvik?"})

        assert CREATED not in types(last)
        assert last[-1]["response"]["id"] == client.streams[0][0]["response"]["id"]
        assert text_in(last[-1]["response"]) == "Sun."


async def test_an_inject_resumes_a_response_that_waits_for_an_append() -> None:
    async with suspended() as (_, client, call):
        await inject(client, output(call))
        last = await client.segment()

        assert types(last)[0] == CREATED
        assert text_in(last[-1]["response"]) == "Sun."


async def test_outputs_may_be_brought_half_by_append_and_half_by_inject() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect("inject") as client:
        oslo, bergen = await open_calls(client, 2)
        await until_suspended(server)
        await client.send("response.append", input=[output(bergen, "wet")])
        await inject(client, output(oslo, "dry"))
        await client.segment()

        assert inputs_of(server.engine) == await inputs_after("dry", "wet")


# --- Time and number -----------------------------------------------------------------------------


async def test_outputs_that_do_not_come_in_time_fail_the_response_and_not_the_connection() -> None:
    settings = Settings(suspend_ttl_seconds=0.02)
    async with serving(OSLO, settings=settings) as server, server.connect("inject") as client:
        (call,) = await open_calls(client)
        last = await client.segment()
        await inject(client, output(call))
        failed = await client.receive()
        freed = (await server.metrics())["suspend_kv_tokens"]
        again = await client.create(tool_choice="none")

        assert last[-1]["type"] == "response.failed"
        assert last[-1]["response"]["error"]["code"] == "suspension_expired"
        assert failed["error"]["code"] == "response_already_completed"
        assert freed == 0
        assert again[-1]["type"] == "response.completed"


async def test_the_response_that_has_waited_longest_makes_room() -> None:
    settings = Settings(max_suspended_per_key=1)
    async with serving(OSLO, "Sun.", settings=settings) as server:
        async with server.connect("inject") as first, server.connect("inject") as second:
            await open_calls(first)
            await until_suspended(server)
            (call,) = await open_calls(second)
            evicted = await first.segment()
            await inject(second, output(call))
            last = await second.segment()

        assert evicted[-1]["response"]["error"]["code"] == "suspension_expired"
        assert text_in(last[-1]["response"]) == "Sun."


async def test_a_create_that_was_queued_before_a_call_waits_for_the_response_before_it() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect("inject") as client:
        with held_at(3, server.engine) as model:
            await client.send("response.create", **BODY)
            await model.reached.wait()
            await client.send("response.create", **(BODY | {"tool_choice": "none"}))
            model.release()
            (call,) = await client.calls(1)
        await inject(client, output(call))
        first = await client.segment()
        second = await client.segment()

        assert first[-1]["response"]["status"] == "completed"
        assert text_in(first[-1]["response"]) == "Sun."
        assert second[0]["type"] == "response.created"
