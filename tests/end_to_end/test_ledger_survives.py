"""What clients were told of usage is what the books say, however the process ends."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import httpx2
import pytest
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as async_connect
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from protocol.codec import decode_object
from server.ledger import LEDGER_FILE, read_totals
from tests.end_to_end.process import START_SECONDS, ServerProcess, started
from tests.server.running import CLOSING, TERMINAL, calls_in, output, until

pytestmark = pytest.mark.slow

Event: TypeAlias = dict[str, Any]

NUM_CALLS = 2
TOOL: Event = {"type": "function", "name": "look", "parameters": {"type": "object"}}
BODY: Event = {"input": "Look around.", "tools": [TOOL]}
ANSWERED: Event = {
    "input": [
        {"role": "user", "content": "Look around."},
        {"role": "assistant", "content": "A tree."},
        {"role": "user", "content": "And behind it?"},
        {"role": "assistant", "content": "A hill."},
        {"role": "user", "content": "What do you make of it?"},
    ],
    "tools": [TOOL],
}
"""Asks for the answer at once: the model takes what was said for its ``NUM_CALLS`` turns."""


# --- What is told, and what is written -----------------------------------------------------------


class Tokens(NamedTuple):
    """What some segments took."""

    num_segments: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def plus(self, usage: Event) -> "Tokens":
        """Return the sum with what an event says of one more segment."""
        return Tokens(
            self.num_segments + 1,
            self.input_tokens + usage["input_tokens"],
            self.cached_tokens + usage["input_tokens_details"]["cached_tokens"],
            self.output_tokens + usage["output_tokens"],
        )


@dataclass
class Told:
    """What clients were told of their runs, by run."""

    tokens: dict[str, Tokens] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    num_closings: int = 0

    def take(self, event: Event) -> None:
        """Take note of an event that closes a segment; any other says nothing of usage."""
        if event["type"] in CLOSING:
            self.close(event["response"], is_finished=event["type"] in TERMINAL)

    def close(self, response: Event, *, is_finished: bool) -> None:
        """Take note of a response as it is at the end of a segment."""
        run_id = response["id"]
        assert run_id not in self.finished, "a run ends once"
        self.num_closings += 1
        self.tokens[run_id] = self.tokens.get(run_id, Tokens()).plus(response["usage"])
        if is_finished:
            self.finished.add(run_id)


@dataclass(frozen=True)
class Row:
    """A run as the books have it."""

    status: str
    tokens: Tokens


def rows_in(folder: Path) -> dict[str, Row]:
    """Return the runs that are in the books."""
    columns = "run_id, status, num_segments, input_tokens, cached_tokens, output_tokens"
    with closing(sqlite3.connect(f"file:{folder / LEDGER_FILE}?mode=ro", uri=True)) as database:
        rows = database.execute(f"SELECT {columns} FROM runs").fetchall()
    return {run_id: Row(status, Tokens(*counts)) for run_id, status, *counts in rows}


def total_in(folder: Path) -> tuple[int, Tokens]:
    """Return how many runs there were and what they took, as the ledger adds it up."""
    (total,) = read_totals(folder)
    return total.num_runs, Tokens(
        total.num_segments, total.input_tokens, total.cached_tokens, total.output_tokens
    )


def total_printed(folder: Path) -> tuple[int, Tokens]:
    """Return the same as ``scripts/usage`` prints it."""
    printed = subprocess.run(
        [sys.executable, "-m", "scripts.usage", "--json", "--data-dir", str(folder)],
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    (total,) = json.loads(printed.stdout)
    return total["num_runs"], Tokens(*(total[name] for name in Tokens._fields))


def sum_of(tokens: Sequence[Tokens]) -> Tokens:
    return Tokens(*map(sum, zip(*tokens, strict=True)))


# --- The server and its clients ------------------------------------------------------------------


def simulated(tmp_path: Path, name: str, data: Path, *options: str) -> Any:
    """Start a server that simulates a model with ``NUM_CALLS`` turns of calls and an answer."""
    simulation = ["--simulate-calls", str(NUM_CALLS), "--simulate-tool", TOOL["name"]]
    arguments = [*simulation, "--kv-memory", "0.25", "--data-dir", str(data), *options]
    return started(tmp_path / name, *arguments)


@contextmanager
def restarted(tmp_path: Path, data: Path) -> Iterator[ServerProcess]:
    """Start a server where another has died, and wait until it has taken over."""
    with simulated(tmp_path, "restarted", data, "--simulate", "0") as server:
        server.wait_until_it_listens()
        yield server


class Client:
    """One WebSocket, which keeps what it is told in the books of all."""

    def __init__(self, socket: Connection, told: Told) -> None:
        self._socket = socket
        self._told = told

    def send(self, event_type: str, **members: Any) -> None:
        self._socket.send(json.dumps({"type": event_type} | members))

    def up_to(self, *event_types: str) -> list[Event]:
        """Return the events up to the first of these types."""
        events: list[Event] = []
        while not events or events[-1]["type"] not in event_types:
            events.append(decode_object(self._socket.recv(timeout=60)))
            assert events[-1]["type"] != "error", events[-1]
            self._told.take(events[-1])
        return events

    def segments(self, count: int) -> list[Event]:
        """Have a response make so many calls, all but the last of which are answered, in the append
        dialect, and return the events of the last segment."""
        self.send("response.create", **BODY)
        events = self.up_to("response.done")
        for _ in range(count - 1):
            self.answer(events)
            events = self.up_to("response.done")
        return events

    def answer(self, events: Sequence[Event]) -> None:
        """Append the outputs of the calls among ``events``."""
        self.send("response.append", input=[output(call, "a tree") for call in calls_in(events)])


@contextmanager
def connected(server: ServerProcess, dialect: str, told: Told) -> Iterator[Client]:
    url = f"ws://127.0.0.1:{server.port}/v1/responses?dialect={dialect}"
    # Nobody answers pings here while somebody else is waited for.
    with connect(url, max_size=None, ping_interval=None) as socket:
        yield Client(socket, told)


# --- A process that is killed --------------------------------------------------------------------


class Killed(NamedTuple):
    """What a process left that was killed, once another has taken over."""

    told: Told
    rows: dict[str, Row]
    ids: dict[str, str]
    """Of the runs, by what they were doing."""
    total: tuple[int, Tokens]
    printed: tuple[int, Tokens]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Kill a server while its runs are in every state there is, and start another."""
    folder = tmp_path_factory.mktemp("killed")
    data, told, ids = folder / "data", Told(), dict[str, str]()
    pace = ("--simulate", "100", "--simulate-words", "3000")
    with ExitStack() as stack:
        server = stack.enter_context(simulated(folder, "killed", data, *pace))
        server.wait_until_it_listens()

        def client(dialect: str) -> Client:
            return stack.enter_context(connected(server, dialect, told))

        for count in (1, NUM_CALLS):
            events = client("append").segments(count)
            ids[f"suspended after {count}"] = events[-1]["response"]["id"]

        injected = client("inject")
        injected.send("response.create", **BODY)
        first, *_ = injected.up_to("response.output_item.done")
        ids["waiting for an injection"] = first["response"]["id"]

        resumed = client("append")
        events = resumed.segments(NUM_CALLS)
        resumed.answer(events)
        resumed.up_to("response.output_text.delta")
        ids["sampled after suspensions"] = events[-1]["response"]["id"]

        sampled = client("chained")
        sampled.send("response.create", **ANSWERED)
        events = sampled.up_to("response.output_text.delta")
        ids["sampled"] = events[0]["response"]["id"]

        completed = client("chained")
        completed.send("response.create", **BODY)
        events = completed.up_to("response.completed")
        server.send(signal.SIGKILL)
        ids["completed"] = events[-1]["response"]["id"]
        server.wait()
    with restarted(folder, data):
        return Killed(told, rows_in(data), ids, total_in(data), total_printed(data))


def test_a_run_that_was_completed_has_what_its_client_was_told(killed: Killed) -> None:
    run_id = killed.ids["completed"]

    assert killed.rows[run_id] == Row("completed", killed.told.tokens[run_id])


@pytest.mark.parametrize("count", [1, NUM_CALLS])
def test_a_run_that_was_suspended_is_interrupted_with_the_segments_it_had(
    killed: Killed, count: int
) -> None:
    run_id = killed.ids[f"suspended after {count}"]

    assert killed.rows[run_id] == Row("interrupted", killed.told.tokens[run_id])
    assert killed.rows[run_id].tokens.num_segments == count


def test_a_run_that_had_gone_on_is_interrupted_with_the_segments_before(killed: Killed) -> None:
    run_id = killed.ids["sampled after suspensions"]

    assert killed.rows[run_id] == Row("interrupted", killed.told.tokens[run_id])
    assert killed.rows[run_id].tokens.num_segments == NUM_CALLS


def test_a_run_that_was_in_its_first_segment_has_no_row(killed: Killed) -> None:
    assert killed.ids["sampled"] not in killed.rows
    assert killed.ids["sampled"] not in killed.told.tokens


def test_a_segment_of_which_no_event_tells_counts(killed: Killed) -> None:
    row = killed.rows[killed.ids["waiting for an injection"]]

    assert row.status == "interrupted"
    assert row.tokens.num_segments == 1


def test_the_totals_are_the_sum_of_what_was_told(killed: Killed) -> None:
    untold = killed.rows[killed.ids["waiting for an injection"]].tokens

    expected = sum_of([*killed.told.tokens.values(), untold])
    assert killed.total == (5, expected)
    assert killed.printed == killed.total


# --- Many short runs -----------------------------------------------------------------------------

NUM_CLIENTS = 4
"""Of each kind."""


async def append_runs(port: int, told: Told) -> None:
    """Hold runs in the append dialect, one after the other, until the server is gone."""
    async with async_socket(port, "append") as socket:
        while True:
            await socket.send(json.dumps({"type": "response.create"} | BODY))
            while calls := calls_in(await async_segment(socket, told)):
                items = [output(call, "a tree") for call in calls]
                await socket.send(json.dumps({"type": "response.append", "input": items}))


async def chained_runs(port: int, told: Told) -> None:
    """Ask for one response after the other on a connection, until the server is gone."""
    async with async_socket(port, "chained") as socket:
        while True:
            await socket.send(json.dumps({"type": "response.create"} | BODY))
            await async_segment(socket, told)


async def http_runs(port: int, told: Told) -> None:
    """Ask for one response after the other over HTTP, until the server is gone."""
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", verify=False, trust_env=False, timeout=60
    ) as http:
        while True:
            answer = await http.post("/v1/responses", json=BODY)
            told.close(answer.json(), is_finished=True)


@asynccontextmanager
async def async_socket(port: int, dialect: str) -> AsyncIterator[AsyncConnection]:
    url = f"ws://127.0.0.1:{port}/v1/responses?dialect={dialect}"
    async with async_connect(url, max_size=None) as socket:
        yield socket


async def async_segment(socket: AsyncConnection, told: Told) -> list[Event]:
    """Return the events of a segment."""
    events: list[Event] = []
    while not events or events[-1]["type"] not in CLOSING:
        events.append(decode_object(await socket.recv()))
        told.take(events[-1])
    return events


async def crowd(server: ServerProcess, told: Told, num_closings: int) -> None:
    """Have many clients at a server, and kill it when they have been told so much."""
    enough = told.num_closings + num_closings
    runs = (append_runs, chained_runs, http_runs)
    clients = [
        asyncio.ensure_future(run(server.port, told)) for run in runs for _ in range(NUM_CLIENTS)
    ]
    await until(lambda: told.num_closings >= enough)
    assert not any(client.done() for client in clients)
    server.send(signal.SIGKILL)
    # What was sent before the server died is still read.
    outcomes = await asyncio.gather(*clients, return_exceptions=True)
    assert all(isinstance(end, ConnectionClosed | httpx2.TransportError) for end in outcomes)


async def test_of_many_runs_each_counts_once_whichever_were_cut_off(tmp_path: Path) -> None:
    data, told = tmp_path / "data", Told()
    options = ("--simulate", "0", "--simulate-words", "5")
    for number in range(2):
        with simulated(tmp_path, f"killed{number}", data, *options) as server:
            server.wait_until_it_listens()
            await crowd(server, told, num_closings=60)
            server.wait()
    with restarted(tmp_path, data):
        rows, total = rows_in(data), total_in(data)

    for run_id in told.finished:
        assert rows[run_id] == Row("completed", told.tokens[run_id])
    cut = told.tokens.keys() - told.finished
    for run_id in cut:
        told_segments, written = told.tokens[run_id].num_segments, rows[run_id].tokens.num_segments
        assert written == told_segments + 1 or rows[run_id].tokens == told.tokens[run_id]
    # Of those that were being sampled, the end may have been written and not have been told.
    unknown = rows.keys() - told.tokens.keys()
    assert len(cut) + len(unknown) <= 2 * len((append_runs, chained_runs, http_runs)) * NUM_CLIENTS
    assert {row.status for row in rows.values()} <= {"completed", "interrupted"}
    assert total == (len(rows), sum_of([row.tokens for row in rows.values()]))


# --- A process that is asked to end --------------------------------------------------------------


def test_a_process_that_is_asked_to_end_interrupts_nothing(tmp_path: Path) -> None:
    data, told = tmp_path / "data", Told()
    options = ("--simulate", "100", "--simulate-words", "100", "--drain", "60")
    with simulated(tmp_path, "asked", data, *options) as server:
        server.wait_until_it_listens()
        with (
            connected(server, "append", told) as suspended,
            connected(server, "chained", told) as sampled,
        ):
            events = suspended.segments(NUM_CALLS)
            sampled.send("response.create", **ANSWERED)
            sampled.up_to("response.output_text.delta")
            server.send(signal.SIGTERM)
            last = sampled.up_to("response.completed")
            server.wait()
    rows = rows_in(data)
    with restarted(tmp_path, data):
        rows_after = rows_in(data)

    assert (
        rows
        == rows_after
        == {
            events[-1]["response"]["id"]: Row(
                "cancelled", told.tokens[events[-1]["response"]["id"]]
            ),
            last[-1]["response"]["id"]: Row("completed", told.tokens[last[-1]["response"]["id"]]),
        }
    )


@pytest.mark.parametrize("option", ["--store", "--no-store"])
def test_a_second_server_on_the_same_folder_says_so_and_ends(tmp_path: Path, option: str) -> None:
    data = tmp_path / "data"
    with simulated(tmp_path, "first", data, "--simulate", "0", option) as first:
        first.wait_until_it_listens()
        with simulated(tmp_path, "second", data, "--simulate", "0", option) as second:
            status = second.wait(START_SECONDS)

        *_, line = second.stderr.splitlines()
        assert status == 1
        assert second.stdout == ""
        assert line.startswith("server: ")
        assert str(data) in line
        assert "--data-dir" in line
