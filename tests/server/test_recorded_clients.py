"""Every recorded client gets through an agent run, gets all that it needs on the way, and not a
token of its conversation goes through the model twice."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import pytest
import pytest_asyncio

from protocol.codec import encode
from sampler.local_engine import LocalEngine
from server.settings import Settings
from tests.server.http_client import cached_tokens, context_length
from tests.server.models import BOTH, OSLO, THOUGHT, inputs_of, scripted_engine
from tests.server.recorded import CLIENTS, RecordedClient, Talk, text
from tests.server.running import (
    CALLS,
    Event,
    Running,
    calls_in,
    check_events,
    output,
    parse_sse,
    serving,
    text_in,
)

KEEPING = Settings(recent_responses=4)
EXEC_CALL = '<tool_call>\n{"name": "functions.exec"}\nls\n</tool_call>'


def engine_for(client: RecordedClient) -> LocalEngine:
    """Return an engine whose model thinks, speaks, and calls in parallel, then calls once more."""
    calls = [EXEC_CALL, EXEC_CALL] if client.calls_exec else [BOTH, OSLO]
    return scripted_engine(
        f"{THOUGHT}Let me look.{calls[0]}", calls[1], "Sun.", "Rain.", thinks=True
    )


# --- The client's end ----------------------------------------------------------------------------


class Transport(Protocol):
    """Sends a request and returns the events of the segment that answers it."""

    async def __call__(self, request: Event) -> list[Event]: ...


@asynccontextmanager
async def opened(client: RecordedClient, server: Running) -> AsyncIterator[Transport]:
    if client.is_websocket:
        async with server.connect(betas=client.betas, path=client.path) as socket:

            async def send(request: Event) -> list[Event]:
                frame = request if "type" in request else {"type": "response.create"} | request
                await socket.send_raw(encode(frame).decode())
                return await socket.segment()

            yield send
        return
    async with server.http() as http:

        async def post(request: Event) -> list[Event]:
            answer = await http.post(client.path, json=request | {"stream": True})
            assert answer.status_code == 200, answer.text
            events = [json.loads(data) for event, data in parse_sse(answer.text) if event]
            check_events(events)
            return events

        yield post


async def replay(client: RecordedClient, server: Running) -> list[list[Event]]:
    """Have ``client`` go through an agent run and ask once more; return what it is told, segment by
    segment."""
    talk = Talk(list(client.asked))
    segments = []
    async with opened(client, server) as send:
        request: Event = {"input": talk.asked}
        if client.warms_up_with is not None:
            warm = await send(client.body | client.warms_up_with)
            request["previous_response_id"] = warm[-1]["response"]["id"]
        while True:
            is_append = request.get("type") == "response.append"
            segments.append(await send(request if is_append else request | client.body))
            talk.response_id = segments[-1][-1]["response"]["id"]
            talk.items = items_done(segments[-1])
            calls = [item for item in talk.items if item["type"] in CALLS]
            if not calls and len(segments) > 3:
                return segments
            goes_on = client.goes_on if calls else client.takes_next_turn or client.goes_on
            talk.added = [output(call, "hi-42\n") for call in calls] or [text("user", "And now?")]
            spelled = [said for item in talk.items if (said := client.spells(item)) is not None]
            talk.since = [*talk.since, *spelled, *talk.added]
            request = goes_on(talk)


def items_done(events: Sequence[Event]) -> list[Event]:
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


# --- What it needs -------------------------------------------------------------------------------


def check_needs(events: Sequence[Event], known: Sequence[Event]) -> None:
    """Check what some client breaks without; ``known`` are the items of the segments before."""
    closing = events[-1]["response"]
    if events[0]["type"] == "response.created":
        assert {"id", "created_at", "model"} <= events[0]["response"].keys()
        assert events[0]["response"]["id"] == closing["id"]
    done = items_done(events)
    assert closing["output"] in (done, [*known, *done])
    usage = closing["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert all("sequence_number" in event for event in events)
    for item in done:
        check_item([event for event in events if _is_about(event, item)], item)


def _is_about(event: Event, item: Event) -> bool:
    return item["id"] in (event.get("item_id"), event.get("item", {}).get("id"))


def check_item(events: Sequence[Event], item: Event) -> None:
    """Check the events of one item."""
    added, *_, done = events
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")
    assert len({event["output_index"] for event in events}) == 1
    assert (added["item"]["status"], done["item"]["status"]) == ("in_progress", "completed")
    match item["type"]:
        case "message":
            assert item["role"] == added["item"]["role"] == "assistant"
            assert kinds[1:3] == ["content_part.added", "output_text.delta"]
            assert all("content_index" in event for event in events[1:-1])
            assert item["content"][0]["annotations"] == []
        case "function_call":
            assert added["item"]["arguments"] == ""
            assert added["item"]["name"] == item["name"]
            assert added["item"]["call_id"] == item["call_id"]
            assert {"function_call_arguments.delta", "function_call_arguments.done"} <= set(kinds)
        case "custom_tool_call":
            assert added["item"]["input"] == ""
            assert {"custom_tool_call_input.delta", "custom_tool_call_input.done"} <= set(kinds)
        case _:
            assert item["type"] == "reasoning"


@dataclass(frozen=True)
class Replayed:
    """A client's whole conversation."""

    client: RecordedClient
    segments: list[list[Event]]
    num_read: int
    """How many tokens went through the model."""

    @property
    def responses(self) -> list[Event]:
        """The response as each segment left it."""
        return [events[-1]["response"] for events in self.segments]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CLIENTS)
async def replayed(request: pytest.FixtureRequest) -> Replayed:
    client = CLIENTS[request.param]
    async with serving(engine=engine_for(client), settings=KEEPING) as server:
        segments = await replay(client, server)
        return Replayed(client, segments, len(inputs_of(server.engine)))


def test_a_client_gets_through_its_run_and_the_next_turn(replayed: Replayed) -> None:
    num_first = 1 if replayed.client.calls_exec else 2

    assert [len(calls_in(events)) for events in replayed.segments] == [num_first, 1, 0, 0]
    assert [events[-1]["type"] for events in replayed.segments] == [
        *[replayed.client.ends_segments_with] * 2,
        *["response.completed"] * 2,
    ]
    assert [text_in({"output": items_done(events)}) for events in replayed.segments] == [
        *("Let me look.", "", "Sun.", "Rain.")
    ]


def test_a_client_has_what_it_needs(replayed: Replayed) -> None:
    known: list[Event] = []
    for events in replayed.segments:
        check_needs(events, known)
        known += items_done(events)


def test_not_a_token_of_a_conversation_is_prefilled_twice(replayed: Replayed) -> None:
    for before, after in pairwise(replayed.responses):
        assert cached_tokens(after) == context_length(before)
    # What a warm-up had filled when it was cut off depends on the moment.
    if replayed.client.warms_up_with is None:
        assert replayed.num_read == context_length(replayed.responses[-1])
