"""The chained dialect: every round is a response of its own, which names the one it follows."""

from typing import Any

import pytest

from sampler.snapshot import num_common
from tests.server.http_client import cached_tokens, context_length
from tests.server.models import BERGEN, BOTH, OSLO, context_of, inputs_of
from tests.server.running import (
    BODY,
    TOOL,
    Client,
    Event,
    calls_in,
    output,
    serving,
    text_in,
)
from tests.server.spellings import without_ids

QUESTION: Event = {"role": "user", "content": BODY["input"]}


def response_of(events: list[Event]) -> Event:
    """Return the response that ``events`` end with."""
    response: Event = events[-1]["response"]
    return response


async def context_after(*items: Event, says: tuple[str, ...], **members: Any) -> tuple[int, ...]:
    """Return all that the model knows in the end when it is told a whole conversation at once."""
    async with serving(*says) as server, server.connect() as client:
        await client.create(input=list(items), **members)
        return context_of(server.engine)


# --- What a follower sees ------------------------------------------------------------------------


async def test_a_follower_names_its_parent_and_has_an_id_of_its_own() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False))
        second = response_of(await client.follow(first, QUESTION))

        assert second["previous_response_id"] == first["id"] != second["id"]
        assert text_in(second) == "Sun."


async def test_a_follower_knows_what_was_said_before() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False))
        await client.follow(first, {"role": "user", "content": "And now?"})

        said = {"role": "assistant", "content": "Rain."}
        now = {"role": "user", "content": "And now?"}
        assert context_of(server.engine) == await context_after(
            QUESTION, said, now, says=("Rain.", "Sun.")
        )


async def test_a_string_is_what_the_user_says() -> None:
    contexts = []
    for told in ("And now?", [{"role": "user", "content": "And now?"}]):
        async with serving("Rain.", "Sun.") as server, server.connect() as client:
            first = response_of(await client.create(store=False))
            await client.follow(first, input=told)
            contexts.append(context_of(server.engine))

    assert contexts[0] == contexts[1]


async def test_a_follower_may_bring_the_outputs_of_the_calls() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create(store=False)
        (call,) = calls_in(first)
        second = response_of(await client.follow(response_of(first), output(call)))

        assert text_in(second) == "Sun."
        assert [item["type"] for item in second["output"]] == ["message"]
        assert context_of(server.engine) == await context_after(
            QUESTION, without_ids(call), output(call), says=(OSLO, "Sun.")
        )


@pytest.mark.parametrize("is_reversed", [False, True])
async def test_outputs_of_parallel_calls_may_come_in_any_order(is_reversed: bool) -> None:
    async with serving(BOTH, "Sun.") as server, server.connect() as client:
        first = await client.create(store=False)
        oslo, bergen = calls_in(first)
        outputs = [output(oslo, "dry"), output(bergen, "wet")]
        await client.follow(response_of(first), *(outputs[::-1] if is_reversed else outputs))

        assert context_of(server.engine) == await context_after(
            QUESTION, without_ids(oslo), without_ids(bergen), *outputs, says=(BOTH, "Sun.")
        )


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', '{"city":"Oslo"}'])
async def test_a_call_may_be_echoed_with_its_output(arguments: str) -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create(store=False)
        (call,) = calls_in(first)
        echoed = without_ids(call) | {"arguments": arguments}
        second = response_of(await client.follow(response_of(first), echoed, output(call)))

        # All that was there but the pending token.
        assert cached_tokens(second) == context_length(response_of(first))
        assert context_of(server.engine) == await context_after(
            QUESTION, without_ids(call), output(call), says=(OSLO, "Sun.")
        )


async def test_one_of_two_calls_may_be_echoed() -> None:
    async with serving(BOTH, "Sun.") as server, server.connect() as client:
        first = await client.create(store=False)
        oslo, bergen = calls_in(first)
        await client.follow(response_of(first), without_ids(oslo), output(oslo), output(bergen))

        assert context_of(server.engine) == await context_after(
            QUESTION,
            without_ids(oslo),
            without_ids(bergen),
            output(oslo),
            output(bergen),
            says=(BOTH, "Sun."),
        )


async def test_a_message_may_be_echoed_before_what_is_new() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False))
        (message,) = first["output"]
        await client.follow(first, message, QUESTION)

        said = {"role": "assistant", "content": "Rain."}
        assert context_of(server.engine) == await context_after(
            QUESTION, said, QUESTION, says=("Rain.", "Sun.")
        )


async def test_a_user_message_may_come_with_the_outputs() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create(store=False)
        (call,) = calls_in(first)
        second = response_of(await client.follow(response_of(first), output(call), QUESTION))

        assert text_in(second) == "Sun."


async def test_a_follower_may_add_nothing() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False))
        second = response_of(await client.follow(first))

        assert text_in(second) == "Sun."


async def test_a_response_that_ran_out_of_budget_can_be_followed() -> None:
    async with serving("Rain." * 8, "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False, max_output_tokens=3))
        second = response_of(await client.follow(first, QUESTION))

        assert first["incomplete_details"] == {"reason": "max_output_tokens"}
        assert text_in(second) == "Sun."
        assert cached_tokens(second) == context_length(first)
        said = {"role": "assistant", "content": text_in(first)}
        assert context_of(server.engine) == await context_after(
            QUESTION, said, QUESTION, says=(text_in(first), "Sun.")
        )


async def test_a_call_that_was_cut_short_need_not_be_answered() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False, max_output_tokens=3))
        second = response_of(await client.follow(first, QUESTION))

        assert first["output"][0]["status"] == "incomplete"
        assert text_in(second) == "Sun."


# --- What is not inherited -----------------------------------------------------------------------


async def test_instructions_are_not_inherited() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False, instructions="Be brief."))
        second = response_of(await client.follow(first, QUESTION))

        said = {"role": "assistant", "content": "Rain."}
        assert second["instructions"] is None
        assert context_of(server.engine) == await context_after(
            QUESTION, said, QUESTION, says=("Rain.", "Sun.")
        )


async def test_tools_are_not_inherited() -> None:
    async with serving(OSLO, OSLO) as server, server.connect() as client:
        first = await client.create(store=False)
        (call,) = calls_in(first)
        second = response_of(await client.follow(response_of(first), output(call), tools=[]))

        assert second["tools"] == []
        assert text_in(second) == OSLO  # no call, as there is nothing to be called
        assert context_of(server.engine) == await context_after(
            QUESTION, without_ids(call), output(call), says=(OSLO, OSLO), tools=[]
        )


async def test_a_forced_choice_is_not_inherited() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create(store=False, tool_choice="required")
        second = response_of(await client.follow(response_of(first), output(calls_in(first)[0])))

        assert second["tool_choice"] == "auto"
        assert text_in(second) == "Sun."


async def test_a_budget_is_not_inherited() -> None:
    async with serving("Sun.", "Rain." * 8) as server, server.connect() as client:
        first = response_of(await client.create(store=False, max_output_tokens=3))
        second = response_of(await client.follow(first, QUESTION))

        assert text_in(second) == "Rain." * 8


# --- What is not done again ----------------------------------------------------------------------


async def follow_ten_times(client: Client) -> list[Event]:
    """Have the model make ten calls, and answer each."""
    rounds = [await client.create(store=False)]
    while calls := calls_in(rounds[-1]):
        rounds.append(await client.follow(response_of(rounds[-1]), *map(output, calls)))
    return [response_of(events) for events in rounds]


async def test_in_a_chain_of_ten_each_token_goes_through_the_model_once() -> None:
    async with serving(*[OSLO, BERGEN] * 5, "Sun.") as server, server.connect() as client:
        responses = await follow_ten_times(client)

        assert len(responses) == 11
        last = responses[-1]
        assert server.engine.counters.tokens_forwarded == context_length(last)
        assert len(context_of(server.engine)) == context_length(last)


async def test_in_a_chain_of_ten_all_but_the_pending_token_is_cached() -> None:
    async with serving(*[OSLO, BERGEN] * 5, "Sun.") as server, server.connect() as client:
        responses = await follow_ten_times(client)

        lengths = list(map(context_length, responses))
        assert list(map(cached_tokens, responses)) == [0, *lengths[:-1]]


async def test_nothing_but_what_is_new_is_laid_out_and_encoded() -> None:
    async with serving(OSLO, BERGEN, "Sun.") as server, server.connect() as client:
        counters, work = server.engine.counters, []
        others = [TOOL | {"name": f"tool_{index}"} for index in range(20)]
        events = await client.create(store=False, tools=[TOOL, *others], instructions="Be brief.")
        while calls := calls_in(events):
            before = counters.template_renders, counters.encodes
            events = await client.follow(
                response_of(events),
                output(calls[0], "dry"),
                tools=[TOOL, *others],
                instructions="Be brief.",
            )
            work.append((counters.template_renders - before[0], counters.encodes - before[1]))

        assert work == 2 * [(0, len(["dry"]))]


async def test_a_tool_whose_members_come_in_another_order_is_the_same() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False))
        again = {key: TOOL[key] for key in reversed(TOOL)}
        before = server.engine.counters.template_renders
        second = response_of(await client.follow(first, QUESTION, tools=[again]))

        assert server.engine.counters.template_renders == before
        assert cached_tokens(second) == context_length(first)


@pytest.mark.parametrize(
    "changed",
    [
        {"instructions": "Be precise."},
        {"instructions": "Be brief.", "tools": []},
        {"instructions": "Be brief.", "tools": [TOOL, TOOL | {"name": "get_tide"}]},
        {},
    ],
    ids=["instructions", "no tools", "another tool", "no instructions"],
)
async def test_of_a_changed_beginning_the_longest_common_prefix_is_kept(changed: Event) -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False, instructions="Be brief."))
        before = context_of(server.engine)
        second = response_of(await client.follow(first, QUESTION, **changed))

        num_kept = num_common(before, context_of(server.engine))
        assert 0 < num_kept < len(before)
        assert cached_tokens(second) == num_kept
        assert text_in(second) == "Sun."


async def test_metadata_of_a_client_changes_nothing() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False, client_metadata={"turn": "1"}))
        renders = server.engine.counters.template_renders
        second = response_of(
            await client.follow(first, QUESTION, client_metadata={"turn": "2", "at": "noon"})
        )

        assert cached_tokens(second) == context_length(first)
        assert server.engine.counters.template_renders == renders


async def test_other_sampling_parameters_leave_the_prefix_as_it_is() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = response_of(await client.create(store=False, temperature=0, seed=1))
        second = response_of(
            await client.follow(first, QUESTION, temperature=1, seed=2, tool_choice="none")
        )

        assert cached_tokens(second) == context_length(first)


# --- What cannot be followed ---------------------------------------------------------------------


async def refused(client: Client, parent_id: str, *items: Event) -> Event:
    """Ask for a follower that cannot be, and return the error frame."""
    members = BODY | {"previous_response_id": parent_id, "input": list(items), "store": False}
    await client.send("response.create", **members)
    return await client.error()


async def test_an_id_that_nobody_knows_is_refused() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        error = await refused(client, "resp_of_yesterday", QUESTION)
        last = response_of(await client.create())

        assert error["status"] == 400
        assert error["error"]["code"] == "previous_response_not_found"
        assert error["error"]["param"] == "previous_response_id"
        assert error["error"]["type"] == "invalid_request_error"
        assert text_in(last) == "Sun."


@pytest.mark.parametrize("num_answered", [0, 1])
async def test_a_call_that_is_not_answered_is_named(num_answered: int) -> None:
    async with serving(BOTH) as server, server.connect() as client:
        first = await client.create(store=False)
        calls = calls_in(first)
        answers = map(output, calls[:num_answered])
        error = await refused(client, response_of(first)["id"], *answers, QUESTION)

        unanswered = sorted(call["call_id"] for call in calls[num_answered:])
        assert error["status"] == 400
        assert error["error"]["message"].startswith("No tool output found for function call")
        assert unanswered[0] in error["error"]["message"]
        assert error["error"]["param"] == "input"


async def test_an_output_that_answers_no_call_is_named() -> None:
    async with serving("Rain.") as server, server.connect() as client:
        first = response_of(await client.create(store=False))
        error = await refused(client, first["id"], output("call_of_nobody"))

        assert error["status"] == 400
        assert error["error"]["message"].startswith("No tool call found for function call output")
        assert "call_of_nobody" in error["error"]["message"]
        assert error["error"]["param"] == "input"


async def test_a_call_cannot_be_answered_in_two_rounds() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        first = await client.create(store=False)
        (call,) = calls_in(first)
        second = response_of(await client.follow(response_of(first), output(call)))
        error = await refused(client, second["id"], output(call))

        assert error["error"]["code"] == "duplicate_call_id"


async def test_a_follower_that_does_not_fit_is_refused() -> None:
    async with serving("Rain.") as server, server.connect() as client:
        first = response_of(await client.create(store=False))
        long = {"role": "user", "content": "x" * 5000}
        error = await refused(client, first["id"], long)

        assert error["error"]["code"] == "context_length_exceeded"
        assert inputs_of(server.engine) == list(context_of(server.engine))
