"""``?cache=off``: a request that neither uses what others left nor leaves anything for others.

It is the baseline of comparisons, on a server that has all of its caches on.
"""

import asyncio
from pathlib import Path

import pytest

from sampler.engines.simulated.script import Script, ScriptedTurn
from sampler.local_engine import LocalEngine
from server.settings import Settings
from tests.sampler.test_simulated import model_of
from tests.server.designs import QUESTION, Design, calls_of, hold, post
from tests.server.http_client import cached_tokens, context_length
from tests.server.models import OSLO, encoded, inputs_of, scripted_engine, spelled_out, steps_of
from tests.server.refusals import Refusal, refusal
from tests.server.running import BODY, Running, output, serving, text_in

OFF = "?cache=off"
KEEPING = Settings(recent_responses=4)
LONG = "Is it dry in Oslo? " * 20


def engine_with_prefixes() -> LocalEngine:
    """Return an engine that computes prompts once that begin alike."""
    return LocalEngine(model_of(Script((ScriptedTurn(num_words=3),))))


async def forwarded(server: Running) -> int:
    """Return how many tokens have been through the model."""
    return int((await server.metrics())["suspend_tokens_forwarded_total"])


# --- Nothing is reused ---------------------------------------------------------------------------


async def test_each_request_of_a_run_is_computed_whole() -> None:
    async with serving(OSLO, OSLO, "Sun.", settings=KEEPING) as server:
        responses = await hold(server, Design.STATELESS)
        total = await forwarded(server)

    assert len(responses) == 3
    assert [cached_tokens(response) for response in responses] == [0, 0, 0]
    assert total == sum(map(context_length, responses))


async def test_a_response_that_is_kept_is_not_gone_on_from() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        first = await post(server, input=[QUESTION])
        before = await forwarded(server)
        history = [QUESTION, *first["output"], *map(output, calls_of(first))]
        second = await post(server, OFF, input=history)
        after = await forwarded(server)

    assert cached_tokens(second) == 0
    assert after - before == context_length(second)


async def test_a_prompt_that_begins_like_another_is_computed_whole() -> None:
    async with serving(engine=engine_with_prefixes(), settings=KEEPING) as server:
        await post(server, input=LONG)
        reusing = await post(server, input=LONG)
        before = await forwarded(server)
        whole = await post(server, OFF, input=LONG)
        after = await forwarded(server)

    assert cached_tokens(reusing) > 0
    assert cached_tokens(whole) == 0
    assert after - before == context_length(whole)


async def test_what_was_said_is_encoded_anew() -> None:
    said = [*spelled_out("Rain."), *encoded(OSLO)]  # in tokens that nobody would choose
    async with serving(engine=scripted_engine(said, "Sun."), settings=KEEPING) as server:
        first = await post(server, input=[QUESTION])
        history = [QUESTION, *first["output"], *map(output, calls_of(first))]
        num_read = len(inputs_of(server.engine))
        second = await post(server, OFF, input=history, store=False)
        read = inputs_of(server.engine)[num_read:]

    assert contains(read, encoded("Rain."))
    assert not contains(read, spelled_out("Rain."))
    assert text_in(second) == "Sun."


async def test_a_response_that_is_stored_is_gone_on_from_without_its_cache() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        first = await post(server, input=[QUESTION])
        answers = list(map(output, calls_of(first)))
        second = await post(server, OFF, previous_response_id=first["id"], input=answers)

    assert cached_tokens(second) == 0
    assert text_in(second) == "Sun."


# --- Nothing is left -----------------------------------------------------------------------------


async def test_no_cache_is_left() -> None:
    async with serving(OSLO, settings=KEEPING) as server:
        await post(server, OFF)

        await server.until_free()


async def test_a_run_that_is_sent_again_later_finds_nothing() -> None:
    async with serving(OSLO, "Sun.", settings=KEEPING) as server:
        first = await post(server, OFF, input=[QUESTION], store=False)
        history = [QUESTION, *first["output"], *map(output, calls_of(first))]
        second = await post(server, input=history)

    assert cached_tokens(second) == 0


async def test_a_prompt_that_begins_alike_finds_nothing() -> None:
    async with serving(engine=engine_with_prefixes(), settings=KEEPING) as server:
        await post(server, OFF, input=LONG)
        later = await post(server, input=LONG)

    assert cached_tokens(later) == 0


async def test_what_was_said_is_not_recognised_later() -> None:
    said = [*spelled_out("Rain."), *encoded(OSLO)]
    async with serving(engine=scripted_engine(said, "Sun."), settings=KEEPING) as server:
        first = await post(server, OFF, input=[QUESTION], store=False)
        history = [QUESTION, *first["output"], *map(output, calls_of(first))]
        num_read = len(inputs_of(server.engine))
        await post(server, input=history)
        read = inputs_of(server.engine)[num_read:]

    assert contains(read, encoded("Rain."))
    assert not contains(read, spelled_out("Rain."))


async def test_what_others_left_stays() -> None:
    settings = Settings(recent_responses=1)
    async with serving(OSLO, "Sun.", settings=settings) as server:
        first = await post(server, input=[QUESTION])
        for city in ("Rome", "Bergen"):
            await post(server, OFF, input=f"Is it dry in {city}?")
        history = [QUESTION, *first["output"], *map(output, calls_of(first))]
        second = await post(server, input=history)

    assert cached_tokens(second) == context_length(first)


async def test_a_response_is_stored_if_that_is_asked_for(tmp_path: Path) -> None:
    settings = Settings(recent_responses=4, data_dir=tmp_path)
    async with serving("Sun.", settings=settings) as server, server.http() as http:
        stored = await post(server, OFF)
        unstored = await post(server, OFF, store=False)
        found = [await http.get(f"/v1/responses/{r['id']}") for r in (stored, unstored)]

    assert [answer.status_code for answer in found] == [200, 404]


# --- Side by side --------------------------------------------------------------------------------


async def test_requests_with_and_without_it_do_not_meet() -> None:
    async with serving(engine=engine_with_prefixes(), settings=KEEPING) as server:
        first = await post(server, input=LONG)
        whole, reusing = await asyncio.gather(
            post(server, OFF, input=LONG), post(server, input=LONG)
        )

    assert cached_tokens(first) == cached_tokens(whole) == 0
    assert cached_tokens(reusing) > 0
    assert text_in(whole) == text_in(reusing) == text_in(first)


async def test_a_run_can_be_held_both_ways_at_once() -> None:
    async with serving(OSLO, OSLO, "Sun.", settings=KEEPING) as server:
        off, on = await asyncio.gather(hold(server, Design.STATELESS), hold(server, Design.CACHED))

    assert [cached_tokens(response) for response in off] == [0, 0, 0]
    assert [cached_tokens(response) for response in on[1:]] == list(map(context_length, on[:-1]))
    assert text_in(off[-1]) == text_in(on[-1]) == "Sun."


# --- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["responses", "responses/input_tokens", "responses/compact"])
@pytest.mark.parametrize("value", ["on", "", "OFF", "0"])
async def test_another_value_is_refused(value: str, path: str) -> None:
    async with serving("Sun.", settings=KEEPING) as server, server.http() as http:
        answer = await http.post(f"/v1/{path}?cache={value}", json=BODY)

        error = answer.json()["error"]
        assert refusal(answer.status_code, error) == Refusal(400, "invalid_value", "cache")
        assert error["message"] == f"invalid value for 'cache': expected 'off', got {value!r}"
        assert steps_of(server.engine) == []


async def test_a_context_is_counted_as_it_is_with_caches() -> None:
    async with serving("Sun.", settings=KEEPING) as server, server.http() as http:
        counted = [
            (await http.post(f"/v1/responses/input_tokens{query}", json=BODY)).json()
            for query in ("", OFF)
        ]
        response = await post(server, OFF)

    assert counted[0] == counted[1]
    assert counted[0]["input_tokens"] == response["usage"]["input_tokens"]


def contains(token_ids: list[int], piece: tuple[int, ...] | list[int]) -> bool:
    """Tell whether ``piece`` stands somewhere in ``token_ids``."""
    length = len(piece)
    starts = range(len(token_ids) - length + 1)
    return any(token_ids[start : start + length] == list(piece) for start in starts)
