"""What is done after a response overlaps with what its client does next.

The thread that writes to the disk is held, or its file is locked. Whatever the client does, it does
not wait for that; and once the thread goes on, all is there, in order.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from protocol.codec import encode
from server.ledger import LEDGER_FILE, read_totals
from server.response_store import MAX_UNWRITTEN, ResponseStore
from server.services import STORE_FILE
from server.settings import Settings
from tests.protocol.streams import new_response
from tests.sampler.runs import let_the_loop_turn
from tests.server.designs import SUSPENDED, Design, hold, post
from tests.server.models import OSLO
from tests.server.played_runs import stored
from tests.server.running import Event, serving, text_in, until

DEADLINE_SECONDS = 20.0
TTL_SECONDS = 1000.0

every_design = pytest.mark.parametrize("design", Design, ids=lambda design: design.value)


class HeldClock:
    """A clock that shows the time to nobody until it is released: who writes, waits."""

    def __init__(self) -> None:
        self._released = threading.Event()

    def __call__(self) -> float:
        assert self._released.wait(DEADLINE_SECONDS), "nobody released the clock"
        return time.time()

    def release(self) -> None:
        """Show the time from now on."""
        self._released.set()


@pytest.fixture
def clock() -> Iterator[HeldClock]:
    clock = HeldClock()
    yield clock
    clock.release()


@pytest.fixture
def held_store(clock: HeldClock, monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    """Have servers store nothing until the clock is released."""
    monkeypatch.setattr("server.services.ResponseStore", partial(ResponseStore, clock=clock))
    return clock


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, recent_responses=4)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let nobody else write to the ledger's file."""
    with closing(sqlite3.connect(folder / LEDGER_FILE, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def ids_stored(folder: Path) -> list[str]:
    """Return the ids of the responses in a store that is closed, in the order of their rows."""
    with closing(sqlite3.connect(folder / STORE_FILE)) as database:
        return [id_ for (id_,) in database.execute("SELECT id FROM responses ORDER BY row")]


def ids_in_ledger(folder: Path) -> list[str]:
    """Return the ids of the runs that have a row, in the order of their rows."""
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        return [id_ for (id_,) in database.execute("SELECT run_id FROM runs ORDER BY rowid")]


def ids_of(responses: list[Event], design: Design) -> list[str]:
    """Return the ids of the responses that a run was, in order."""
    ids = [response["id"] for response in responses]
    return ids[-1:] if design in SUSPENDED else ids


# --- The response store --------------------------------------------------------------------------


@every_design
async def test_no_turn_waits_for_an_earlier_one_to_be_stored(
    design: Design, held_store: HeldClock, settings: Settings, tmp_path: Path
) -> None:
    async with serving(OSLO, OSLO, "Sun.", settings=settings) as server:
        responses = await hold(server, design)  # nothing has been stored yet
        held_store.release()

    assert text_in(responses[-1]) == "Sun."
    assert ids_stored(tmp_path) == ids_of(responses, design)


async def test_the_next_run_of_a_connection_does_not_wait_for_the_one_before(
    held_store: HeldClock, settings: Settings, tmp_path: Path
) -> None:
    async with (
        serving("Sun.", settings=settings) as server,
        server.connect("append") as client,
    ):
        closing_events = [(await client.create())[-1] for _ in range(3)]
        held_store.release()

    assert [event["type"] for event in closing_events] == ["response.completed"] * 3
    assert ids_stored(tmp_path) == [event["response"]["id"] for event in closing_events]


async def test_who_asks_for_a_response_waits_until_it_is_stored(
    held_store: HeldClock, settings: Settings
) -> None:
    async with serving("Sun.", settings=settings) as server, server.http() as http:
        response = await post(server)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(http.get(f"/v1/responses/{response['id']}"))
            await until(lambda: server.num_requests > 0)
            await let_the_loop_turn()
            was_answered = asking.done()
            held_store.release()
        answer = asking.result()

    assert not was_answered
    assert answer.status_code == 200
    assert answer.json() == response


async def test_a_response_that_cannot_be_stored_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, settings: Settings
) -> None:
    def fail() -> float:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("server.services.ResponseStore", partial(ResponseStore, clock=fail))
    async with serving("Sun.", settings=settings) as server, server.connect() as client:
        first = (await client.create())[-1]["response"]
        second = (await client.create())[-1]["response"]

    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert [r["status"] for r in (first, second)] == ["completed", "completed"]
    assert messages == [
        f"response {response['id']} is not stored: disk I/O error" for response in (first, second)
    ]


async def test_who_stores_more_than_may_wait_waits(tmp_path: Path, clock: HeldClock) -> None:
    response = stored(new_response())
    with closing(ResponseStore(tmp_path / "store", TTL_SECONDS, clock)) as store:
        for _ in range(MAX_UNWRITTEN):
            await store.put_soon(response)
        async with asyncio.TaskGroup() as tasks:
            one_more = tasks.create_task(store.put_soon(response))
            await let_the_loop_turn()
            was_done = one_more.done()
            clock.release()
        found = await store.get(response.key, response.id)

    assert not was_done
    assert found == response


async def test_a_store_that_is_closed_has_written_all(tmp_path: Path, clock: HeldClock) -> None:
    path = tmp_path / STORE_FILE
    store = ResponseStore(path, TTL_SECONDS, clock)
    ids = [f"resp_{number}" for number in range(5)]
    for id_ in ids:
        await store.put_soon(stored(new_response(), id=id_))

    async with asyncio.TaskGroup() as tasks:
        closed = tasks.create_task(asyncio.to_thread(store.close))
        await let_the_loop_turn()
        was_closed = closed.done()
        clock.release()

    assert not was_closed
    assert ids_stored(tmp_path) == ids


# --- The ledger ----------------------------------------------------------------------------------


@every_design
async def test_no_turn_waits_for_an_earlier_one_to_be_accounted_for(
    design: Design, settings: Settings, tmp_path: Path
) -> None:
    async with serving(OSLO, OSLO, "Sun.", settings=settings) as server:
        with locked(tmp_path):
            responses = await hold(server, design)
            before = ids_in_ledger(tmp_path)

    assert text_in(responses[-1]) == "Sun."
    assert before == []
    assert ids_in_ledger(tmp_path) == ids_of(responses, design)


async def test_the_next_run_of_a_connection_does_not_wait_for_the_account_of_the_one_before(
    settings: Settings, tmp_path: Path
) -> None:
    async with (
        serving("Sun.", settings=settings) as server,
        server.connect("append") as client,
    ):
        with locked(tmp_path):
            closing_events = [(await client.create())[-1] for _ in range(3)]
            before = ids_in_ledger(tmp_path)
        await until(lambda: len(ids_in_ledger(tmp_path)) == 3)

    [total] = read_totals(tmp_path)
    assert before == []
    assert ids_in_ledger(tmp_path) == [event["response"]["id"] for event in closing_events]
    output_tokens = [event["response"]["usage"]["output_tokens"] for event in closing_events]
    assert total.output_tokens == sum(output_tokens)


# --- Both ----------------------------------------------------------------------------------------


async def test_a_server_that_ends_has_lost_nothing(
    held_store: HeldClock, settings: Settings, tmp_path: Path
) -> None:
    async with serving(OSLO, "Sun.", settings=settings) as server:
        with locked(tmp_path):
            chained, appended = await asyncio.gather(
                hold(server, Design.CHAINED), hold(server, Design.APPEND)
            )
        held_store.release()

    ids = [*ids_of(chained, Design.CHAINED), *ids_of(appended, Design.APPEND)]
    assert sorted(ids_stored(tmp_path)) == sorted(ids_in_ledger(tmp_path)) == sorted(ids)


async def test_what_is_stored_late_is_the_response_as_it_was_told(
    held_store: HeldClock, settings: Settings, tmp_path: Path
) -> None:
    async with (
        serving("Sun.", settings=settings) as server,
        server.connect() as client,
    ):
        last = (await client.create())[-1]
        [told] = client.streams
        held_store.release()

    with closing(ResponseStore(tmp_path / STORE_FILE, TTL_SECONDS)) as store:
        found = await store.get("", last["response"]["id"])
    assert found is not None
    assert found.response == encode(last["response"])
    assert found.events == [encode(event) for event in told]


@pytest.mark.parametrize("stage", ["ledger", "store"])
async def test_what_is_written_after_the_client_was_told_is_time_of_the_server_alone(
    stage: str, held_store: HeldClock, settings: Settings, tmp_path: Path
) -> None:
    name = f"suspend_stage_seconds_total{{{stage}}}"
    runs = f"suspend_stage_runs_total{{{stage}}}"
    async with (
        serving("Sun.", settings=settings) as server,
        server.connect("append") as client,
    ):
        with locked(tmp_path):
            await client.create()
            before = await server.metrics()
        held_store.release()

        async with asyncio.timeout(DEADLINE_SECONDS):
            while (after := await server.metrics())[name] <= before[name]:
                pass

    assert after[runs] == before[runs] == 1
