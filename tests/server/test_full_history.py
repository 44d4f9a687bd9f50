"""A client that sends the whole history again over one connection, and names no parent.

It gets what chaining gives: the same prompt, token for token, from the same cache.
"""

from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio

from sampler.local_engine import LocalEngine
from sampler.snapshot import num_common
from tests.server.http_client import cached_tokens, context_length
from tests.server.models import (
    BERGEN,
    OSLO,
    THOUGHT,
    context_of,
    context_text,
    encoded,
    inputs_of,
    scripted_engine,
    spelled_out,
)
from tests.server.running import BODY, Client, Event, calls_in, output, serving, text_in
from tests.server.spellings import (
    Spelling,
    as_easy_messages,
    as_it_came,
    by_reference,
    by_reference_but_calls,
    by_untyped_reference,
    rewritten,
    rewritten_without_ids,
    with_more_members,
    with_the_type_last,
    without_ids,
    without_thoughts,
)

QUESTION: Event = {"role": "user", "content": BODY["input"]}
SAID = "Rain."
SPELLINGS: dict[str, Spelling] = {
    "as it came (Agents SDKs)": as_it_came,
    "without ids": without_ids,
    "rewritten": rewritten,
    "rewritten, without ids (opencode, Vercel)": rewritten_without_ids,
    "without thoughts": without_thoughts,
    "messages as strings": as_easy_messages,
    "with the type last (Agents SDK in JavaScript)": with_the_type_last,
    "with members of the client's own": with_more_members,
    "by reference but for calls (Vercel)": by_reference_but_calls,
    "by reference": by_reference,
    "by reference of no type": by_untyped_reference,
}


def thinking_engine() -> LocalEngine:
    """Return an engine whose model thinks, speaks and calls, in tokens that nobody would choose."""
    first = [*encoded(THOUGHT), *spelled_out(SAID), *encoded(OSLO)]
    second = [*spelled_out(SAID), *encoded(BERGEN)]
    return scripted_engine(first, second, "Sun.", thinks=True)


async def respond(client: Client, *history: Event, **members: Any) -> Event:
    """Return the response to a whole history."""
    events = await client.create(input=list(history), **members)
    response: Event = events[-1]["response"]
    return response


async def loop(client: Client, spell: Spelling, **members: Any) -> list[Event]:
    """Have an agent run with two calls, the whole history each time; return the responses."""
    history: list[Event] = [QUESTION]
    responses = []
    while True:
        responses.append(await respond(client, *history, **members))
        items = responses[-1]["output"]
        calls = [item for item in items if item["type"] == "function_call"]
        if not calls:
            return responses
        echoes = [said for item in items if (said := spell(item)) is not None]
        history = [*history, *echoes, *(output(call, "dry") for call in calls)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def read_chained() -> list[int]:
    """What the model reads where each round names the one before."""
    async with serving(engine=thinking_engine()) as server, server.connect() as client:
        events = await client.create(input=[QUESTION])
        while calls := calls_in(events):
            outputs = (output(call, "dry") for call in calls)
            events = await client.follow(events[-1]["response"], *outputs)
        return inputs_of(server.engine)


# --- However it is spelled -----------------------------------------------------------------------


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_a_history_is_taken_up_where_its_latest_response_left_off(
    spelling: str, store: bool, read_chained: list[int]
) -> None:
    async with serving(engine=thinking_engine()) as server, server.connect() as client:
        include = ["reasoning.encrypted_content"]
        responses = await loop(client, SPELLINGS[spelling], store=store, include=include)

        assert text_in(responses[-1]) == "Sun."
        assert inputs_of(server.engine) == read_chained
        for response, following in pairwise(responses):
            assert cached_tokens(following) == context_length(response)


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_nothing_of_it_is_laid_out_again(spelling: str) -> None:
    async with serving(engine=thinking_engine()) as server, server.connect() as client:
        await loop(client, SPELLINGS[spelling], store=False)

        assert server.engine.counters.template_renders == 1


async def test_what_was_sampled_is_not_what_its_text_encodes_to(read_chained: list[int]) -> None:
    """So the other tests would notice that the history was encoded again."""
    async with serving(engine=thinking_engine()) as server:
        async with server.connect() as client:
            said = (await respond(client, QUESTION, store=False))["output"]
        async with server.connect() as client:  # which does not know it
            await respond(client, QUESTION, *said, output(said[-1], "dry"), store=False)
        context = list(context_of(server.engine))

    assert context != read_chained[: len(context)]


async def test_a_response_cut_short_is_taken_up_as_it_was_cut() -> None:
    engine = scripted_engine(spelled_out(SAID * 3), "Sun.")
    async with serving(engine=engine) as server, server.connect() as client:
        first = await respond(client, QUESTION, store=False, max_output_tokens=7)
        second = await respond(client, QUESTION, *first["output"], QUESTION, store=False)

        assert first["status"] == "incomplete"
        assert text_in(second) == "Sun."
        assert cached_tokens(second) == context_length(first)


async def test_the_same_words_with_other_thoughts_are_not_taken_for_each_other() -> None:
    turns = [f"<think>\n{thought}\n</think>\n\n{SAID}" for thought in ("One.", "Two.", "Three.")]
    async with (
        serving(engine=scripted_engine(*turns, thinks=True)) as server,
        server.connect() as client,
    ):
        history, responses = [QUESTION], []
        for _ in turns:
            responses.append(await respond(client, *history, store=False))
            history += [{"role": "assistant", "content": SAID}, QUESTION]

        text = context_text(server.engine)
        assert text.index("One.") < text.index("Two.") < text.index("Three.")
        for response, following in pairwise(responses):
            assert cached_tokens(following) == context_length(response)


# --- What is not the same ------------------------------------------------------------------------


async def test_an_edited_answer_is_a_new_prefix() -> None:
    async with serving(SAID, "Sun.") as server, server.connect() as client:
        first = await respond(client, QUESTION, store=False)
        (message,) = first["output"]
        edited = message | {"content": [{"type": "output_text", "text": "Fog."}]}
        second = await respond(client, QUESTION, edited, QUESTION, store=False)

        assert text_in(second) == "Sun."
        assert cached_tokens(second) == first["usage"]["input_tokens"]
        assert "Fog." in context_text(server.engine)
        assert SAID not in context_text(server.engine)


async def test_an_edited_question_is_a_new_prefix() -> None:
    async with serving(SAID, "Sun.") as server, server.connect() as client:
        first = await respond(client, QUESTION, store=False)
        before = context_of(server.engine)
        edited = QUESTION | {"content": "Was it dry in Oslo?"}
        second = await respond(client, edited, *first["output"], QUESTION, store=False)

        assert text_in(second) == "Sun."
        assert cached_tokens(second) == num_common(before, context_of(server.engine))
        assert BODY["input"] in context_text(server.engine)


async def test_other_instructions_are_a_new_prefix() -> None:
    async with serving(SAID, "Sun.") as server, server.connect() as client:
        first = await respond(client, QUESTION, store=False, instructions="Be brief.")
        before = context_of(server.engine)
        second = await respond(
            client, QUESTION, *first["output"], QUESTION, store=False, instructions="Be precise."
        )

        assert text_in(second) == "Sun."
        assert cached_tokens(second) == num_common(before, context_of(server.engine))
        assert "Be brief." not in context_text(server.engine)


async def test_a_history_may_go_back_and_on_from_there() -> None:
    async with serving(SAID, "Sun.", SAID) as server, server.connect() as client:
        first = await respond(client, QUESTION, store=False)
        told = [QUESTION, *first["output"]]
        await respond(client, *told, QUESTION, store=False)
        again = await respond(client, *told, {"role": "user", "content": "Now?"}, store=False)

        assert text_in(again) == "Sun."
        assert cached_tokens(again) >= context_length(first)


async def test_a_history_that_has_lost_its_beginning_is_a_new_prefix() -> None:
    async with serving(SAID, "Sun.") as server, server.connect() as client:
        first = await respond(client, QUESTION, store=False)
        now = {"role": "user", "content": "Now?"}
        second = await respond(client, *first["output"], now, store=False)

        assert text_in(second) == "Sun."
        assert cached_tokens(second) < first["usage"]["input_tokens"]
        assert BODY["input"] not in context_text(server.engine)


async def test_two_conversations_may_take_turns() -> None:
    async with serving(SAID, "Sun.") as server, server.connect() as client:
        questions = [{"role": "user", "content": f"In {city}?"} for city in ("Oslo", "Bergen")]
        firsts = [await respond(client, question, store=False) for question in questions]
        for question, first in zip(questions, firsts, strict=True):
            second = await respond(client, question, *first["output"], QUESTION, store=False)
            text = context_text(server.engine)

            assert text_in(second) == "Sun."
            assert [q["content"] for q in questions if q["content"] in text] == [
                question["content"]
            ]


# --- On which lane, by which id ------------------------------------------------------------------


async def test_another_lane_may_take_the_history_up() -> None:
    async with serving(SAID, "Sun.") as server, server.connect() as client:
        first = await respond(client, QUESTION, store=False, stream_id="a")
        second = await respond(
            client, QUESTION, *first["output"], QUESTION, store=False, stream_id="b"
        )

        assert text_in(second) == "Sun."
        assert cached_tokens(second) == context_length(first)


async def test_another_connection_computes_it_again() -> None:
    async with serving(SAID, "Sun.") as server, server.connect() as client:
        first = await respond(client, QUESTION, store=False)
        async with server.connect() as other:
            second = await respond(other, QUESTION, *first["output"], QUESTION, store=False)

        assert text_in(second) == "Sun."
        assert cached_tokens(second) == 0


async def test_what_a_chain_has_said_can_be_sent_as_history() -> None:
    async with serving(OSLO, SAID, "Sun.") as server, server.connect() as client:
        events = await client.create(input=[QUESTION], store=False)
        first, (call,) = events[-1]["response"], calls_in(events)
        second = (await client.follow(first, output(call)))[-1]["response"]
        history = [QUESTION, call, output(call), *second["output"], QUESTION]
        third = await respond(client, *history, store=False)

        assert text_in(third) == "Sun."
        assert cached_tokens(third) == context_length(second)


async def test_a_stored_item_can_be_referred_to_on_another_connection() -> None:
    async with serving(engine=thinking_engine()) as server, server.connect() as client:
        first = await respond(client, QUESTION)
        call = first["output"][-1]
        told = [QUESTION, *map(by_reference, first["output"]), output(call, "dry")]
        async with server.connect() as other:
            elsewhere = await respond(other, *told)
        there = context_of(server.engine)
        here = await respond(client, *told)

        assert context_of(server.engine) == there
        assert cached_tokens(elsewhere) == 0
        assert cached_tokens(here) == context_length(first)


async def test_an_item_that_is_not_stored_cannot_be_referred_to_on_another_connection() -> None:
    async with serving(SAID) as server, server.connect() as client:
        first = await respond(client, QUESTION, store=False)
        async with server.connect() as other:
            told = [QUESTION, by_reference(first["output"][0]), QUESTION]
            await other.send("response.create", **(BODY | {"input": told}))
            error = await other.error()

        assert error["status"] == 400
        assert error["error"]["code"] == "item_not_found"
        assert error["error"]["param"] == "input[1]"
