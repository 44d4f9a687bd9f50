"""Steering: what a client has to say to a response that is in progress."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from server.settings import Settings
from tests.server.http_client import cached_tokens, context_length
from tests.server.models import (
    BOTH,
    OSLO,
    Held,
    context_text,
    encoded,
    failing_at,
    held_at,
    inputs_of,
    scripted_engine,
    text_of,
)
from tests.server.running import BODY, Client, Event, Running, calls_in, output, serving, text_in

QUESTION: Event = {
    "role": "user",
    "content": [{"type": "input_text", "text": BODY["input"]}],
}
RAIN = "Rain.Rain."
THOUGHTS = "<think>\nWell, well.\n</think>"
THOUGHTFUL = f"{THOUGHTS}\n\n{RAIN}"

COMPLETED = "response.completed"
INCOMPLETE = "response.incomplete"
PENDING = "response.steer.pending"
FAILED = "response.steer.failed"


def steers_in(events: list[Event]) -> list[Event]:
    """Return what ``events`` say of steers."""
    return [event for event in events if event["type"].startswith("response.steer.")]


def order_of(events: list[Event], *types: str) -> list[str]:
    """Return which of ``types`` came, in order."""
    return [event["type"] for event in events if event["type"] in types]


class Speaking:
    """A response that has been announced, and is held before it says more."""

    def __init__(self, server: Running, client: Client, model: Held, created: Event) -> None:
        self.server = server
        self.client = client
        self.id: str = created["response"]["id"]
        self._model = model

    async def steer(self, *told: Any, **members: Any) -> None:
        """Steer it once for each of ``told``, and wait until the server has read that."""
        for text in told:
            frame = {"previous_response_id": self.id, "input": text}
            await self.client.send("response.steer", **(frame | members))
        await self.client.until_taken()

    async def go_on(self, until: str, times: int = 1) -> list[Event]:
        """Let the model go on, and return the events up to the last that is waited for."""
        self._model.release()
        events: list[Event] = []
        while order_of(events, until).count(until) < times:
            events.append(await self.client.receive())
            assert events[-1]["type"] != "error", events[-1]
        return events


@asynccontextmanager
async def speaking(
    *script: str,
    step: int = 2,
    dialect: str | None = None,
    max_context: int = 4096,
    settings: Settings | None = None,
    **members: Any,
) -> AsyncIterator[Speaking]:
    """Serve a model that says ``script``, and may think, and hold it before its ``step``-th step in
    the response to a create of ``members``."""
    async with AsyncExitStack() as stack:
        engine = scripted_engine(*script, thinks=True, max_context=max_context)
        server = await stack.enter_async_context(serving(engine=engine, settings=settings))
        client = await stack.enter_async_context(server.connect(dialect))
        model = stack.enter_context(held_at(step, engine))
        await client.send("response.create", **(BODY | {"store": False} | members))
        await model.reached.wait()
        yield Speaking(server, client, model, await client.receive())


# --- Accepted ------------------------------------------------------------------------------------


async def test_what_was_steered_is_answered_by_a_successor_that_nobody_asked_for() -> None:
    async with speaking(RAIN, "Sun.") as first:
        await first.steer("In Bergen, I mean.")
        events = await first.go_on(COMPLETED, 2)

        _, successor = first.client.streams
        assert order_of(
            events, "response.created", "response.steer.accepted", COMPLETED, PENDING
        ) == ["response.steer.accepted", COMPLETED, "response.created", COMPLETED]
        (accepted,) = steers_in(events)
        assert accepted["steer"]["previous_response_id"] == first.id
        assert successor[0]["response"]["previous_response_id"] == first.id
        assert text_in(successor[-1]["response"]) == "Sun."


async def test_a_successor_knows_what_was_said_and_what_was_steered() -> None:
    async with speaking(RAIN, "Sun.") as first:
        await first.steer("In Bergen, I mean.")
        events = await first.go_on(COMPLETED, 2)

        text = context_text(first.server.engine)
        before, after = (event["response"] for event in events if event["type"] == COMPLETED)
        assert text.index("Rain.") < text.index("In Bergen, I mean.") < text.index("Sun.")
        assert cached_tokens(after) == context_length(before)


async def test_a_successor_is_asked_as_the_response_was() -> None:
    asked: Any = {"instructions": "Be brief.", "temperature": 0.5, "metadata": {"k": "v"}}
    async with speaking(RAIN, "Sun.", **asked) as first:
        await first.steer("In Bergen, I mean.")
        await first.go_on(COMPLETED, 2)

        responses = [stream[-1]["response"] for stream in first.client.streams]
        for member in (*asked, "tools", "tool_choice", "model", "store"):
            assert responses[1][member] == responses[0][member]


@pytest.mark.parametrize(
    "told",
    [
        "In Bergen.",
        [{"role": "user", "content": "In Bergen."}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "In "}]}],
        [{"role": "user", "content": "In "}, {"role": "user", "content": "Bergen."}],
    ],
    ids=["string", "message", "parts", "two messages"],
)
async def test_it_may_be_said_in_any_form(told: Any) -> None:
    async with speaking(RAIN, "Sun.") as first:
        await first.steer(told)
        await first.go_on(COMPLETED, 2)

        said = context_text(first.server.engine).rpartition("user")[2]
        assert said.strip().startswith(("In ", "Bergen."))
        assert text_in(first.client.streams[-1][-1]["response"]) == "Sun."


async def test_several_are_answered_together_in_the_order_they_came() -> None:
    async with speaking(RAIN, "Sun.") as first:
        await first.steer("One.", "Two.", "Three.")
        events = await first.go_on(COMPLETED, 2)

        text = context_text(first.server.engine)
        assert len({event["steer"]["id"] for event in steers_in(events)}) == 3
        assert len(first.client.streams) == 2
        assert text.index("One.") < text.index("Two.") < text.index("Three.") < text.index("Sun.")


async def test_a_successor_can_be_steered_too() -> None:
    async with speaking(RAIN, "Sun. " * 40, "Rain.") as first:
        await first.steer("One.")
        await first.go_on("response.created")
        with held_at(1, first.server.engine) as model:
            await model.reached.wait()
            second = first.client.streams[-1][0]["response"]["id"]
            await first.steer("Two.", previous_response_id=second)
            model.release()
        await first.go_on(COMPLETED, 2)

        ids = [stream[0]["response"]["id"] for stream in first.client.streams]
        parents = [stream[0]["response"]["previous_response_id"] for stream in first.client.streams]
        assert parents == [None, *ids[:2]]


async def test_creates_that_wait_come_after_the_successor() -> None:
    async with speaking(RAIN, "Sun.") as first:
        await first.client.send("response.create", **BODY, user="later")
        await first.steer("One.")
        await first.go_on(COMPLETED, 3)

        users = [stream[0]["response"]["user"] for stream in first.client.streams]
        assert users == [None, None, "later"]


async def test_a_named_lane_is_steered_by_the_response_s_id_alone() -> None:
    async with speaking(RAIN, "Sun.", stream_id="a") as first:
        await first.steer("One.")
        events = await first.go_on(COMPLETED, 2)

        assert {event["stream_id"] for event in events} == {"a"}


# --- While it thinks -----------------------------------------------------------------------------


async def test_a_response_that_thinks_ends_when_it_has_thought() -> None:
    async with speaking(THOUGHTFUL, "Sun.") as first:
        await first.steer("In Bergen, I mean.")
        events = await first.go_on(COMPLETED)

        (ended,) = (event["response"] for event in events if event["type"] == INCOMPLETE)
        assert ended["status"] == "incomplete"
        assert ended["incomplete_details"] == {"reason": "steered"}
        assert [item["type"] for item in ended["output"]] == ["reasoning"]
        assert ended["output"][0]["status"] == "completed"
        assert ended["output"][0]["content"][0]["text"] == "Well, well."


async def test_its_successor_goes_on_from_the_tokens_of_the_thoughts() -> None:
    async with speaking(THOUGHTFUL, "Sun.") as first:
        await first.steer("In Bergen, I mean.")
        events = await first.go_on(COMPLETED)

        ended, last = (
            event["response"] for event in events if event["type"] in (INCOMPLETE, COMPLETED)
        )
        text = context_text(first.server.engine)
        assert last["previous_response_id"] == ended["id"]
        assert text_in(last) == "Sun."
        assert cached_tokens(last) == context_length(ended)
        assert text.index(THOUGHTS) < text.index("In Bergen, I mean.") < text.index("Sun.")
        assert "Rain." not in text


async def test_a_response_that_has_thought_and_speaks_is_heard_out() -> None:
    last_step = len(encoded(THOUGHTFUL))
    async with speaking(THOUGHTFUL, "Sun.", step=last_step) as first:
        await first.steer("In Bergen, I mean.")
        await first.go_on(COMPLETED, 2)

        texts = [text_in(stream[-1]["response"]) for stream in first.client.streams]
        assert texts == [RAIN, "Sun."]


async def test_a_forced_call_that_was_not_made_yet_is_still_to_be_made() -> None:
    async with speaking(f"{THOUGHTS}\n\n{OSLO}", OSLO, tool_choice="required") as first:
        await first.steer("In Bergen, I mean.")
        events = await first.go_on(COMPLETED)

        assert [item["type"] for item in events[-1]["response"]["output"]] == ["function_call"]


# --- Where outputs are needed first --------------------------------------------------------------


async def test_a_response_that_stops_for_outputs_says_which() -> None:
    async with speaking(BOTH, "Sun.") as first:
        await first.steer("In Bergen, I mean.")
        events = await first.go_on(PENDING)

        stubs = [
            {"type": "function_call_output", "call_id": call["call_id"], "name": "get_weather"}
            for call in calls_in(events)
        ]
        accepted, pending = steers_in(events)
        assert order_of(events, COMPLETED, PENDING) == [COMPLETED, PENDING]
        assert pending["steer"] == accepted["steer"]
        assert pending["reason"] == "waiting_for_required_input"
        assert pending["required_input"] == stubs
        assert len(first.client.streams) == 1


async def follow(first: Speaking, events: list[Event], **members: Any) -> list[Event]:
    """Answer the calls of a response that was steered."""
    parent = {"id": first.id}
    return await first.client.follow(parent, *map(output, calls_in(events)), **members)


async def input_of(first: Speaking, response_id: str) -> list[tuple[str, str | None]]:
    """Return the types and texts of what a stored response was told."""
    async with first.server.http() as http:
        page = await http.get(f"/v1/responses/{response_id}/input_items?order=asc")
    return [
        (item["type"], part.get("text"))
        for item in page.json()["data"]
        for part in item.get("content", [{}])
    ]


async def test_the_next_create_that_follows_it_brings_what_was_steered() -> None:
    async with speaking(OSLO, "Sun.") as first:
        await first.steer("One.", "Two.")
        events = await first.go_on(PENDING, 2)
        last = await follow(first, events)

        text = context_text(first.server.engine)
        assert text_in(last[-1]["response"]) == "Sun."
        assert text.index("sunny") < text.index("One.") < text.index("Two.") < text.index("Sun.")


async def test_what_was_steered_comes_before_the_create_s_own_input() -> None:
    async with speaking(OSLO, "Sun.", store=True) as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        (call,) = calls_in(events)
        last = await first.client.follow({"id": first.id}, output(call), QUESTION, store=True)

        text = context_text(first.server.engine)
        told = await input_of(first, last[-1]["response"]["id"])
        assert text.rindex("One.") < text.rindex(BODY["input"])
        assert told[-3:] == [
            ("message", "One."),
            ("function_call_output", None),
            ("message", BODY["input"]),
        ]


async def test_what_was_steered_is_brought_once() -> None:
    async with speaking(OSLO, "Rain.", "Sun.") as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        second = await follow(first, events)
        await first.client.follow(second[-1]["response"], QUESTION)

        assert context_text(first.server.engine).count("One.") == 1


async def test_a_fork_brings_what_was_steered_too() -> None:
    async with speaking(OSLO, "Sun.", stream_id="a") as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        last = await follow(first, events, stream_id="b")

        assert last[-1]["stream_id"] == "b"
        assert "One." in context_text(first.server.engine)


async def test_of_two_forks_at_once_one_brings_what_was_steered() -> None:
    async with speaking(OSLO, "Sun.") as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        asked = {"previous_response_id": first.id, "input": list(map(output, calls_in(events)))}
        for lane in ("a", "b"):
            await first.client.send("response.create", **(BODY | asked), stream_id=lane)
        await first.go_on(COMPLETED, 2)

        assert text_of(inputs_of(first.server.engine)).count("One.") == 1


async def test_a_warm_up_in_between_does_not_bring_it() -> None:
    async with speaking(OSLO, "Sun.") as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        warm_up = await follow(first, events, generate=False)
        last = await follow(first, events)

        num_tokens = last[-1]["response"]["usage"]["input_tokens"]
        assert warm_up[-1]["response"]["usage"]["input_tokens"] < num_tokens
        assert "One." in text_of(inputs_of(first.server.engine))


async def test_a_create_that_follows_nothing_does_not_bring_it() -> None:
    async with speaking(OSLO, "Sun.") as first:
        await first.steer("One.")
        await first.go_on(PENDING)
        await first.client.create()

        assert "One." not in context_text(first.server.engine)


async def test_a_create_that_is_refused_does_not_bring_it() -> None:
    async with speaking(OSLO, "Sun.") as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        asked = {"previous_response_id": first.id, "input": [QUESTION], "stream_id": "b"}
        await first.client.send("response.create", **(BODY | asked))
        error = await first.client.error()
        await follow(first, events)

        assert error["error"]["message"].startswith("No tool output found")
        assert "One." in context_text(first.server.engine)


async def test_what_was_steered_dies_with_its_connection() -> None:
    async with speaking(OSLO, "Sun.", store=True) as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        first.client.abort()
        async with first.server.connect() as other:
            last = await other.follow({"id": first.id}, *map(output, calls_in(events)))

        assert text_in(last[-1]["response"]) == "Sun."
        assert "One." not in context_text(first.server.engine)


# --- A suspended run -----------------------------------------------------------------------------


async def test_a_suspended_response_takes_it_with_the_outputs() -> None:
    async with speaking(OSLO, "Sun.", dialect="append") as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        last = await first.client.append(*map(output, calls_in(events)))

        text = context_text(first.server.engine)
        assert order_of(events, "response.done", PENDING) == ["response.done", PENDING]
        assert last[-1]["response"]["id"] == first.id
        assert text_in(last[-1]["response"]) == "Sun."
        assert text.index("sunny") < text.index("One.") < text.index("Sun.")


async def test_a_suspended_response_is_stored_with_it() -> None:
    async with speaking(OSLO, "Sun.", dialect="append", store=True) as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        await first.client.append(*map(output, calls_in(events)))

        assert "One." in [text for _, text in await input_of(first, first.id)]


@pytest.mark.parametrize("dialect", ["append", "inject"])
async def test_a_response_may_be_steered_while_it_is_suspended(dialect: str) -> None:
    answer = "response.append" if dialect == "append" else "response.inject"
    async with speaking(OSLO, "Sun.", dialect=dialect) as first:
        target = {} if dialect == "append" else {"response_id": first.id}
        events = await first.go_on("response.output_item.done")
        if dialect == "append":
            events += await first.go_on("response.done")
        await first.steer("One.")
        events += await first.go_on(PENDING)
        await first.client.send(answer, input=[output(calls_in(events)[0])], **target)
        events += await first.go_on(COMPLETED)

        text = context_text(first.server.engine)
        assert text_in(events[-1]["response"]) == "Sun."
        assert len(first.client.streams) == 1
        assert text.index("sunny") < text.index("One.") < text.index("Sun.")


async def test_a_create_that_takes_a_suspended_response_s_place_may_bring_it() -> None:
    async with speaking(OSLO, "Sun.", dialect="append") as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        last = await follow(first, events)

        assert text_in(last[-1]["response"]) == "Sun."
        assert "One." in context_text(first.server.engine)


# --- Given back ----------------------------------------------------------------------------------


def is_given_back(event: Event, code: str, told: Any) -> bool:
    """Tell whether ``event`` gives ``told`` back for a reason."""
    error, steer = event["error"], event["steer"]
    assert event["type"] == FAILED
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return bool(error["code"] == code and steer["input"] == told)


async def test_for_an_id_that_nobody_knows() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        await client.send("response.steer", previous_response_id="resp_0", input="One.")
        event = await client.receive()
        last = await client.create()

        assert is_given_back(event, "response_not_found", "One.")
        assert event["steer"]["previous_response_id"] == "resp_0"
        assert "id" not in event["steer"]
        assert text_in(last[-1]["response"]) == "Sun."


@pytest.mark.parametrize("lane", [None, "a"])
async def test_for_a_response_that_is_completed(lane: str | None) -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        events = await client.create(stream_id=lane)
        told = [{"role": "user", "content": "One."}]
        response_id = events[-1]["response"]["id"]
        await client.send("response.steer", previous_response_id=response_id, input=told)
        event = await client.receive()

        assert is_given_back(event, "response_already_completed", told)
        assert event.get("stream_id") == lane
        assert event["sequence_number"] == events[-1]["sequence_number"] + 1


async def test_for_a_response_that_another_has_followed() -> None:
    async with speaking(RAIN, "Sun.") as first:
        await first.go_on(COMPLETED)
        with held_at(2, first.server.engine) as model:
            asked = {"previous_response_id": first.id, "input": "And now?"}
            await first.client.send("response.create", **(BODY | asked))
            await model.reached.wait()
            await first.steer("One.")
            model.release()
        events = await first.go_on(FAILED)

        assert is_given_back(events[-1], "response_already_completed", "One.")
        assert len(first.client.streams) == 2


async def test_for_a_warm_up() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        events = await client.create(generate=False, input=[])
        response_id = events[-1]["response"]["id"]
        await client.send("response.steer", previous_response_id=response_id, input="One.")
        event = await client.receive()

        assert is_given_back(event, "response_already_completed", "One.")


@pytest.mark.parametrize(
    "members",
    [
        {"stream_id": "a"},
        {"stream_id": None},
        {"model": "tiny"},
        {"input": []},
        {"input": None},
        {"input": 5},
        {"input": [5]},
        {"input": [{"role": "system", "content": "One."}]},
        {"input": [{"role": "assistant", "content": "One."}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "dry"}]},
        {"input": [{"role": "user", "content": "One."}, {"role": "developer", "content": "Two."}]},
        {"input": [{"role": "user", "content": [{"type": "output_audio"}]}]},
    ],
)
async def test_for_being_said_in_the_wrong_way(members: Event) -> None:
    async with speaking(RAIN) as first:
        await first.steer("One.", **members)
        events = await first.go_on(COMPLETED)

        (event,) = (event for event in events if event["type"] == FAILED)
        assert is_given_back(event, "invalid_input", members.get("input", "One."))
        assert "id" not in event["steer"]
        assert len(first.client.streams) == 1
        assert "One." not in context_text(first.server.engine)


@pytest.mark.parametrize("target", [None, 5, [], "resp_0"])
async def test_for_being_said_in_the_wrong_way_to_nobody(target: Any) -> None:
    async with serving("Sun.") as server, server.connect() as client:
        await client.send("response.steer", previous_response_id=target, input=[])
        event = await client.receive()

        assert is_given_back(event, "invalid_input", [])


async def test_for_being_one_too_many() -> None:
    settings = Settings(recent_responses=0, max_pending_steers=2)
    async with speaking(RAIN, "Sun.", settings=settings) as first:
        await first.steer("One.", "Two.", "Three.")
        events = await first.go_on(COMPLETED, 2)

        text = context_text(first.server.engine)
        (event,) = (event for event in events if event["type"] == FAILED)
        assert is_given_back(event, "too_many_pending_steers", "Three.")
        assert "Two." in text
        assert "Three." not in text


async def test_for_being_one_too_many_while_others_wait_for_outputs() -> None:
    settings = Settings(recent_responses=0, max_pending_steers=1)
    async with speaking(OSLO, "Sun.", dialect="append", settings=settings) as first:
        await first.steer("One.")
        events = await first.go_on(PENDING)
        await first.steer("Two.")
        await first.client.append(*map(output, calls_in(events)))

        (event,) = (event for event in steers_in(first.client.streams[0]) if "error" in event)
        assert is_given_back(event, "too_many_pending_steers", "Two.")


async def test_where_there_is_no_room_for_a_successor() -> None:
    async with speaking(RAIN, "Sun.", max_context=500) as first:
        await first.steer("x" * 500, "One.")
        events = await first.go_on(FAILED, 2)
        last = await first.client.follow({"id": first.id}, QUESTION)

        accepted, given_back = steers_in(events)[:2], steers_in(events)[2:]
        assert order_of(events, COMPLETED, FAILED) == [COMPLETED, FAILED, FAILED]
        for event, told in zip(given_back, ("x" * 500, "One."), strict=True):
            assert is_given_back(event, "successor_creation_failed", told)
        assert [e["steer"]["id"] for e in given_back] == [e["steer"]["id"] for e in accepted]
        assert text_in(last[-1]["response"]) == "Sun."  # the response can be followed all the same


async def test_where_the_response_has_failed() -> None:
    async with speaking(RAIN, "Sun.") as first:
        await first.steer("One.")
        with failing_at(1, first.server.engine):
            events = await first.go_on(FAILED)

        assert order_of(events, "response.failed", FAILED) == ["response.failed", FAILED]
        assert is_given_back(events[-1], "successor_creation_failed", "One.")
