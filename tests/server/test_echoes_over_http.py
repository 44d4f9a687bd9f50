"""A client that sends the whole history again goes on from the very tokens that were sampled.

However it spells what the model said: the last few responses of a key are kept, the history is
recognised, and the model is given what it would be given in a suspended run.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sampler.local_engine import LocalEngine
from server.access import add_api_key
from server.response_store import ResponseStore, StoredResponse
from server.settings import Settings
from tests.server.http_client import (
    cached_tokens,
    context_length,
    post,
    post_refused,
    post_streamed,
)
from tests.server.models import (
    BERGEN,
    BOTH,
    OSLO,
    THOUGHT,
    encoded,
    inputs_of,
    scripted_engine,
    spelled_out,
)
from tests.server.refusals import Refusal
from tests.server.running import BODY, Event, Running, calls_in, output, serving, text_in
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

QUESTION = {"role": "user", "content": BODY["input"]}
KEEPING = Settings(recent_responses=4)
SAID = "Rain."


def thinking_engine() -> LocalEngine:
    """Return an engine whose model thinks, speaks and calls, in tokens that nobody would choose."""
    first = [*encoded(THOUGHT), *spelled_out(SAID), *encoded(OSLO)]
    second = [*spelled_out(SAID), *encoded(BERGEN)]
    return scripted_engine(first, second, "Sun.", thinks=True)


SPELLINGS: dict[str, Spelling] = {
    "as it came (Agents SDK)": as_it_came,
    "without ids (Codex)": without_ids,
    "rewritten, with ids (Open Responses, pi)": rewritten,
    "rewritten, without ids (opencode)": rewritten_without_ids,
    "without thoughts (Cline)": without_thoughts,
    "messages as strings (llm)": as_easy_messages,
    "with the type last (Agents SDK in JavaScript)": with_the_type_last,
    "with members of the client's own": with_more_members,
}
REFERENCES: dict[str, Spelling] = {
    "all but the calls (AI SDK)": by_reference_but_calls,
    "all": by_reference,
    "all, and no type": by_untyped_reference,
}


async def loop(server: Running, spell: Spelling, **members: Any) -> list[Event]:
    """Have an agent run with two calls, the whole history each time; return the responses."""
    history: list[Event] = [QUESTION]
    responses = []
    while True:
        responses.append(await post(server, input=history, **members))
        items = responses[-1]["output"]
        calls = [item for item in items if item["type"] == "function_call"]
        if not calls:
            return responses
        echoes = [said for item in items if (said := spell(item)) is not None]
        history = [*history, *echoes, *(output(call, "dry") for call in calls)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def read_suspended() -> list[int]:
    """What the model reads where the run is suspended at each call."""
    engine = thinking_engine()
    async with serving(engine=engine) as server, server.connect("append") as client:
        events = await client.create(input=[QUESTION])
        while calls := calls_in(events):
            events = await client.append(*(output(call, "dry") for call in calls))
    return inputs_of(engine)


def check_nothing_was_prefilled_twice(responses: list[Event]) -> None:
    for response, following in pairwise(responses):
        assert cached_tokens(following) == context_length(response)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_an_echo_keeps_the_sampled_tokens_and_their_cache(
    spelling: str, store: bool, read_suspended: list[int]
) -> None:
    async with serving(engine=thinking_engine(), settings=KEEPING) as server:
        responses = await loop(
            server,
            SPELLINGS[spelling],
            store=store,
            include=["reasoning.encrypted_content"],
        )

        assert text_in(responses[-1]) == "Sun."
        assert inputs_of(server.engine) == read_suspended
        check_nothing_was_prefilled_twice(responses)


@pytest.mark.parametrize("spelling", REFERENCES)
async def test_a_reference_keeps_the_sampled_tokens_and_their_cache(
    spelling: str, read_suspended: list[int]
) -> None:
    async with serving(engine=thinking_engine(), settings=KEEPING) as server:
        responses = await loop(server, REFERENCES[spelling])

        assert inputs_of(server.engine) == read_suspended
        check_nothing_was_prefilled_twice(responses)


async def test_a_reference_keeps_the_sampled_tokens_where_no_cache_is_kept(
    read_suspended: list[int],
) -> None:
    async with serving(engine=thinking_engine()) as server:
        responses = await loop(server, by_reference)

        num_read = responses[-1]["usage"]["input_tokens"]
        last_prompt = inputs_of(server.engine)[-context_length(responses[-1]) :][:num_read]
        assert cached_tokens(responses[-1]) == 0
        assert last_prompt == read_suspended[:num_read]


async def test_what_was_sampled_is_not_what_its_text_encodes_to(read_suspended: list[int]) -> None:
    """So the other tests would notice that the history was encoded again."""
    async with serving(engine=thinking_engine()) as server:
        await loop(server, as_it_came)

        assert inputs_of(server.engine)[-len(read_suspended) :] != read_suspended


# --- Calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call_by_call", [True, False])
async def test_parallel_calls_are_known_in_either_order(call_by_call: bool) -> None:
    async with serving(BOTH, "Sun.", settings=KEEPING) as server:
        first = await post(server)
        calls = [rewritten_without_ids(item) for item in first["output"]]
        outputs = [output(call, "dry") for call in calls]
        echo = [calls[0], outputs[0], calls[1], outputs[1]] if call_by_call else [*calls, *outputs]
        second = await post(server, input=[QUESTION, *echo])

        assert cached_tokens(second) == context_length(first)


async def test_call_ids_that_the_client_has_replaced_cost_no_cache() -> None:
    async with serving(BOTH, "Sun.", settings=KEEPING) as server:
        first = await post(server)
        calls = [without_ids(call) | {"call_id": f"c{i}"} for i, call in enumerate(first["output"])]
        outputs = [output(call, "dry") for call in calls]
        second = await post(server, input=[QUESTION, *calls, *outputs])

        assert cached_tokens(second) == context_length(first)
        assert text_in(second) == "Sun."


# --- What is kept --------------------------------------------------------------------------------


async def test_an_edited_history_is_a_new_prefix() -> None:
    async with serving(f"{SAID}{OSLO}", "Sun.", settings=KEEPING) as server:
        first = await post(server, input=[QUESTION])
        message, call = first["output"]
        edited = message | {"content": [{"type": "output_text", "text": "I will look."}]}
        second = await post(server, input=[QUESTION, edited, call, output(call, "dry")])

        assert cached_tokens(second) == first["usage"]["input_tokens"]
        assert "I will look." in read_text(server)


async def test_an_edited_argument_is_a_new_prefix() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        first = await post(server, input=[QUESTION])
        (call,) = first["output"]
        edited = call | {"arguments": '{"city": "Narvik"}'}
        second = await post(server, input=[QUESTION, edited, output(call, "dry")])

        assert cached_tokens(second) < context_length(first)
        assert "Narvik" in read_text(server)


async def test_a_new_first_message_is_a_new_prefix() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        first = await post(server, input=[QUESTION])
        (call,) = first["output"]
        question = QUESTION | {"content": "Was it dry in Oslo?"}
        second = await post(server, input=[question, call, output(call, "dry")])

        assert cached_tokens(second) < first["usage"]["input_tokens"]
        assert "Was it dry" in read_text(server)


async def test_a_history_can_be_taken_up_in_two_ways() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        first = await post(server)
        (call,) = first["output"]
        followers = [
            await post(server, input=[QUESTION, call, output(call, text)])
            for text in ("dry", "wet")
        ]

        assert all(cached_tokens(each) >= context_length(first) for each in followers)


async def test_the_same_question_once_more_is_cached_but_for_its_last_token() -> None:
    async with serving("Sun.", settings=KEEPING) as server:
        first = await post(server)
        second = await post(server)

        assert cached_tokens(second) == first["usage"]["input_tokens"] - 1


async def test_streams_are_kept_like_all_others() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        first = (await post_streamed(server))[-1]["response"]
        (call,) = first["output"]
        events = await post_streamed(server, input=[QUESTION, call, output(call, "dry")])

        assert cached_tokens(events[-1]["response"]) == context_length(first)


async def test_only_so_many_responses_are_kept() -> None:
    async with serving("Sun.", settings=Settings(recent_responses=2)) as server:
        first = await post(server, instructions="A")
        for instructions in ("B", "C"):
            await post(server, instructions=instructions)
        again = await post(server, instructions="A")

        assert cached_tokens(again) < first["usage"]["input_tokens"] - 1
        assert server.engine.kv_tokens < 3 * context_length(first)


async def test_where_nothing_is_kept_all_is_computed_again() -> None:
    async with serving(OSLO, BERGEN, "Sun.", settings=Settings(recent_responses=0)) as server:
        responses = await loop(server, as_it_came)

        assert list(map(cached_tokens, responses)) == [0, 0, 0]
        assert len(inputs_of(server.engine)) == sum(map(context_length, responses))
        await server.until_free()


async def test_what_one_request_reads_back_is_not_kept_for_others_where_nothing_is_kept() -> None:
    async with serving(engine=thinking_engine(), settings=Settings(recent_responses=0)) as server:
        first = await post(server, input=[QUESTION])
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        outputs = [output(call, "dry") for call in calls]
        history = [QUESTION, *first["output"], *outputs]
        before = await count(server, input=history)
        await count(server, input=outputs, previous_response_id=first["id"])
        await count(server, input=[QUESTION, *map(by_reference, first["output"]), *outputs])
        after = await count(server, input=history)

        assert after == before


async def test_caches_are_let_go_after_a_while_though_no_request_comes() -> None:
    settings = Settings(recent_responses=4, suspend_ttl_seconds=0.02)
    async with serving("Sun.", settings=settings) as server:
        await post(server)

        await server.until_free()


async def test_the_caches_of_every_key_are_let_go(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = [{"Authorization": f"Bearer {add_api_key(file, name)}"} for name in ("a", "b")]
    settings = Settings(recent_responses=4, suspend_ttl_seconds=0.02, api_key_file=file)
    async with serving("Sun.", "Sun.", settings=settings) as server:
        for headers in keys:
            await post(server, headers=headers)

        await server.until_free()


# --- What is stored ------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["http", "ws"])
async def test_an_echo_of_stored_turns_is_known_when_the_server_starts_again(
    transport: str, tmp_path: Path, read_suspended: list[int]
) -> None:
    settings = Settings(recent_responses=4, data_dir=tmp_path)
    async with serving(engine=thinking_engine(), settings=settings) as server:
        responses = await loop(server, rewritten)
    history: list[Event] = [QUESTION]
    for response in responses[:-1]:
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        history += [*map(rewritten, response["output"]), *(output(call, "dry") for call in calls)]
    async with serving(engine=thinking_engine(), settings=settings) as server:
        again = await ask(server, transport, history)

        num_read = again["usage"]["input_tokens"]
        assert cached_tokens(again) == 0
        assert inputs_of(server.engine)[:num_read] == read_suspended[:num_read]


async def test_the_store_is_asked_once_for_a_whole_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(recent_responses=4, data_dir=tmp_path)
    async with serving(engine=thinking_engine(), settings=settings) as server:
        responses = await loop(server, as_it_came)
    said = [item for response in responses for item in response["output"]]
    outputs = [output(call, "dry") for call in said if call["type"] == "function_call"]
    history = [QUESTION, *said, *outputs, QUESTION]
    asked = note_lookups(monkeypatch)
    async with serving(engine=thinking_engine(), settings=settings) as server:
        for _ in range(2):
            await count(server, input=history)

    assert asked == [said[-1]["id"]]


async def test_the_store_is_not_asked_for_all_of_a_foreign_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {"type": "message", "role": "assistant", "content": SAID}
    asked = note_lookups(monkeypatch)
    async with serving(SAID, settings=KEEPING) as server:
        await count(server, input=[QUESTION, *(said | {"id": f"msg_{i}"} for i in range(99))])

    assert 0 < len(asked) < 10


async def test_a_stored_turn_of_another_key_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    alice, bob = ({"Authorization": f"Bearer {add_api_key(file, name)}"} for name in ("a", "b"))
    settings = Settings(recent_responses=4, api_key_file=file)
    async with serving(engine=thinking_engine(), settings=settings) as server:
        first = await post(server, input=[QUESTION], headers=alice)
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        history = [QUESTION, *first["output"], *(output(call, "dry") for call in calls)]
        counts = [await count(server, headers=key, input=history) for key in (alice, bob)]

        assert counts[0] > counts[1]  # spelled-out tokens are more than encoded ones


async def ask(server: Running, transport: str, history: list[Event]) -> Event:
    """Return the response to a whole history."""
    if transport == "http":
        return await post(server, input=history)
    async with server.connect() as client:
        response: Event = (await client.create(input=history))[-1]["response"]
        return response


async def count(
    server: Running, *, headers: Mapping[str, str] | None = None, **members: Any
) -> int:
    """Return how long the context would be of a response."""
    async with server.http() as http:
        answer = await http.post("/v1/responses/input_tokens", json=BODY | members, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


def note_lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the item ids that stores are asked for from now on."""
    asked: list[str] = []
    get_by_item = ResponseStore.get_by_item

    async def noting(store: ResponseStore, key: str, item_id: str) -> StoredResponse | None:
        asked.append(item_id)
        return await get_by_item(store, key, item_id)

    monkeypatch.setattr(ResponseStore, "get_by_item", noting)
    return asked


# --- References that lead nowhere ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reasoning", "message", "function_call"])
async def test_a_reference_to_what_was_not_stored_is_told_so(kind: str) -> None:
    async with serving(engine=thinking_engine(), settings=KEEPING) as server:
        first = await post(server, store=False)
        (item,) = (item for item in first["output"] if item["type"] == kind)
        refused = await post_refused(server, input=[QUESTION, by_reference(item)])

        assert refused == Refusal(400, "item_not_found", "input[1]")


async def test_a_reference_where_there_is_no_store_is_told_so() -> None:
    settings = Settings(recent_responses=4, store=False)
    async with serving("Sun.", settings=settings) as server:
        (item,) = (await post(server))["output"]
        refused = await post_refused(server, input=[QUESTION, by_reference(item), QUESTION])

        assert refused == Refusal(400, "item_not_found", "input[1]")


async def test_a_reference_to_a_deleted_response_is_told_so() -> None:
    async with serving("Sun.", settings=KEEPING) as server:
        first = await post(server)
        async with server.http() as http:
            await http.delete(f"/v1/responses/{first['id']}")
        (item,) = first["output"]
        refused = await post_refused(server, input=[QUESTION, by_reference(item), QUESTION])

        assert refused == Refusal(400, "item_not_found", "input[1]")


async def test_the_items_of_a_client_cannot_be_referred_to() -> None:
    """Codex makes up ids for its own items, so they name nothing."""
    async with serving("Sun.", settings=KEEPING) as server:
        await post(server, input=[QUESTION | {"id": "msg_1"}])
        refused = await post_refused(server, input=[by_reference({"id": "msg_1"})])

        assert refused == Refusal(400, "item_not_found", "input[0]")


def read_text(server: Running) -> str:
    """Return all that the model read, as text; control tokens are left out."""
    tokenizer = server.engine.model.tokenizer
    return b"".join(map(tokenizer.token_bytes, inputs_of(server.engine))).decode()
