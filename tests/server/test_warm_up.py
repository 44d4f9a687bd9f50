"""Warm-ups: responses that sample nothing, so that what follows them need not be prefilled."""

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sampler.local_engine import LocalEngine
from server.ledger import LEDGER_FILE, Ledger
from server.settings import Settings
from tests.sampler.templates import BYTES_HF, QWEN, STRICT, Template
from tests.server.http_client import cached_tokens, context_length, post
from tests.server.models import (
    OSLO,
    context_text,
    encoded,
    failing_at,
    held_at,
    scripted_engine,
    steps_of,
)
from tests.server.running import (
    BODY,
    Client,
    Event,
    calls_in,
    output,
    serving,
    text_in,
    until,
)
from tests.server.test_overlap import locked

QUESTION: Event = {"role": "user", "content": BODY["input"]}
LONG = {"instructions": "Be brief. " * 40}
"""More than is filled in one step."""


async def warmed_up(client: Client, **members: Any) -> Event:
    """Return a warm-up that says what tools there are, and nothing that anybody has said."""
    events = await client.create(**({"generate": False, "input": [], "store": False} | members))
    response: Event = events[-1]["response"]
    return response


async def followed(client: Client, parent: Event, *items: Event, **members: Any) -> Event:
    events = await client.follow(parent, *items, **members)
    response: Event = events[-1]["response"]
    return response


async def until_filled(engine: LocalEngine, num_tokens: int) -> None:
    """Wait until the caches hold so many tokens."""
    await until(lambda: engine.kv_tokens >= num_tokens)


# --- What a warm-up is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "members",
    [
        {"generate": False},
        {"prompt_cache_options": {"prewarm": True}},
        {"generate": True, "prompt_cache_options": {"prewarm": True}},
        {"generate": False, "prompt_cache_options": {"prewarm": False}},
    ],
    ids=["generate", "prewarm", "both", "generate only"],
)
@pytest.mark.parametrize("told", [[], [QUESTION], "Is it dry in Oslo?"], ids=len)
async def test_it_completes_without_output(members: Event, told: Any) -> None:
    async with serving("Sun.") as server, server.connect() as client:
        events = await client.create(**({"input": told} | members))

        response = events[-1]["response"]
        assert [event["type"] for event in events] == [
            "response.created", "response.in_progress", "response.completed",
        ]  # fmt: skip
        assert response["status"] == "completed"
        assert response["output"] == []
        assert response["usage"]["input_tokens"] > 0
        assert response["usage"]["output_tokens"] == 0
        assert server.engine.counters.tokens_sampled == 0


async def test_it_needs_neither_input_nor_tools_nor_instructions() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        parent = await warmed_up(client, tools=[])
        response = await followed(client, parent, QUESTION)

        assert text_in(response) == "Sun."


@pytest.mark.parametrize("template", [QWEN, STRICT])
@pytest.mark.parametrize("members", [{}, {"instructions": "Be brief."}], ids=["nothing", "system"])
async def test_it_needs_no_input_though_the_chat_template_does(
    template: str, members: Event
) -> None:
    engine = scripted_engine("Sun.")
    chat_format = Template(engine.model.tokenizer, BYTES_HF, template).format()
    engine.model = replace(engine.model, chat_format=chat_format)
    async with serving(engine=engine) as server, server.connect() as client:
        parent = await warmed_up(client, tools=[], **members)
        await until_filled(engine, parent["usage"]["input_tokens"])
        response = await followed(client, parent, QUESTION, tools=[], **members)

        assert text_in(response) == "Sun."
        assert cached_tokens(response) == parent["usage"]["input_tokens"] > 0


async def test_a_warm_up_for_another_model_is_refused_and_the_connection_stays() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        await client.send("response.create", generate=False, input=[], model="codex-auto-review")
        error = await client.error()
        events = await client.create()

        assert error["error"]["code"] == "model_not_found"
        assert error["error"]["param"] == "model"
        assert text_in(events[-1]["response"]) == "Sun."


async def test_a_warm_up_that_is_too_long_is_refused() -> None:
    engine = scripted_engine("Sun.", max_context=500)
    async with serving(engine=engine) as server, server.connect() as client:
        long = BODY | {"generate": False, "instructions": "x" * 1000}
        await client.send("response.create", **long)
        error = await client.error()

        assert error["error"]["code"] == "context_length_exceeded"


async def test_a_warm_up_may_be_stored() -> None:
    async with serving("Sun.") as server, server.connect() as client, server.http() as http:
        parent = await warmed_up(client, input=[QUESTION], store=True)
        await until_filled(server.engine, parent["usage"]["input_tokens"])
        stored = (await http.get(f"/v1/responses/{parent['id']}")).json()
        asked = {"previous_response_id": parent["id"], "input": "And in Bergen?"}
        posted = (await http.post("/v1/responses", json=BODY | asked)).json()

        assert stored == parent
        assert text_in(posted) == "Sun."
        assert BODY["input"] in context_text(server.engine)


# --- What follows it -----------------------------------------------------------------------------


async def test_it_can_be_followed_and_what_it_said_counts() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        parent = await warmed_up(client, input=[{"role": "developer", "content": "Be brief."}])
        response = await followed(client, parent, QUESTION)

        text = context_text(server.engine)
        assert response["previous_response_id"] == parent["id"]
        assert text_in(response) == "Sun."
        assert text.index("Be brief.") < text.index(BODY["input"])


async def test_it_can_be_followed_more_than_once() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        parent = await warmed_up(client)
        told = ["In Oslo?", "In Bergen?", "In Narvik?"]
        for text in told:
            response = await followed(client, parent, input=text)

            assert text_in(response) == "Sun."
            assert [t for t in told if t in context_text(server.engine)] == [text]


async def test_it_can_be_followed_on_other_lanes_at_once() -> None:
    async with serving("Sun." * 8) as server, server.connect() as client:
        parent = await warmed_up(client)
        for lane in ("a", "b", None):
            asked = {"previous_response_id": parent["id"], "input": f"On {lane}?"}
            await client.send("response.create", **(BODY | asked | {"stream_id": lane}))
        while sum(stream[-1]["type"] == "response.completed" for stream in client.streams) < 4:
            await client.receive()

        texts = [text_in(stream[-1]["response"]) for stream in client.streams[1:]]
        assert texts == 3 * ["Sun." * 8]


async def test_it_can_be_followed_by_another_warm_up() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        first = await warmed_up(client, input="One.")
        second = await followed(client, first, generate=False, input="Two.")
        third = await followed(client, second, generate=False)
        response = await followed(client, third, QUESTION)

        text = context_text(server.engine)
        assert [r["previous_response_id"] for r in (second, third, response)] == [
            first["id"], second["id"], third["id"],
        ]  # fmt: skip
        assert text.index("One.") < text.index("Two.") < text.index(BODY["input"])


async def test_it_may_follow_a_response() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        events = await client.create(store=False)
        first, (call,) = events[-1]["response"], calls_in(events)
        parent = await followed(client, first, output(call), generate=False)
        last = await followed(client, parent)

        assert parent["output"] == []
        assert text_in(last) == "Sun."


async def test_what_it_follows_can_still_be_followed() -> None:
    async with serving(OSLO, "Sun.") as server, server.connect() as client:
        events = await client.create(store=False)
        await followed(client, events[-1]["response"], output(calls_in(events)[0]), generate=False)
        last = await followed(client, events[-1]["response"], output(calls_in(events)[0]))

        assert text_in(last) == "Sun."


async def test_a_newer_one_takes_its_place() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        first = await warmed_up(client)
        second = await warmed_up(client)
        asked = {"previous_response_id": first["id"], "input": [QUESTION]}
        await client.send("response.create", **(BODY | asked | {"store": False}))
        error = await client.error()
        last = await followed(client, second, QUESTION)

        assert error["error"]["code"] == "previous_response_not_found"
        assert text_in(last) == "Sun."


async def test_a_continuation_that_fails_evicts_it() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        parent = await warmed_up(client)
        asked = BODY | {"previous_response_id": parent["id"], "store": False}
        codes = []
        for told in ([output("call_of_nobody")], [QUESTION]):
            await client.send("response.create", **(asked | {"input": told}))
            codes.append((await client.error())["error"]["code"])

        assert codes == [None, "previous_response_not_found"]


async def test_another_connection_does_not_know_it() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        parent = await warmed_up(client)
        async with server.connect() as other:
            asked = {"previous_response_id": parent["id"], "input": [QUESTION]}
            await other.send("response.create", **(BODY | asked))
            error = await other.error()

        assert error["error"]["code"] == "previous_response_not_found"


# --- What it costs -------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, recent_responses=0)


def rows_in(folder: Path) -> list[tuple[str, str, int, int, int, int]]:
    """Return what the books have: of each response its id, status, segments, and its tokens: input,
    cached input, output."""
    columns = "run_id, status, num_segments, input_tokens, cached_tokens, output_tokens"
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        return database.execute(f"SELECT {columns} FROM runs ORDER BY rowid").fetchall()


def row_of(response: Event, status: str = "completed") -> tuple[str, str, int, int, int, int]:
    """Return what the books should have of ``response``, which is what the client was told."""
    usage = response["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return response["id"], status, 1, usage["input_tokens"], cached, usage["output_tokens"]


async def test_it_is_in_the_books_once_with_the_usage_that_was_told(
    kept: Settings, tmp_path: Path
) -> None:
    async with serving("Sun.", settings=kept) as server, server.connect() as client:
        parent = await warmed_up(client, **LONG)
        await until_filled(server.engine, parent["usage"]["input_tokens"])
        responses = [await followed(client, parent, QUESTION, **LONG) for _ in range(2)]

    assert parent["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert rows_in(tmp_path) == [row_of(response) for response in (parent, *responses)]


async def test_what_it_has_from_the_response_that_it_follows_is_cached(
    kept: Settings, tmp_path: Path
) -> None:
    async with serving("Rain.", "Sun.", settings=kept) as server, server.connect() as client:
        first = (await client.create(store=False))[-1]["response"]
        parent = await followed(client, first, QUESTION, generate=False)

    assert cached_tokens(parent) == context_length(first)
    assert rows_in(tmp_path) == [row_of(first), row_of(parent)]


async def test_where_nothing_is_filled_it_costs_nothing(
    kept: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted_engine("Sun.")
    monkeypatch.setattr(engine, "new_snapshot", lambda prompt: None)
    async with serving(engine=engine, settings=kept) as server, server.connect() as client:
        parent = await warmed_up(client)
        response = await followed(client, parent, QUESTION)

    assert rows_in(tmp_path) == [row_of(response)]


@pytest.mark.parametrize(
    "asked", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}]
)
async def test_over_http_nothing_is_filled_and_it_costs_nothing(
    asked: Event, kept: Settings, tmp_path: Path
) -> None:
    async with serving("Sun.", settings=replace(kept, recent_responses=4)) as server:
        response = await post(server, **asked)

        assert response["status"] == "completed"
        assert server.engine.counters.tokens_forwarded == 0
    assert rows_in(tmp_path) == []


async def test_one_that_is_refused_costs_nothing(kept: Settings, tmp_path: Path) -> None:
    engine = scripted_engine("Sun.", max_context=500)
    async with serving(engine=engine, settings=kept) as server, server.connect() as client:
        await client.send("response.create", generate=False, input="x" * 1000)
        await client.error()

    assert rows_in(tmp_path) == []


@pytest.mark.parametrize("act", ["segment", "finish"])
async def test_wherever_the_process_is_killed_it_counts_once(
    act: str, kept: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "left"
    entered = getattr(Ledger, act)

    def dying(ledger: Ledger, *args: Any) -> None:
        entered(ledger, *args)
        shutil.copytree(folder, left)  # what there is when it dies right after

    folder = tmp_path / "data"
    monkeypatch.setattr(Ledger, act, dying)
    async with (
        serving("Sun.", settings=replace(kept, data_dir=folder)) as server,
        server.connect() as client,
    ):
        with locked(folder):  # so that its files are whole when they are copied
            parent = await warmed_up(client)
    monkeypatch.undo()
    for _ in range(2):
        Ledger(left, {}).close()

    status = "interrupted" if act == "segment" else "completed"
    assert rows_in(left) == [row_of(parent, status)]
    assert rows_in(folder) == [row_of(parent)]


# --- What it spares ------------------------------------------------------------------------------


async def test_what_it_had_time_to_fill_is_not_prefilled_again() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        parent = await warmed_up(client, **LONG)
        await until_filled(server.engine, parent["usage"]["input_tokens"])
        response = await followed(client, parent, QUESTION, **LONG)

        assert cached_tokens(response) == parent["usage"]["input_tokens"]
        assert server.engine.counters.tokens_forwarded == context_length(response)


async def test_what_it_had_no_time_to_fill_is_prefilled_by_who_follows() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        with held_at(2, server.engine) as model:
            parent = await warmed_up(client, **LONG)
            await model.reached.wait()
            num_filled = server.engine.kv_tokens
            asked = {"previous_response_id": parent["id"], "input": [QUESTION], "store": False}
            await client.send("response.create", **(BODY | asked | LONG))
            await until(lambda: len(server.engine.runs) == 1)
            model.release()
            response = (await client.segment())[-1]["response"]

        # The step that was held is waited for, and used.
        assert 0 < num_filled < cached_tokens(response) < parent["usage"]["input_tokens"]
        assert server.engine.counters.tokens_forwarded == context_length(response)


async def test_a_follower_with_other_tools_spares_what_is_the_same() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        parent = await warmed_up(client, **LONG)
        await until_filled(server.engine, parent["usage"]["input_tokens"])
        response = await followed(client, parent, QUESTION, tools=[], **LONG)

        num_same = len(encoded(LONG["instructions"].rstrip()))
        assert num_same <= cached_tokens(response) < parent["usage"]["input_tokens"]


async def test_it_is_filled_from_what_it_follows() -> None:
    async with serving("Rain.", "Sun.") as server, server.connect() as client:
        first = (await client.create(store=False))[-1]["response"]
        before = server.engine.counters.tokens_forwarded  # it is filled from when it is asked for
        parent = await followed(client, first, QUESTION, generate=False)
        new = parent["usage"]["input_tokens"] - (context_length(first))
        await until(lambda: server.engine.counters.tokens_forwarded >= before + new)
        response = await followed(client, parent)

        assert cached_tokens(response) == parent["usage"]["input_tokens"]
        assert server.engine.counters.tokens_forwarded == context_length(response)


async def test_a_warm_up_that_fails_spares_nothing_and_breaks_nothing() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        with failing_at(1, server.engine):
            parent = await warmed_up(client)
            await until(lambda: server.engine.kv_tokens == 0)
        response = await followed(client, parent, QUESTION)

        assert text_in(response) == "Sun."


async def test_a_long_warm_up_does_not_keep_another_connection_s_response_waiting() -> None:
    async with serving("Sun." * 10) as server, server.connect() as client:
        async with server.connect() as other:
            with held_at(3, server.engine) as model:
                await client.send("response.create", **BODY)
                await model.reached.wait()
                parent = await warmed_up(other, instructions="x" * 3000)
                model.release()
                await client.segment()
            sizes = steps_of(server.engine)
            await until_filled(server.engine, parent["usage"]["input_tokens"])

        # The prompt, and then a token at a time: no step of the warm-up was in between.
        assert parent["usage"]["input_tokens"] > 3000
        assert sizes[1:11] == 10 * [1]


async def test_a_response_that_comes_during_a_warm_up_waits_for_one_step_at_most() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        async with server.connect() as other:
            with held_at(2, server.engine) as model:
                await warmed_up(other, instructions="x" * 3000)
                await model.reached.wait()
                await client.send("response.create", **BODY)
                await until(lambda: len(server.engine.runs) == 1)
                model.release()
                await client.segment()
            sizes = steps_of(server.engine)

        (prompt,) = (index for index, size in enumerate(sizes) if size > 100)
        assert prompt <= 3
        assert sizes[prompt + 1 : prompt + 2] == [1]


async def test_nothing_is_left_of_a_warm_up_whose_connection_is_gone() -> None:
    async with serving("Sun.") as server, server.connect() as client:
        with held_at(2, server.engine) as model:
            await warmed_up(client, instructions="x" * 3000)
            await model.reached.wait()
            client.abort()
            await model.release_once_stopped()
            await server.until_free()

        assert server.engine.counters.forward_passes == 2
