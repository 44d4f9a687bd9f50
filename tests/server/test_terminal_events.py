"""However a response ends, it ends once, and nothing in it stays open.

Every client checks the whole of each stream by the grammar when it leaves; what is asserted besides
is how it ended.
"""

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from server.background import BackgroundRuns
from server.ledger import LEDGER_FILE
from server.settings import Settings
from tests.server.http_client import cached_tokens, context_length
from tests.server.models import (
    OSLO,
    context_of,
    failing_at,
    held_at,
    scripted_engine,
    spelled_out,
)
from tests.server.running import BODY, TERMINAL, Client, Event, calls_in, output, serving, text_in
from tests.tiny_model import call_text, tiny_engine

DIALECTS = ["append", "inject", "chained"]
QUESTION: Event = {"role": "user", "content": "And now?"}


def ends(client: Client) -> list[list[str]]:
    """Return the terminal events of each stream."""
    return [
        [event["type"] for event in stream if event["type"] in TERMINAL]
        for stream in client.streams
    ]


# --- Budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
async def test_a_budget_may_run_out_anywhere_and_the_chain_goes_on(
    budget: int, dialect: str
) -> None:
    says = f"Let me look.Rain.{OSLO}"
    async with serving(says, "Sun.") as server, server.connect(dialect) as client:
        cut = (await client.create(max_output_tokens=budget, store=False))[-1]["response"]
        last = (await client.follow(cut, QUESTION))[-1]["response"]

        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
        assert cut["usage"]["output_tokens"] == budget
        assert [item["status"] for item in cut["output"]][-1] == "incomplete"
        assert ends(client) == [["response.incomplete"], ["response.completed"]]
        assert text_in(last) == "Sun."


CUT = spelled_out("<think>\n")
SILENT = {
    "ended at once": ((), None, "completed"),
    "ended with the budget": ((), 1, "completed"),
    "cut before a thought": (CUT, len(CUT), "incomplete"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("says", "budget", "status"), SILENT.values(), ids=SILENT)
async def test_a_response_that_says_nothing_has_an_empty_message_and_the_chain_goes_on(
    says: Sequence[int], budget: int | None, status: str, dialect: str
) -> None:
    engine = scripted_engine(says, "Sun.", thinks=True)
    async with serving(engine=engine) as server, server.connect(dialect) as client:
        silent = (await client.create(max_output_tokens=budget, store=False))[-1]["response"]
        sampled = context_of(engine)
        last = (await client.follow(silent, *silent["output"], QUESTION))[-1]["response"]

        (message,) = silent["output"]
        assert (silent["status"], message["status"]) == (status, status)
        assert [part["text"] for part in message["content"]] == [""]
        assert context_of(engine)[: len(sampled)] == sampled
        assert text_in(last) == "Sun."


async def test_an_empty_message_that_comes_back_is_what_was_sampled() -> None:
    async with serving(engine=scripted_engine(CUT, "Sun.", thinks=True)) as server:
        async with server.connect() as client:
            silent = (await client.create(max_output_tokens=len(CUT)))[-1]["response"]
            history = [{"role": "user", "content": BODY["input"]}, *silent["output"], QUESTION]
            last = (await client.create(input=history))[-1]["response"]

        assert text_in(last) == "Sun."
        assert cached_tokens(last) == context_length(silent)


@pytest.mark.parametrize("dialect", ["append", "inject"])
@pytest.mark.parametrize("budget", [6, 7, 8, 9])
async def test_a_budget_may_run_out_after_the_calls_and_the_chain_goes_on(
    budget: int, dialect: str
) -> None:
    async with serving(OSLO, "Sun." * 9, "Rain.") as server, server.connect(dialect) as client:
        await client.send("response.create", **BODY, max_output_tokens=budget)
        (call,) = await client.calls(1)
        while client.streams[0][-1]["type"] != "response.done" and dialect == "append":
            await client.receive()
        cut = (await client.append(output(call)))[-1]["response"]
        last = (await client.follow(cut, QUESTION))[-1]["response"]

        assert text_in(cut) == "Sun." * budget
        assert [item["status"] for item in cut["output"]] == ["completed", "incomplete"]
        assert ends(client) == [["response.incomplete"], ["response.completed"]]
        assert text_in(last) == "Rain."


@pytest.mark.parametrize("budget", [4, 5, 8])
async def test_a_call_that_was_whole_when_the_budget_ran_out_can_be_answered(budget: int) -> None:
    async with serving(f"{OSLO}\n{OSLO}", "Sun.") as server, server.connect() as client:
        events = await client.create(max_output_tokens=budget, store=False)
        (call,) = [item for item in calls_in(events) if item["status"] == "completed"]
        last = await client.follow(events[-1]["response"], output(call))

        assert ends(client) == [["response.incomplete"], ["response.completed"]]
        assert text_in(last[-1]["response"]) == "Sun."


# --- Failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("step", range(1, 8))
async def test_a_step_may_fail_anywhere(
    step: int, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(f"Let me look.{OSLO}") as server, server.connect(dialect) as client:
        with failing_at(step, server.engine):
            failed = (await client.create())[-1]["response"]
        await client.create(tool_choice="none")

        assert failed["error"]["code"] == "server_error"
        assert ends(client) == [["response.failed"], ["response.completed"]]


# --- In the books --------------------------------------------------------------------------------


def books_in(folder: Path) -> list[tuple[str, str]]:
    """Return the id and the status of each run that has a row, in the order of their ends."""
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        return database.execute("SELECT run_id, status FROM runs ORDER BY rowid").fetchall()


async def test_the_books_have_each_response_with_the_status_that_was_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data_dir=tmp_path, recent_responses=0, suspend_ttl_seconds=0.05)
    async with serving(OSLO, settings=settings) as server, server.connect("inject") as client:
        cut = await client.create(max_output_tokens=1)
        expired = await client.create()
        with failing_at(1, server.engine):
            failed = await client.create()
        completed = await client.create(tool_choice="none")

        told = [events[-1]["response"] for events in (cut, expired, failed, completed)]
        statuses = [response["status"] for response in told]
        assert statuses == ["incomplete", "failed", "failed", "completed"]
        assert told[1]["error"]["code"] == "suspension_expired"
    assert books_in(tmp_path) == [(response["id"], response["status"]) for response in told]


async def test_the_books_have_what_its_client_left_as_cancelled(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, recent_responses=0)
    async with serving("Sun.", settings=settings) as server:
        with held_at(2, server.engine) as model:
            async with server.connect() as client:
                await client.send("response.create", **BODY)
                await model.reached.wait()
                client.abort()
            await model.release_once_stopped()
        await server.until_free()

    assert [status for _, status in books_in(tmp_path)] == ["cancelled"]


async def test_the_books_have_what_the_server_has_stopped_in_the_background_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (background,) = opened = [BackgroundRuns()]
    monkeypatch.setattr("server.services.BackgroundRuns", opened.pop)
    settings = Settings(data_dir=tmp_path, recent_responses=0)
    async with serving("Sun.", settings=settings) as server, server.http() as http:
        with held_at(2, server.engine) as model:
            asked = await http.post("/v1/responses", json=BODY | {"background": True})
            await model.reached.wait()
            live = background.get("", asked.json()["id"])
            closing_down = asyncio.create_task(background.close())
            await model.release_once_stopped()
            await closing_down

    assert live is not None
    assert live.response.status == "failed"
    assert [status for _, status in books_in(tmp_path)] == ["failed"]


# --- A model that says anything ------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["Oslo", '{"city": Oslo}', '{"town": "Oslo"}', '{"city": 1}'])
async def test_a_model_that_would_write_a_malformed_call_writes_a_proper_one(
    arguments: str,
) -> None:
    async with serving(call_text("get_weather", arguments)) as server:
        async with server.connect() as client:
            await client.create(max_output_tokens=40, seed=1)

        response = client.streams[0][-1]["response"]
        assert len(ends(client)[0]) == 1
        for call in response["output"]:
            if call["status"] == "completed":
                assert set(json.loads(call["arguments"])) == {"city"}


async def sample_with_seeds(num_seeds: int) -> list[list[str]]:
    """Return the terminal events of responses by a model that knows nothing."""
    async with serving(engine=tiny_engine()) as server, server.connect() as client:
        for seed in range(num_seeds):
            choice = "required" if seed % 2 else "auto"
            await client.create(seed=seed, max_output_tokens=seed % 7 + 1, tool_choice=choice)
        return ends(client)


async def test_whatever_is_sampled_a_response_ends_once() -> None:
    assert [len(events) for events in await sample_with_seeds(14)] == [1] * 14


@pytest.mark.slow
async def test_whatever_is_sampled_a_response_ends_once_with_many_seeds() -> None:
    assert [len(events) for events in await sample_with_seeds(140)] == [1] * 140
