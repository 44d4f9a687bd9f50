import asyncio
import logging
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.ledger import (
    APPLICATION_ID,
    JOURNAL_FILE,
    LEDGER_FILE,
    Ledger,
    LedgerError,
    RunOpened,
    SegmentUsage,
    Total,
    read_totals,
)
from server.prices import Price
from tests.server.ledger_process import PRICES, Act, acts_of, read_told
from tests.server.test_journal import no_file_longer_than


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


_IN_MEMORY = Path("/dev/shm")
"""A disk would be waited for at each of thousands of steps, and makes no difference: what a process
has written before it is killed, the system has."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    with temporary_folder() as folder:
        yield folder


@pytest.fixture
def ledger(folder: Path, clock: Clock) -> Iterator[Ledger]:
    with closing(new_ledger(folder, clock=clock)) as ledger:
        yield ledger


def new_ledger(folder: Path, **options: Any) -> Ledger:
    return Ledger(folder, PRICES, **options)


def opened(run_id: str = "run_1", **changes: Any) -> RunOpened:
    run = RunOpened(
        run_id=run_id,
        key="ada",
        model="cheap",
        requested_model="default",
        design="append",
        created_at=1000,
    )
    return msgspec.structs.replace(run, **changes)


def usage(index: int = 0, **changes: Any) -> SegmentUsage:
    segment = SegmentUsage(
        index=index,
        input_tokens=100,
        cached_tokens=20,
        output_tokens=10,
        reasoning_tokens=3,
        seconds=0.5,
    )
    return msgspec.structs.replace(segment, **changes)


COST = 80 * 100 + 20 * 10 + 10 * 400  # of one such segment, at nano-dollars per token


def play(ledger: Ledger, run: RunOpened, num_segments: int = 1) -> None:
    """Have a run begin and end."""
    for index in range(num_segments):
        ledger.segment(run, usage(index))
    ledger.finish(run, "completed")


def query(folder: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        return database.execute(statement).fetchall()


def run_ids(folder: Path) -> list[str]:
    """Return the runs in the order in which they were written."""
    return [run_id for (run_id,) in query(folder, "SELECT run_id FROM runs ORDER BY rowid")]


# --- Rows ----------------------------------------------------------------------------------------


async def test_a_run_has_a_row_and_each_segment_one(ledger: Ledger, folder: Path) -> None:
    run = opened()
    ledger.segment(run, usage(0))
    ledger.segment(run, usage(1, input_tokens=40, cached_tokens=40, seconds=0.25))

    ledger.finish(run, "incomplete")
    await ledger.settled()

    cost = COST + 40 * 10 + 10 * 400
    assert query(folder, "SELECT * FROM runs") == [
        (
            *("run_1", "ada", "cheap", "default", "append", "incomplete", 1000, 1_000_000.0),
            *(2, 140, 60, 20, 6, 0.75, cost, False),
        )
    ]
    assert query(folder, "SELECT * FROM segments") == [
        ("run_1", 0, 100, 20, 10, 3, 0.5),
        ("run_1", 1, 40, 40, 10, 3, 0.25),
    ]


async def test_a_run_without_segments_has_a_row(ledger: Ledger, folder: Path) -> None:
    ledger.finish(opened(), "failed")
    await ledger.settled()

    assert query(folder, "SELECT status, num_segments, cost_nanodollars FROM runs") == [
        ("failed", 0, 0)
    ]


async def test_a_run_that_is_not_over_has_none(ledger: Ledger, folder: Path) -> None:
    ledger.segment(opened(), usage())
    await ledger.settled()

    assert run_ids(folder) == []


async def test_rows_are_written_in_the_order_in_which_runs_end(
    ledger: Ledger, folder: Path
) -> None:
    for number in range(5):
        ledger.segment(opened(f"run_{number}"), usage())

    for number in (3, 1, 4, 0, 2):
        ledger.finish(opened(f"run_{number}"), "completed")
    await ledger.settled()

    assert run_ids(folder) == ["run_3", "run_1", "run_4", "run_0", "run_2"]


async def test_what_is_told_twice_counts_once(ledger: Ledger, folder: Path) -> None:
    run = opened()
    ledger.segment(run, usage(0))
    ledger.segment(run, usage(0))
    ledger.finish(run, "completed")

    ledger.finish(run, "failed")
    await ledger.settled()

    assert query(folder, "SELECT status, num_segments FROM runs") == [("completed", 1)]


async def test_what_a_model_without_price_costs_is_not_known(ledger: Ledger) -> None:
    play(ledger, opened("run_1", model="dear"))

    (total,) = await ledger.totals()

    assert total.cost_nanodollars is None
    assert total.num_unpriced_runs == 1


async def test_what_a_run_cost_does_not_change_with_the_prices(folder: Path) -> None:
    with closing(new_ledger(folder)) as ledger:
        play(ledger, opened("run_1"))

    with closing(Ledger(folder, {})) as ledger:
        play(ledger, opened("run_2"))
        (total,) = await ledger.totals()

    assert total.cost_nanodollars == COST
    assert total.num_unpriced_runs == 1


# --- Totals --------------------------------------------------------------------------------------


async def test_totals_are_by_key_and_model(ledger: Ledger) -> None:
    play(ledger, opened("run_1"), num_segments=2)
    play(ledger, opened("run_2"))
    play(ledger, opened("run_3", model="dear"))
    play(ledger, opened("run_4", key=""))

    assert await ledger.totals() == [
        Total("", "cheap", 1, 1, 100, 20, 10, 3, COST, 0, False),
        Total("ada", "cheap", 2, 3, 300, 60, 30, 9, 3 * COST, 0, False),
        Total("ada", "dear", 1, 1, 100, 20, 10, 3, None, 1, False),
    ]


async def test_totals_can_be_had_of_one_key_and_since_a_time(ledger: Ledger) -> None:
    play(ledger, opened("run_1", created_at=1000))
    play(ledger, opened("run_2", created_at=2000))
    play(ledger, opened("run_3", key="", created_at=3000))

    assert [total.num_runs for total in await ledger.totals(key="ada")] == [2]
    assert [total.num_runs for total in await ledger.totals(key="")] == [1]
    assert [total.num_runs for total in await ledger.totals(key="ada", since=2000)] == [1]
    assert [total.num_runs for total in await ledger.totals(since=2000)] == [1, 1]
    assert await ledger.totals(key="bob") == []


async def test_totals_can_be_read_beside_the_process_that_writes(
    ledger: Ledger, folder: Path
) -> None:
    play(ledger, opened("run_1"))
    totals = await ledger.totals()

    assert read_totals(folder) == totals
    play(ledger, opened("run_2"))
    assert await ledger.totals(since=1000) == read_totals(folder, key="ada", since=1000)


def test_totals_of_a_folder_without_ledger_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.sqlite"):
        read_totals(tmp_path)

    assert list(tmp_path.iterdir()) == []


# --- A file that is locked -----------------------------------------------------------------------


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have another connection write."""
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield


async def test_while_the_file_is_locked_runs_go_on_and_none_is_lost(
    ledger: Ledger, folder: Path
) -> None:
    names = [f"run_{number}" for number in range(100)]
    with locked(folder):
        for name in names:
            play(ledger, opened(name))  # it returns, though the lock is held until all have

        assert run_ids(folder) == []

    await ledger.settled()
    assert run_ids(folder) == names


async def test_what_could_not_be_written_is_written_with_the_next(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(new_ledger(folder, busy_seconds=0)) as ledger:
        with locked(folder):
            play(ledger, opened("run_1"))
            with pytest.raises(LedgerError, match="locked"):
                await ledger.settled()
            with pytest.raises(LedgerError, match="locked"):
                await ledger.totals()

        play(ledger, opened("run_2"))

    assert run_ids(folder) == ["run_1", "run_2"]
    assert "runs are not in the ledger yet" in caplog.text


async def test_what_cannot_be_written_before_the_end_is_written_by_the_next_process(
    folder: Path,
) -> None:
    with locked_after_opening(folder) as ledger:
        ledger.segment(opened("endless"), usage())
        play(ledger, opened("run_2"))
        play(ledger, opened("run_1"))
        ledger.close()
    assert run_ids(folder) == []

    new_ledger(folder).close()

    assert run_ids(folder) == ["run_2", "run_1", "endless"]


@contextmanager
def locked_after_opening(folder: Path) -> Iterator[Ledger]:
    ledger = new_ledger(folder, busy_seconds=0)
    with locked(folder):
        yield ledger


async def test_whoever_waits_can_be_cancelled_and_nothing_is_lost(
    ledger: Ledger, folder: Path
) -> None:
    with locked(folder):
        play(ledger, opened())
        waiting = asyncio.ensure_future(ledger.settled())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    await ledger.settled()
    assert run_ids(folder) == ["run_1"]


# --- A disk that is full -------------------------------------------------------------------------


async def test_a_run_goes_on_without_the_journal_and_is_counted_as_at_risk(
    ledger: Ledger, folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    run = opened()
    with no_file_longer_than(10):
        ledger.segment(run, usage(0))
        ledger.segment(run, usage(1))
        assert ledger.num_lost == 2
        assert len(caplog.records) == 1
        clock.now += 60
        ledger.segment(run, usage(2))
    assert ledger.num_lost == 3
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2

    ledger.finish(run, "completed")
    await ledger.settled()

    assert query(folder, "SELECT count(*) FROM segments") == [(3,)]
    assert ledger.num_lost == 3


async def test_when_there_is_room_again_the_journal_is_made_whole(
    ledger: Ledger, folder: Path, tmp_path: Path
) -> None:
    with no_file_longer_than(10):
        ledger.segment(opened("run_1"), usage())
    play(ledger, opened("run_2"))
    await ledger.settled()

    left = left_by_death(folder, tmp_path)
    new_ledger(left).close()

    assert query(left, "SELECT run_id, status, num_segments FROM runs") == [
        ("run_2", "completed", 1),
        ("run_1", "interrupted", 1),
    ]


# --- The next process ----------------------------------------------------------------------------


def left_by_death(folder: Path, tmp_path: Path) -> Path:
    """Return a folder as it would be if the process that keeps this one died now."""
    return Path(shutil.copytree(folder, tmp_path / "left"))


def test_a_run_that_had_no_end_was_interrupted_with_the_segments_it_had(folder: Path) -> None:
    with closing(new_ledger(folder)) as ledger:
        ledger.segment(opened(), usage(0))
        ledger.segment(opened(), usage(1))

    new_ledger(folder).close()

    assert query(folder, "SELECT run_id, status, num_segments, cost_nanodollars FROM runs") == [
        ("run_1", "interrupted", 2, 2 * COST)
    ]


async def test_a_long_journal_is_rewritten_with_the_runs_that_have_no_row(
    folder: Path, tmp_path: Path
) -> None:
    names = [f"run_{number}" for number in range(20)]
    with closing(new_ledger(folder, journal_bytes=2000)) as ledger:
        ledger.segment(opened("suspended"), usage(0))
        for name in names:
            play(ledger, opened(name))
            await ledger.settled()
        assert (folder / JOURNAL_FILE).stat().st_size < 3000
        left = left_by_death(folder, tmp_path)

    new_ledger(left).close()

    assert run_ids(left) == [*names, "suspended"]
    assert query(left, "SELECT count(*) FROM segments") == [(21,)]


class WatchedPrices(Mapping[str, Price]):
    """Prices that call a function when one is looked up: when a run is about to have its row."""

    def __init__(self, on_lookup: Callable[[], object]) -> None:
        self._on_lookup = on_lookup

    def __getitem__(self, model: str) -> Price:
        self._on_lookup()
        return PRICES[model]

    def __iter__(self) -> Iterator[str]:
        return iter(PRICES)

    def __len__(self) -> int:
        return len(PRICES)


async def test_a_run_that_ends_while_others_are_written_stays_in_a_rewritten_journal(
    folder: Path, tmp_path: Path
) -> None:
    on_lookups: list[Callable[[], object]] = [
        lambda: play(keeper, opened("run_2")),
        lambda: left_by_death(folder, tmp_path),
    ]
    prices = WatchedPrices(lambda: on_lookups.pop(0)())
    keeper = Ledger(folder, prices, journal_bytes=1)

    with closing(keeper):
        play(keeper, opened("run_1"))
        await keeper.settled()
        await keeper.settled()  # the second, too

    new_ledger(tmp_path / "left").close()

    assert run_ids(tmp_path / "left") == ["run_1", "run_2"]


def test_a_damaged_journal_is_read_as_far_as_can_be_and_kept(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(new_ledger(folder)) as ledger:
        for name in ("run_1", "run_2", "run_3"):
            ledger.segment(opened(name), usage())
    journal = folder / JOURNAL_FILE
    damaged = journal.read_bytes().replace(b"run_2", b"run_9")[:-1]
    journal.write_bytes(damaged)

    new_ledger(folder).close()

    assert run_ids(folder) == ["run_1"]
    assert "1 damaged lines" in caplog.text
    assert "has no end" in caplog.text
    assert (folder / f"{JOURNAL_FILE}.damaged").read_bytes() == damaged
    assert journal.read_bytes() == b""


def journal_of_many_runs() -> tuple[bytes, dict[str, set[int]]]:
    """Return a journal, and the segments that its runs have."""
    segments = {f"run_{number}": set(range(number % 4)) for number in range(12)}
    with temporary_folder() as folder, closing(new_ledger(folder)) as ledger:
        for name, indexes in segments.items():
            for index in indexes:
                ledger.segment(opened(name), usage(index))
            if name != "run_7":
                ledger.finish(opened(name), "completed")
        return (folder / JOURNAL_FILE).read_bytes(), segments


WHOLE, SEGMENTS = journal_of_many_runs()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, len(WHOLE)),
    length=st.integers(0, 600),
    replacement=st.binary(max_size=600) | st.integers(0, len(WHOLE)).map(lambda at: WHOLE[at:]),
    end=st.integers(0, 2 * len(WHOLE)),
)
def test_whatever_becomes_of_the_journal_no_run_is_made_up_or_counted_twice(
    start: int, length: int, replacement: bytes, end: int
) -> None:
    damaged = (WHOLE[:start] + replacement + WHOLE[start + length :])[:end]
    with temporary_folder() as folder:
        (folder / JOURNAL_FILE).write_bytes(damaged)

        new_ledger(folder).close()

        found = run_ids(folder)
        segments = query(folder, "SELECT run_id, number FROM segments")
        costs = query(folder, "SELECT run_id, cost_nanodollars FROM runs")
    assert max(Counter(found).values(), default=1) == 1
    assert set(found) <= SEGMENTS.keys()
    assert all(number in SEGMENTS[run_id] for run_id, number in segments)
    num_segments = Counter(run_id for run_id, _ in segments)
    assert all(cost == num_segments[run_id] * COST for run_id, cost in costs)


# --- Death at each step --------------------------------------------------------------------------


def accounts_of(acts: Sequence[Act]) -> dict[str, tuple[str, int, list[int]]]:
    """Return what is known of each run after ``acts``: its status, cost and segments."""
    accounts: dict[str, tuple[str, int, list[int]]] = {}
    for act in acts:
        _, cost, segments = accounts.get(act.run_id, ("", 0, []))
        if act.usage is None:
            accounts[act.run_id] = ("completed", cost, segments)
        else:
            cost += PRICES["cheap"].cost(
                act.usage.input_tokens, act.usage.cached_tokens, act.usage.output_tokens
            )
            accounts[act.run_id] = ("interrupted", cost, [*segments, act.usage.index])
    return accounts


def accounts_in(folder: Path) -> dict[str, tuple[str, int, list[int]]]:
    """Open a ledger and close it, and return what it says of each run."""
    new_ledger(folder).close()
    segments = query(folder, "SELECT run_id, number FROM segments ORDER BY number")
    return {
        run_id: (status, cost, [number for of_run, number in segments if of_run == run_id])
        for run_id, status, cost in query(
            folder, "SELECT run_id, status, cost_nanodollars FROM runs"
        )
    }


def die_at_each_step(parent: Path, *left_by_another: Path) -> list[Path]:
    """Return the folders of processes that died at one step after the other."""
    parent.mkdir()
    subprocess.run(
        [sys.executable, "-m", "tests.server.ledger_process", parent, *left_by_another], check=True
    )
    folders = [path for path in parent.iterdir() if path.is_dir()]
    return sorted(folders, key=lambda folder: int(folder.name))


@pytest.mark.slow
def test_wherever_a_process_is_killed_each_run_and_segment_counts_once(quick_folder: Path) -> None:
    acts = acts_of("first")
    folders = die_at_each_step(quick_folder / "first")

    steps = Counter(read_told(folder).step for folder in folders)
    assert steps.keys() >= {"write", "half a write", "INSERT", "COMMIT", "fsync", "replace"}
    assert steps[None] == 1
    for folder in folders:
        told = read_told(folder)
        # What was being told when the process died may count or not; all that came before does.
        possible = [accounts_of(acts[: told.num_acts]), accounts_of(acts[: told.num_acts + 1])]
        found = accounts_in(folder)
        assert found in possible, told
        assert accounts_in(folder) == found, told


@pytest.mark.slow
def test_wherever_a_process_is_killed_that_takes_over_each_run_counts_once(
    quick_folder: Path,
) -> None:
    folders = die_at_each_step(quick_folder / "first")
    # With rows, a finished run that has none, and one that is open.
    left = [folder for folder in folders if read_told(folder).step == "INSERT"][-1]
    expected = accounts_in(Path(shutil.copytree(left, quick_folder / "expected")))
    acts = acts_of("second")

    for folder in die_at_each_step(quick_folder / "second", left):
        told = read_told(folder)
        possible = [accounts_of(acts[: told.num_acts]), accounts_of(acts[: told.num_acts + 1])]
        found = accounts_in(folder)
        assert found in [expected | accounts for accounts in possible], told
        assert accounts_in(folder) == found, told


# --- The files -----------------------------------------------------------------------------------


def test_the_files_are_for_the_eyes_of_their_owner(folder: Path, ledger: Ledger) -> None:
    play(ledger, opened())

    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_has_one_owner_at_a_time(folder: Path) -> None:
    with closing(new_ledger(folder)):
        with pytest.raises(LedgerError, match="in use") as raised:
            new_ledger(folder)
        assert str(folder) in str(raised.value)

    new_ledger(folder).close()


def write_garbage(folder: Path) -> None:
    (folder / LEDGER_FILE).write_bytes(b"This was once a text about the weather in Oslo. " * 100)


def overwrite_pages(folder: Path) -> None:
    with closing(new_ledger(folder)) as ledger:
        for number in range(300):
            play(ledger, opened(f"run_{number}"))
    data = bytearray((folder / LEDGER_FILE).read_bytes())
    data[4096:40000] = b"\xff" * (40000 - 4096)
    (folder / LEDGER_FILE).write_bytes(data)


def make_foreign(folder: Path) -> None:
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")


def make_newer(folder: Path) -> None:
    new_ledger(folder).close()
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        database.execute("PRAGMA user_version = 99")


def make_folder(folder: Path) -> None:
    (folder / LEDGER_FILE).mkdir()


def make_folder_of_journal(folder: Path) -> None:
    (folder / JOURNAL_FILE).mkdir()


OLDER_SCHEMA = """
CREATE TABLE runs (
    run_id TEXT NOT NULL PRIMARY KEY,
    key TEXT NOT NULL,
    model TEXT NOT NULL,
    requested_model TEXT NOT NULL,
    design TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    finished_at REAL NOT NULL,
    num_segments INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL,
    seconds REAL NOT NULL,
    cost_nanodollars INTEGER
);
CREATE INDEX runs_by_key ON runs (key, created_at);
CREATE INDEX runs_by_age ON runs (created_at);
CREATE TABLE segments (
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (run_id, number)
) WITHOUT ROWID;
"""


def make_older(folder: Path) -> None:
    """Leave what the first version of this program did: one run, and no mark of simulated ones."""
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        database.executescript(
            f"{OLDER_SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 1;"
            "INSERT INTO runs VALUES ('run_old', 'ada', 'cheap', 'default', 'append', 'completed',"
            " 1000, 1001.0, 1, 100, 20, 10, 3, 0.5, 7);"
        )


def test_a_file_of_the_version_before_can_be_read_as_it_is(tmp_path: Path) -> None:
    make_older(tmp_path)

    [total] = read_totals(tmp_path)

    assert (total.model, total.num_runs, total.is_simulated) == ("cheap", 1, False)
    assert query(tmp_path, "PRAGMA user_version") == [(1,)]


def test_a_file_of_the_version_before_becomes_one_of_this(tmp_path: Path) -> None:
    make_older(tmp_path)
    new_ledger(tmp_path / "new").close()

    for number in range(2):
        with closing(new_ledger(tmp_path)) as ledger:
            play(ledger, opened(f"run_{number}", is_simulated=True))

    assert run_ids(tmp_path) == ["run_old", "run_0", "run_1"]
    assert query(tmp_path, "SELECT is_simulated FROM runs") == [(0,), (1,), (1,)]
    for pragma in ("user_version", "table_info(runs)"):
        assert query(tmp_path, f"PRAGMA {pragma}") == query(tmp_path / "new", f"PRAGMA {pragma}")


async def test_runs_that_were_simulated_are_not_added_to_others(
    ledger: Ledger, folder: Path
) -> None:
    play(ledger, opened("run_1"))
    play(ledger, opened("run_2", is_simulated=True), num_segments=2)

    totals = await ledger.totals()

    assert [(total.is_simulated, total.num_segments) for total in totals] == [(False, 1), (True, 2)]


BAD_FILES = {
    "garbage": (write_garbage, "it is damaged"),
    "overwritten": (overwrite_pages, "it is damaged"),
    "foreign": (make_foreign, "another program"),
    "newer": (make_newer, "version 99"),
    "a folder": (make_folder, "cannot open"),
    "a folder in the place of the journal": (make_folder_of_journal, "cannot open"),
}


@pytest.mark.parametrize(("spoil", "why"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    spoil(tmp_path)

    for _ in range(2):  # and is let go of
        with pytest.raises(LedgerError, match=why) as raised:
            new_ledger(tmp_path)

        assert str(tmp_path) in str(raised.value)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(LedgerError, match="cannot open"):
        new_ledger(tmp_path / "file")


def test_a_refused_file_and_its_journal_are_left_as_they_were(tmp_path: Path) -> None:
    make_foreign(tmp_path)
    (tmp_path / JOURNAL_FILE).write_bytes(WHOLE)

    with pytest.raises(LedgerError):
        new_ledger(tmp_path)

    assert query(tmp_path, "PRAGMA application_id") != [(APPLICATION_ID,)]
    assert (tmp_path / JOURNAL_FILE).read_bytes() == WHOLE


def test_a_foreign_file_is_not_read(tmp_path: Path) -> None:
    make_foreign(tmp_path)

    with pytest.raises(LedgerError, match="another program"):
        read_totals(tmp_path)
