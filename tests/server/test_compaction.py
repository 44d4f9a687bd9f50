"""Conversations that the model makes shorter, when it is asked to or when they grow too long."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openresponses_types import CompactResource

from protocol.codec import decode_object, encode
from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    CustomToolCall,
    FunctionCall,
    InputItem,
    Message,
    ReasoningItem,
    UnknownItem,
    parse_items,
)
from protocol.tools import FunctionTool
from sampler.local_engine import LocalEngine
from sampler.model_loading import load_model
from sampler.recorded_turn import Item, RecordedTurn
from sampler.runner_choice import RunnerOptions
from server.access import add_api_key
from server.compaction import (
    MAX_SUMMARY_TOKENS,
    REQUEST,
    as_compacted,
    outline,
    settled,
    wire_items,
)
from server.settings import Settings
from tests.server.http_client import cached_tokens, context_length, post, post_streamed
from tests.server.models import (
    BOTH,
    OSLO,
    THOUGHT,
    context_text,
    failing_at,
    held_at,
    scripted_engine,
)
from tests.server.refusals import Refusal, refusal
from tests.server.running import (
    TOOL,
    Event,
    Running,
    calls_in,
    output,
    serving,
    text_in,
    until,
)

ANSWER, SUMMARY = "Sun.", "Let me look."
SAYS = (ANSWER, SUMMARY)
"""What a model says that has heard nothing of itself, and one that has spoken once: where a
conversation with one answer in it is compacted, first the second and then the first."""

LONG = "Rain." * 1200
QUESTION: Event = {"role": "user", "content": "Is it dry in Oslo?"}
LONG_ANSWER: Event = {"role": "assistant", "content": LONG}
NEXT: Event = {"role": "user", "content": "And in Bergen?"}
TALK = [QUESTION, LONG_ANSWER, NEXT]
AT_1000: Event = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}


def types_in(response: Event) -> list[str]:
    return [item["type"] for item in response["output"]]


def response_of(events: Sequence[Event]) -> Event:
    response: Event = events[-1]["response"]
    return response


def without_ids(answer: Event) -> list[Event]:
    return [
        {name: value for name, value in item.items() if name != "id"} for item in answer["output"]
    ]


def input_tokens(response: Event) -> int:
    return int(response["usage"]["input_tokens"])


async def compact(server: Running, **members: Any) -> Event:
    """Return the answer to a request to compact a conversation, checked."""
    async with server.http() as http:
        answer = await http.post("/v1/responses/compact", json={"model": "tiny"} | members)
    assert answer.status_code == 200, answer.text
    compacted = decode_object(answer.content)
    known = [item for item in compacted["output"] if item["type"] != "additional_tools"]
    CompactResource.model_validate(compacted | {"output": known})
    return compacted


def summary_in(answer: Event) -> str:
    """Return the summary in a response or a compacted conversation."""
    (summary,) = [item for item in parse_items(answer["output"]) if isinstance(item, Compaction)]
    return summary.summary


async def compact_refused(server: Running, **members: Any) -> Refusal:
    """Return why a conversation is not compacted."""
    async with server.http() as http:
        answer = await http.post("/v1/responses/compact", json={"model": "tiny"} | members)
    assert answer.status_code >= 400, answer.text
    return refusal(answer.status_code, answer.json()["error"])


# --- What is left of a conversation --------------------------------------------------------------

SYSTEM, ASKED, ASKED_AGAIN = Message("system", "s"), Message("user", "a"), Message("user", "b")
SAID, THOUGHT_OF = Message("assistant", "c"), ReasoningItem("d")
CALL, OTHER_CALL = FunctionCall("1", "f", "{}"), CustomToolCall("2", "g", "x")
OUTPUT, OTHER_OUTPUT = CallOutput("1", "o"), CallOutput("2", "p")
TOOLS = AdditionalTools((FunctionTool("f", None, None),))
SUM, OLD_SUM = Compaction("e"), Compaction("old")
TURN = RecordedTurn((SAID, CALL), (1, 2))

OUTLINES: dict[str, tuple[list[Item], list[Item]]] = {
    "a summary takes the place of what the model said": (
        [SYSTEM, ASKED, SAID, ASKED_AGAIN],
        [SYSTEM, ASKED, SUM, ASKED_AGAIN],
    ),
    "and of thoughts, calls and outputs": (
        [ASKED, THOUGHT_OF, CALL, OUTPUT, TURN],
        [ASKED, SUM],
    ),
    "and of earlier summaries": ([ASKED, OLD_SUM, ASKED_AGAIN], [ASKED, SUM, ASKED_AGAIN]),
    "all that users said is kept in order": (
        [ASKED, SAID, ASKED_AGAIN, SAID],
        [ASKED, ASKED_AGAIN, SUM],
    ),
    "tools are kept, what nobody understands is not": (
        [TOOLS, ASKED, UnknownItem("x"), SAID],
        [TOOLS, ASKED, SUM],
    ),
    "where the model said nothing, the summary comes last": ([SYSTEM, ASKED], [SYSTEM, ASKED, SUM]),
    "a call without output stays": ([ASKED, SAID, CALL], [ASKED, SUM, CALL]),
    "and so do the outputs of other calls of its turn": (
        [ASKED, SAID, OTHER_CALL, CALL, OTHER_OUTPUT],
        [ASKED, SUM, OTHER_CALL, CALL, OTHER_OUTPUT],
    ),
    "and what came after it": ([ASKED, SAID, CALL, ASKED_AGAIN], [ASKED, SUM, CALL, ASKED_AGAIN]),
    "a call that has just been answered does not": ([ASKED, TURN, OUTPUT], [ASKED, SUM]),
}


@pytest.mark.parametrize("claim", OUTLINES)
def test_a_summary_takes_the_place_of_what_the_model_did(claim: str) -> None:
    items, left = OUTLINES[claim]

    assert outline(items).filled(SUM) == left


def test_what_has_no_output_yet_cannot_be_summarised() -> None:
    answered: list[Item] = [ASKED, CALL, OUTPUT]

    assert settled([*answered, OTHER_CALL]) == answered
    assert settled(answered) == answered
    assert settled([*answered, OTHER_CALL, FunctionCall("3", "f", "{}"), OTHER_OUTPUT]) == answered


@pytest.mark.parametrize(
    "items",
    [
        [ASKED, SAID, ASKED_AGAIN, SUM, TURN, OUTPUT],
        [ASKED, SUM, ASKED_AGAIN, TURN, OUTPUT],
        [ASKED, OLD_SUM, SAID, ASKED_AGAIN, SUM, TURN, OUTPUT],
    ],
    ids=["as it was", "what was left", "compacted twice"],
)
def test_a_client_may_keep_what_was_compacted(items: list[Item]) -> None:
    assert as_compacted(items) == [ASKED, SUM, ASKED_AGAIN, TURN, OUTPUT]


def test_what_was_never_compacted_is_left_as_it_is() -> None:
    items: list[Item] = [ASKED, SAID, UnknownItem("x"), ASKED_AGAIN]

    assert as_compacted(items) == items


def test_what_is_on_the_wire_says_what_it_was() -> None:
    items: list[InputItem] = [
        SYSTEM, TOOLS, ASKED, SUM, SAID, THOUGHT_OF, CALL, OTHER_CALL, OUTPUT, OTHER_OUTPUT,
    ]  # fmt: skip

    wire = decode_object(encode({"items": wire_items(items)}))["items"]

    assert [without_id(item) for item in parse_items(wire)] == items
    assert [item["type"] for item in wire[-2:]] == [
        "function_call_output",
        "custom_tool_call_output",
    ]
    assert len({item["id"] for item in wire}) == len(wire)
    assert {item["status"] for item in wire} == {"completed"}


def without_id(item: InputItem) -> InputItem:
    return msgspec.structs.replace(item, id=None) if hasattr(item, "id") else item


def test_what_was_not_understood_is_not_put_on_the_wire() -> None:
    assert wire_items([UnknownItem("x")]) == []


# --- POST /v1/responses/compact ------------------------------------------------------------------


async def test_a_conversation_is_compacted_to_what_users_said_and_a_summary() -> None:
    async with serving(*SAYS) as server:
        compacted = await compact(server, input=TALK)

    first, summary, last = compacted["output"]
    assert compacted["id"].startswith("resp_")
    assert compacted["object"] == "response.compaction"
    assert first["content"] == [{"type": "input_text", "text": QUESTION["content"]}]
    assert (summary["type"], summary["id"][:4]) == ("compaction", "cmp_")
    assert last["content"][0]["text"] == NEXT["content"]
    assert compacted["usage"]["output_tokens"] == len([SUMMARY, "<|im_end|>"])


@pytest.mark.parametrize("transport", ["http", "websocket"])
async def test_what_is_left_begins_a_new_conversation(transport: str) -> None:
    async with serving(*SAYS) as server:
        left = (await compact(server, input=TALK[:2]))["output"]
        if transport == "http":
            response = await post(server, input=[*left, NEXT])
        else:
            async with server.connect() as client:
                response = response_of(await client.create(input=[*left, NEXT]))

        assert text_in(response) == ANSWER
        told = context_text(server.engine)
        assert told.index(QUESTION["content"]) < told.index(SUMMARY) < told.index(NEXT["content"])
        assert LONG not in told


async def test_the_model_is_asked_for_the_summary_in_the_conversation_itself() -> None:
    async with serving(*SAYS) as server:
        await compact(server, input=TALK, instructions="Be brief.")

        told = context_text(server.engine)
        asked = [text in told for text in ("Be brief.", LONG, NEXT["content"])]
        assert all(asked)
        assert REQUEST.text in told


async def test_a_response_is_compacted_on_top_of_its_cache() -> None:
    async with serving(*SAYS, settings=Settings(recent_responses=4)) as server:
        response = await post(server, input=QUESTION["content"], instructions="Be brief.")
        compacted = await compact(server, previous_response_id=response["id"])

        assert cached_tokens(compacted) == context_length(response)
        assert [item["type"] for item in compacted["output"]] == ["message", "compaction"]


async def test_what_a_request_adds_to_a_response_is_compacted_with_it() -> None:
    async with serving(*SAYS) as server:
        response = await post(server)
        compacted = await compact(server, previous_response_id=response["id"], input=[NEXT])

        assert [item["type"] for item in compacted["output"]] == [
            "message",
            "compaction",
            "message",
        ]


async def test_calls_that_wait_for_outputs_are_left_as_they_are() -> None:
    async with serving(BOTH, SUMMARY) as server:
        response = await post(server, input=[QUESTION])
        calls = response["output"]
        answered = output(calls[0])
        compacted = await compact(server, previous_response_id=response["id"], input=[answered])
        _, summary, *waiting = compacted["output"]
        answer = await post(server, input=[*compacted["output"], output(calls[1])])

        assert summary["type"] == "compaction"
        assert [item["call_id"] for item in waiting] == [
            calls[0]["call_id"],
            calls[1]["call_id"],
            calls[0]["call_id"],
        ]
        assert answer["status"] == "completed"


async def test_thoughts_are_no_part_of_a_summary() -> None:
    async with serving(engine=scripted_engine(ANSWER, THOUGHT + SUMMARY, thinks=True)) as server:
        compacted = await compact(server, input=TALK[:2])

        assert summary_in(compacted) == SUMMARY


async def test_a_summary_makes_no_calls() -> None:
    async with serving(ANSWER, OSLO) as server:
        tools = {"type": "additional_tools", "tools": [TOOL]}
        compacted = await compact(server, input=[tools, *TALK[:2]])

        assert [item["type"] for item in compacted["output"]] == [
            "additional_tools",
            "message",
            "compaction",
        ]
        assert "<tool_call>" not in summary_in(compacted)


async def test_a_conversation_that_is_too_long_is_summarised_without_its_oldest_turns() -> None:
    engine = scripted_engine("Rain.", "Rain.", SUMMARY, max_context=2048)
    async with serving(engine=engine) as server:
        compacted = await compact(server, input=[*TALK[:2], *TALK, *TALK[:2]])

        assert compacted["usage"]["input_tokens"] < 2048 - MAX_SUMMARY_TOKENS
        assert len(compacted["output"]) == 5, "nothing that a user said is lost"


async def test_of_many_words_of_a_user_the_latest_are_kept() -> None:
    said = [{"role": "user", "content": f"{n}" + "Rain." * 300} for n in range(4)]
    async with serving(*SAYS, engine=scripted_engine(*SAYS, max_context=2048)) as server:
        compacted = await compact(server, input=[*said, {"role": "assistant", "content": "Sun."}])

        *kept, summary = compacted["output"]
        assert [item["content"][0]["text"][0] for item in kept] == ["1", "2", "3"]
        assert summary["type"] == "compaction"


async def test_nothing_of_a_compaction_is_stored() -> None:
    async with serving(*SAYS) as server, server.http() as http:
        compacted = await compact(server, input=TALK)
        found = await http.get(f"/v1/responses/{compacted['id']}")
        follower = await http.post(
            "/v1/responses", json={"input": "Hi", "previous_response_id": compacted["id"]}
        )

        assert found.status_code == 404
        assert follower.json()["error"]["code"] == "previous_response_not_found"


REFUSED: dict[str, tuple[Event, Refusal]] = {
    "nothing to compact": ({}, Refusal(400, "missing_required_parameter", "input")),
    "another model": (
        {"input": TALK, "model": "gpt-9"},
        Refusal(404, "model_not_found", "model"),
    ),
    "a response that never was": (
        {"previous_response_id": "resp_1"},
        Refusal(400, "previous_response_not_found", "previous_response_id"),
    ),
    "an output of no call": ({"input": [QUESTION, output("call_1")]}, Refusal(400, None, "input")),
    "a last turn that does not fit": (
        {"input": [{"role": "user", "content": LONG * 4}]},
        Refusal(400, "context_length_exceeded", "input"),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_what_cannot_be_compacted_is_refused(why: str) -> None:
    members, expected = REFUSED[why]
    async with serving(*SAYS) as server:
        assert await compact_refused(server, **members) == expected


async def test_a_response_of_another_key_cannot_be_compacted(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    alice, bob = ({"Authorization": f"Bearer {add_api_key(file, name)}"} for name in ("a", "b"))
    settings = Settings(recent_responses=4, api_key_file=file)
    async with serving(*SAYS, settings=settings) as server, server.http() as http:
        response = await post(server, headers=alice)
        body = {"model": "tiny", "previous_response_id": response["id"]}
        refused = await http.post("/v1/responses/compact", json=body, headers=bob)
        own = await http.post("/v1/responses/compact", json=body, headers=alice)

        assert refused.json()["error"]["code"] == "previous_response_not_found"
        assert own.status_code == 200


async def test_a_step_that_fails_is_an_error_500() -> None:
    async with serving(*SAYS) as server:
        with failing_at(2, server.engine):
            refused = await compact_refused(server, input=TALK)

        assert refused == Refusal(500, "server_error", None)


async def test_a_model_that_has_nothing_to_say_loses_nothing() -> None:
    async with serving(ANSWER, "") as server:
        compacted = await compact(server, input=TALK)

        assert parse_items(without_ids(compacted)) == parse_items(TALK)


async def test_a_client_that_leaves_ends_the_summary() -> None:
    async with serving(*SAYS) as server:
        with held_at(2, server.engine) as held:
            async with asyncio.TaskGroup() as tasks:
                request = tasks.create_task(compact(server, input=TALK))
                await held.reached.wait()
                request.cancel()
            held.release()
            await server.until_free()

        assert server.engine.counters.forward_passes == 2


async def test_a_summary_is_a_run_like_any_other() -> None:
    async with serving(*SAYS) as server:
        await compact(server, input=TALK)
        metrics = await server.metrics()

        assert (
            metrics["suspend_pre_inference_total"] == metrics["suspend_post_inference_total"] == 1
        )
        assert metrics["suspend_time_to_first_token_seconds_count"] == 1
        assert metrics["suspend_tokens_sampled_total"] == len([SUMMARY, "<|im_end|>"])


# --- When a conversation has grown too long ------------------------------------------------------


async def test_a_long_conversation_is_compacted_before_it_is_answered() -> None:
    async with serving(*SAYS) as server, server.connect() as client:
        events = await client.create(input=TALK, **AT_1000)

        assert [event["type"] for event in events[:6]] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.compaction.compacting",
            "response.output_item.done",
            "response.output_item.added",
        ]
        assert types_in(response_of(events)) == ["compaction", "message"]
        assert text_in(response_of(events)) == ANSWER
        told = context_text(server.engine)
        assert told.index(QUESTION["content"]) < told.index(SUMMARY) < told.index(NEXT["content"])
        assert LONG not in told


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_it_is_compacted_over_http_too(is_streamed: bool) -> None:
    async with serving(*SAYS) as server:
        if is_streamed:
            response = response_of(await post_streamed(server, input=TALK, **AT_1000))
        else:
            response = await post(server, input=TALK, **AT_1000)

        assert types_in(response) == ["compaction", "message"]


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"context_management": [{"type": "compaction"}]},
        {"context_management": [{"type": "compaction", "compact_threshold": 3000}]},
        AT_1000 | {"generate": False},
    ],
    ids=["not asked for", "no threshold", "not long enough", "a warm-up"],
)
async def test_a_conversation_is_left_alone(members: Event) -> None:
    async with serving(*SAYS) as server, server.connect() as client:
        response = response_of(await client.create(input=TALK, **members))

        assert "compaction" not in types_in(response)


async def test_the_words_of_a_user_alone_are_not_compacted() -> None:
    said = [{"role": "user", "content": "Rain." * 100}] * 12
    async with serving(*SAYS) as server, server.connect() as client:
        members = {"input": [*said[:2], {"role": "assistant", "content": "Sun."}, *said]}
        response = response_of(await client.create(**members, **AT_1000))

        assert types_in(response) == ["message"]
        assert context_text(server.engine).count("Rain." * 100) == 14


async def test_a_conversation_that_cannot_be_summarised_goes_on_as_it_is() -> None:
    async with serving(ANSWER, "") as server, server.connect() as client:
        response = response_of(await client.create(input=TALK, **AT_1000))

        assert response["status"] == "completed"
        assert "compaction" not in types_in(response)
        assert LONG in context_text(server.engine)


async def test_the_chain_goes_on_from_what_is_left() -> None:
    async with serving(ANSWER, SUMMARY) as server, server.connect() as client:
        first = response_of(await client.create(input=TALK, store=False, **AT_1000))
        second = response_of(await client.follow(first, QUESTION, **AT_1000))

        assert types_in(second) == ["message"]
        assert input_tokens(second) < 400
        # All of it but the token that was sampled last, in the cache of the run that answered.
        assert 0 < input_tokens(second) - cached_tokens(second) < 60


async def test_the_summary_is_made_on_top_of_the_cache() -> None:
    async with serving(ANSWER, "Rain.", SUMMARY) as server, server.connect() as client:
        first = response_of(await client.create(input=TALK, store=False))
        second = response_of(await client.follow(first, QUESTION, **AT_1000))

        assert types_in(second) == ["compaction", "message"]
        assert cached_tokens(second) >= context_length(first)


async def test_usage_counts_the_summary_and_the_answer() -> None:
    async with serving(*SAYS) as server, server.connect() as client:
        response = response_of(await client.create(input=TALK, **AT_1000))
        metrics = await server.metrics()

        usage, run = response["usage"], response["suspend:run"]
        assert usage["output_tokens"] == len([SUMMARY, "<|im_end|>", ANSWER, "<|im_end|>"])
        assert usage["input_tokens"] > 1200
        assert run["usage"]["total_tokens"] == usage["total_tokens"]
        assert run["segments"] == 1
        assert run["tokens_forwarded"] == metrics["suspend_tokens_forwarded_total"]
        assert metrics["suspend_post_inference_total"] == 2


async def test_a_compacted_response_is_suspended_like_any_other() -> None:
    async with serving(OSLO, SUMMARY) as server, server.connect("append") as client:
        first = await client.create(input=TALK, **AT_1000)
        last = await client.append(output(calls_in(first)[0], LONG))

        done, completed = response_of(first), response_of(last)
        assert first[-1]["type"] == "response.done"
        assert types_in(completed) == ["compaction", "function_call", "message"]
        assert done["usage"]["input_tokens"] > 1200, "the first segment includes the summary"
        assert completed["usage"]["output_tokens"] == len([SUMMARY, "<|im_end|>"])


async def test_where_segments_are_not_told_apart_usage_is_the_sum_of_all() -> None:
    async with serving(OSLO, SUMMARY) as server, server.connect("inject") as client:
        await client.send("response.create", input=TALK, tools=[TOOL], **AT_1000)
        events = [await client.receive()]
        while not calls_in(events):
            events.append(await client.receive())
        await client.send(
            "response.inject",
            response_id=events[0]["response"]["id"],
            input=[output(calls_in(events)[0])],
        )
        response = response_of(await client.segment())

        assert types_in(response) == ["compaction", "function_call", "message"]
        assert response["usage"]["total_tokens"] == response["suspend:run"]["usage"]["total_tokens"]


async def test_a_stored_response_is_followed_from_what_is_left() -> None:
    async with serving(*SAYS) as server, server.http() as http:
        response = await post(server, input=TALK, **AT_1000)
        stored = (await http.get(f"/v1/responses/{response['id']}")).json()
        follower = await post(server, previous_response_id=response["id"], input="Hi")
        path = f"/v1/responses/{follower['id']}/input_items?order=asc"
        listed = (await http.get(path)).json()["data"]

        assert stored == response
        assert input_tokens(follower) < 400
        # Clients see the conversation as it was, with the compaction in it.
        assert [item["type"] for item in listed] == [
            *["message"] * 3, "compaction", *["message"] * 2,
        ]  # fmt: skip
        assert listed[3] == response["output"][0]


async def test_clients_that_keep_the_history_are_told_the_same() -> None:
    async with serving(*SAYS) as server, server.connect() as client:
        first = response_of(await client.create(input=TALK, store=False, **AT_1000))
        chained = response_of(await client.follow(first, QUESTION))
        whole = [*TALK, *first["output"], QUESTION]
        resent = response_of(await client.create(input=whole, **AT_1000))
        pruned = response_of(await client.create(input=whole[3:], **AT_1000))

        assert types_in(resent) == types_in(pruned) == ["message"]
        assert input_tokens(resent) == input_tokens(chained)
        assert cached_tokens(resent) >= cached_tokens(chained)


async def test_an_echo_of_the_compaction_changes_nothing() -> None:
    async with serving(OSLO, SUMMARY) as server, server.connect() as client:
        first = response_of(await client.create(input=TALK, store=False, **AT_1000))
        outputs = [output(first["output"][1])]
        plain = response_of(await client.follow(first, *outputs))
        again = response_of(await client.create(input=TALK, store=False, **AT_1000))
        echoed = response_of(
            await client.follow(again, *again["output"], output(again["output"][1]))
        )

        assert text_in(echoed) == text_in(plain) == SUMMARY
        assert input_tokens(echoed) == input_tokens(plain)


async def test_compacting_makes_room_for_what_does_not_fit_the_context() -> None:
    engine = scripted_engine(*SAYS, max_context=1536)
    async with serving(engine=engine) as server, server.connect() as client:
        call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        items = [QUESTION, LONG_ANSWER, NEXT, call, output("1", "Rain." * 300)]
        response = response_of(await client.create(input=items, **AT_1000))
        await client.send("response.create", input=items)
        error = await client.error()

        assert types_in(response) == ["compaction", "message"]
        assert error["error"]["code"] == "context_length_exceeded"


async def test_a_step_that_fails_while_compacting_fails_the_response() -> None:
    async with serving(*SAYS) as server, server.connect() as client:
        with failing_at(2, server.engine):
            failed = response_of(await client.create(input=TALK, **AT_1000))
        answered = response_of(await client.create(input=[QUESTION]))

        assert failed["status"] == "failed"
        assert failed["output"] == []
        assert answered["status"] == "completed"


async def test_a_client_that_leaves_while_its_conversation_is_compacted_frees_the_run() -> None:
    async with serving(*SAYS) as server, server.connect() as client:
        with held_at(2, server.engine) as held:
            await client.send("response.create", input=TALK, **AT_1000)
            await held.reached.wait()
            client.abort()
            held.release()
            await server.until_free()


async def test_a_response_can_be_cancelled_while_its_conversation_is_compacted() -> None:
    async with serving(*SAYS) as server, server.http() as http:
        with held_at(2, server.engine) as held:
            response = await post(server, input=TALK, background=True, **AT_1000)
            await held.reached.wait()
            async with asyncio.TaskGroup() as tasks:
                path = f"/v1/responses/{response['id']}/cancel"
                cancelling = tasks.create_task(http.post(path))
                await until(lambda: any(run.wanted_stop for run in server.engine.runs))
                held.release()
            ended = cancelling.result().json()

        assert ended["status"] == "cancelled"
        assert ended["output"] == []
        assert ended["usage"]["output_tokens"] > 0


async def test_what_is_steered_while_compacting_is_taken_up_afterwards() -> None:
    async with serving(*SAYS) as server, server.connect() as client:
        with held_at(2, server.engine) as held:
            await client.send("response.create", input=TALK, store=False, **AT_1000)
            created = await client.receive()
            await held.reached.wait()
            await client.send(
                "response.steer", previous_response_id=created["response"]["id"], input="Hurry."
            )
            await client.until_taken()
            held.release()
            first = await client.segment()
            second = response_of(await client.segment())

        assert types_in(response_of(first)) == ["compaction", "message"]
        assert second["previous_response_id"] == created["response"]["id"]
        assert "Hurry." in context_text(server.engine)


async def test_a_response_whose_turn_never_came_leaves_nothing() -> None:
    settings = Settings(recent_responses=0, max_in_flight=1)
    async with serving(*SAYS, settings=settings) as server:
        async with server.connect() as client:
            with held_at(1, server.engine) as held:
                await client.send("response.create", input="Hi", stream_id="a")
                await held.reached.wait()
                await client.send("response.create", input=TALK, stream_id="b", **AT_1000)
                await until(lambda: len(server.engine.runs) == 2)
                client.abort()
                held.release()
                await server.until_free()
        metrics = await server.metrics()

        assert (
            metrics["suspend_pre_inference_total"] == metrics["suspend_post_inference_total"] == 2
        )


# --- The embedded model --------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_real_model_goes_on_from_its_own_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.compaction.MAX_SUMMARY_TOKENS", 24)
    engine = LocalEngine(load_model(device="cpu", options=RunnerOptions(is_exact=True)))
    said = "Oslo is the capital of Norway and lies at the end of the Oslofjord. " * 60
    talk = [QUESTION, {"role": "assistant", "content": said}, NEXT]
    members: Event = {"tools": [], "temperature": 0, "max_output_tokens": 6}
    async with serving(engine=engine) as server, server.connect() as client:
        compacted = await compact(server, model=engine.model.name, input=talk)
        fresh = response_of(await client.create(input=compacted["output"], **members))
        grown = response_of(await client.create(input=talk, **members, **AT_1000))
        follower = response_of(await client.follow(grown, QUESTION, **members, **AT_1000))

        assert "Oslo" in summary_in(compacted) == summary_in(grown)
        assert text_in(fresh) == text_in(grown)
        assert types_in(grown) == ["compaction", "message"]
        assert types_in(follower) == ["message"]
        assert input_tokens(follower) < 300


async def test_the_model_has_to_be_named() -> None:
    async with serving(*SAYS) as server, server.http() as http:
        answer = await http.post("/v1/responses/compact", json={"input": TALK})

        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "missing_required_parameter"
        assert answer.json()["error"]["param"] == "model"
