"""How a run goes on at a tool call, as the handshake asks."""

import pytest
from websockets.exceptions import InvalidStatus

from protocol.codec import decode_object
from protocol.dialect import APPEND_BETA
from tests.server.models import OSLO, inputs_of
from tests.server.running import TERMINAL, calls_in, output, serving, suspended, text_in


async def test_a_segment_that_ends_in_a_call_is_closed_by_done() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect(append=True) as client:
        events = await client.create()

        assert events[-1]["type"] == "response.done"


async def test_the_dialect_can_be_asked_for_in_the_url() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect(query="?dialect=append") as client:
        events = await client.create()

        assert events[-1]["type"] == "response.done"


@pytest.mark.parametrize("betas", [[f"realtime=v1, {APPEND_BETA}"], ["realtime=v1", APPEND_BETA]])
async def test_the_header_may_list_several_betas(betas: list[str]) -> None:
    async with serving(OSLO) as server, server.connect(betas=betas) as client:
        events = await client.create()

        assert events[-1]["type"] == "response.done"


async def test_the_url_overrules_the_header() -> None:
    async with (
        serving(OSLO) as server,
        server.connect(append=True, query="?dialect=completed") as client,
    ):
        events = await client.create()

        assert events[-1]["type"] == "response.completed"


async def test_an_unknown_dialect_is_refused_before_the_upgrade() -> None:
    async with serving("Sun.") as server:
        with pytest.raises(InvalidStatus) as refused:
            async with server.connect(query="?dialect=inject"):
                pass

        response = refused.value.response
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        assert decode_object(bytes(response.body))["error"]["param"] == "dialect"


async def test_done_carries_the_items_so_far_of_a_response_in_progress() -> None:
    async with serving(f"Let me look.{OSLO}", "Sun.") as server:
        async with server.connect(append=True) as client:
            events = await client.create()

        response = events[-1]["response"]
        assert response["status"] == "in_progress"
        assert [item["type"] for item in response["output"]] == ["message", "function_call"]
        assert response["output"][1]["arguments"] == '{"city": "Oslo"}'


async def test_an_append_resumes_the_same_response_to_its_one_completion() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect(append=True) as client:
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
    async with serving(OSLO, OSLO, "Sun.") as server, server.connect(append=True) as client:
        first = await client.create()
        second = await client.append(output(calls_in(first)[0]))
        last = await client.append(output(calls_in(second)[0]))

        (stream,) = client.streams
        assert [event["type"] for event in stream].count("response.done") == 2
        assert last[-1]["response"]["suspend:run"]["segments"] == 3
        assert len(last[-1]["response"]["output"]) == 3


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


async def test_by_default_a_call_completes_the_response() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        events = await client.create()

        assert events[-1]["type"] == "response.completed"
        assert calls_in(events)[0]["status"] == "completed"


async def test_by_default_the_run_is_parked_and_an_append_resumes_it_as_another_response() -> None:
    async with suspended() as (reference, client, call):
        await client.append(output(call))
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create()
        parked = (await server.metrics())["suspend_runs{suspended}"]
        last = await client.append(output(calls_in(first)[0]))

        assert parked == 1
        assert last[-1]["type"] == "response.completed"
        assert last[-1]["response"]["id"] != first[-1]["response"]["id"]
        assert last[-1]["response"]["suspend:run"]["id"] == first[-1]["response"]["id"]
        assert text_in(last[-1]["response"]) == "Sun."
        assert [item["type"] for item in last[-1]["response"]["output"]] == ["message"]
        assert inputs_of(server.engine) == inputs_of(reference.engine)


async def test_the_output_budget_is_of_each_segment() -> None:
    async with serving(OSLO, "Sun.Sun.Sun.Sun.Sun.") as server:
        async with server.connect(append=True) as client:
            first = await client.create(max_output_tokens=6)
            last = await client.append(output(calls_in(first)[0]))

        assert first[-1]["response"]["usage"]["output_tokens"] == 6
        assert last[-1]["response"]["status"] == "completed"


async def test_a_segment_that_runs_out_of_budget_ends_the_response() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect(append=True) as client:
        events = await client.create(max_output_tokens=3)
        await client.send("response.append", input=[output(events[-1]["response"]["output"][0])])
        error = await client.error()

        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"]["reason"] == "max_output_tokens"
        assert events[-1]["response"]["output"][0]["status"] == "incomplete"
        assert error["error"]["code"] == "no_suspended_response"


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
