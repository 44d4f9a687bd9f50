"""Whatever an endpoint says in whatever pieces: what the client was told is what goes back."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampler.engines.fake_endpoint import deltas
from tests.server.running import Client, Event, calls_in, output, text_in
from tests.server.test_chat_engine import QUESTION, SUN, messages, said, served, told

TEXT = st.text(max_size=6)
PIECES = st.sampled_from(['{"city"', ':"Oslo"}', "{}", "{", '"}', " ", "", "\n"]) | TEXT


@st.composite
def scripted_deltas(draw: st.DrawFn) -> list[Event]:
    """Draw deltas of thoughts, text and calls in any order, several in one as may be."""
    script: list[Event] = []
    named: set[int] = set()
    for _ in range(draw(st.integers(1, 8))):
        delta: Event = {}
        if draw(st.booleans()):
            delta["reasoning"] = draw(st.none() | TEXT)
        if draw(st.booleans()):
            delta["content"] = draw(st.none() | TEXT)
        pieces = [draw_piece(draw, named) for _ in range(draw(st.integers(0, 2)))]
        script.append(delta | ({"tool_calls": pieces} if pieces else {}))
    return script


def draw_piece(draw: st.DrawFn, named: set[int]) -> Event:
    """Draw a piece of a call, which has a name where its index is new."""
    index = draw(st.integers(0, min(len(named), 2)))
    function: Event = {"arguments": draw(PIECES)}
    if index not in named or draw(st.booleans()):
        function["name"] = draw(st.sampled_from(["get_weather", "get_news"]))
    named.add(index)
    ids = st.none() | st.sampled_from(["", "one", "two", f"call_{index}", "x" * 70])
    return {"index": index, "id": draw(ids), "function": function}


@st.composite
def appends_of(draw: st.DrawFn, calls: Sequence[Event]) -> list[list[Event]]:
    """Draw an order of the calls, cut into appends."""
    order = draw(st.permutations(calls))
    groups: list[list[Event]] = [[]]
    for call in order:
        if bool(groups[-1]) and draw(st.booleans()):
            groups.append([])
        groups[-1].append(call)
    return groups


def as_told(events: Sequence[Event]) -> list[Event]:
    """Return the message that says what ``events`` said, if they said anything."""
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    thoughts = "".join(
        part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]
    )
    text = text_in({"output": items})
    calls = [call | {"arguments": call["arguments"] or "{}"} for call in calls_in(events)]
    if not (thoughts or text or calls):
        return []
    content = text or (None if calls else "")
    return [said(*calls, text=content, thoughts=thoughts or None)]


async def answered(client: Client, groups: Sequence[Sequence[Event]]) -> Event:
    """Append outputs, and return the response that the last of them lead to."""
    for calls in groups[:-1]:
        await client.send("response.append", input=list(map(output, calls)))
    response: Event = (await client.append(*map(output, groups[-1])))[-1]["response"]
    return response


@pytest.mark.slow
@given(script=scripted_deltas(), data=st.data())
@settings(max_examples=40, deadline=None)
async def test_what_the_client_was_told_is_what_goes_back(script: list[Event], data: Any) -> None:
    async with served(deltas(*script), SUN) as (server, fake):
        async with server.connect("append") as client:
            first = await client.create(input=[QUESTION])
            calls = calls_in(first)
            if calls:
                last = await answered(client, data.draw(appends_of(calls)))
                brought = [told(call) for call in calls]
            else:
                brought = [{"role": "user", "content": "And?"}]
                last = (await client.follow(first[-1]["response"], *brought))[-1]["response"]

        assert text_in(last).endswith("It is sunny.")
        assert messages(fake) == [QUESTION, *as_told(first), *brought]
