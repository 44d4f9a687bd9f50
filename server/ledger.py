"""What each run took and cost: one row per run, exactly once, whatever becomes of the process.

A run is told of in two places. The event loop appends to a journal what a segment took, before the
client hears of its end, and that the run is over; this waits for no disk. A thread takes runs that
are over, in order, into a SQLite file. It may be slow, or fail for a while: what is not in the file
is in the journal. At the start the journal is read again. What it tells of twice, or what is in the
file already, makes no difference, so it does not matter where the process before died. Runs that
it left without an end are accounted for with the segments they had, as ``interrupted``.
"""

import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
from filelock import FileLock, Timeout

from sampler.worker_thread import WorkerThread
from server.journal import MAX_BYTES, Journal, read_journal
from server.prices import Prices
from server.sqlite_file import (
    IN_USE,
    FileFormat,
    SqliteFileError,
    check_sqlite,
    open_sqlite,
    open_sqlite_read_only,
    unusable,
)
from server.work import Stage, Tallies

T = TypeVar("T")

logger = logging.getLogger(__name__)

LEDGER_FILE = "ledger.sqlite"
JOURNAL_FILE = "ledger.journal"
LOCK_FILE = "ledger.lock"

APPLICATION_ID = 0x73757363  # "susc", by which a file is known to be one of ours
SCHEMA_VERSION = 2
INTERRUPTED = "interrupted"
"""The status of a run whose process died before its end."""

_BUSY_SECONDS = 5.0
"""How long the thread waits for whoever else has locked the file, before it tries again later."""
_WARNING_INTERVAL_SECONDS = 60.0

_SCHEMA = """
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
    cost_nanodollars INTEGER,
    is_simulated INTEGER NOT NULL DEFAULT 0
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
_MIGRATIONS = {1: "ALTER TABLE runs ADD COLUMN is_simulated INTEGER NOT NULL DEFAULT 0;"}
_FORMAT = FileFormat(APPLICATION_ID, SCHEMA_VERSION, _SCHEMA, _MIGRATIONS)

_PUT_RUN = """
INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run_id) DO NOTHING
"""
_PUT_SEGMENT = "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)"

_TOTALS = """
SELECT key, model, count(*), sum(num_segments), sum(input_tokens), sum(cached_tokens),
    sum(output_tokens), sum(reasoning_tokens), sum(cost_nanodollars), sum(cost_nanodollars IS NULL),
    {is_simulated} AS simulated
FROM runs WHERE (:key IS NULL OR key = :key) AND created_at >= :since
GROUP BY key, model, simulated ORDER BY key, model, simulated
"""


class LedgerError(Exception):
    """The files cannot be used, or not any more."""


class RunOpened(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run when it begins."""

    run_id: str
    key: str
    """The id of the API key it belongs to; empty where the server asks for none."""
    model: str
    """That runs it, and has a price."""
    requested_model: str
    """What the client called it."""
    design: str
    """The way in which the client goes on after a tool call."""
    created_at: int
    """Unix seconds."""
    is_simulated: bool = False
    """Whether there was no model, and its tokens are made up."""


class SegmentUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment of a run took."""

    index: int
    """From 0."""
    input_tokens: int
    cached_tokens: int
    """Of the input, those that were not computed again."""
    output_tokens: int
    reasoning_tokens: int
    """Of the output, those that were reasoning."""
    seconds: float
    """From its beginning to its end."""


@dataclass(frozen=True)
class Total:
    """What runs of one key with one model took together; simulated ones apart from others."""

    key: str
    model: str
    num_runs: int
    num_segments: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_nanodollars: int | None
    """Of the runs that had a price; None if no run had one."""
    num_unpriced_runs: int
    is_simulated: bool
    """Whether there was no model: what it took and cost is that of made-up tokens."""


class _SegmentRecord(msgspec.Struct, frozen=True, tag="segment"):
    run: RunOpened
    usage: SegmentUsage


class _EndRecord(msgspec.Struct, frozen=True, tag="end"):
    run: RunOpened
    status: str
    finished_at: float


_Record: TypeAlias = _SegmentRecord | _EndRecord


@dataclass
class _Account:
    """What has been recorded of a run."""

    run: RunOpened
    segments: dict[int, SegmentUsage] = field(default_factory=dict)
    end: _EndRecord | None = None

    def take(self, record: _Record) -> None:
        """Take a record in. To take it twice makes no difference."""
        match record:
            case _SegmentRecord():
                self.segments.setdefault(record.usage.index, record.usage)
            case _EndRecord():
                self.end = self.end or record

    def records(self) -> Iterator[_Record]:
        """Give what it was made from."""
        for usage in tuple(self.segments.values()):  # another may come meanwhile
            yield _SegmentRecord(self.run, usage)
        if self.end is not None:
            yield self.end


class Ledger:
    """The accounts in a folder, which belongs to one process at a time.

    ``segment`` and ``finish`` are the event loop's; they wait neither for a disk nor for a lock on
    the SQLite file, and never fail: a run goes on if it cannot be accounted for.

    Args:
        folder: where the files are. They and the folder are made for the eyes of this user alone.
        prices: of models. What a run costs is settled when its row is written.
        clock: gives unix seconds.
        journal_bytes: from what length on the journal is rewritten.
        busy_seconds: how long the thread waits when another process has locked the SQLite file.
        stages: where the time that the thread takes to write is added.

    Raises:
        LedgerError: a file is damaged, foreign, from a later version of this program, or in use.
    """

    def __init__(
        self,
        folder: Path,
        prices: Prices,
        *,
        clock: Callable[[], float] = time.time,
        journal_bytes: int = MAX_BYTES,
        busy_seconds: float = _BUSY_SECONDS,
        stages: Tallies | None = None,
    ) -> None:
        self._stages = stages or Tallies()
        self._prices = prices
        self._clock = clock
        self._open: dict[str, _Account] = {}
        self._finished: deque[_Account] = deque()  # and not in the file; the thread takes them out
        self._num_lost = 0
        self._warned_at = float("-inf")
        self._encoder = msgspec.json.Encoder()
        with ExitStack() as resources, _told_as_ledger_errors(folder):
            _lock(folder, resources)
            self._database = open_sqlite(
                folder / LEDGER_FILE,
                _FORMAT,
                # A row is safe on the disk before the journal forgets its run.
                pragmas=("foreign_keys = ON", "synchronous = FULL"),
                timeout_seconds=busy_seconds,
            )
            resources.callback(self._database.close)
            self._recover(folder)
            self._journal = Journal(folder / JOURNAL_FILE, max_bytes=journal_bytes)
            resources.callback(self._journal.close)
            self._resources = resources.pop_all()
        self._thread = WorkerThread("ledger")

    @property
    def num_lost(self) -> int:
        """How many records could not be written to the journal. They are in no danger as long as
        the process lives."""
        return self._num_lost

    def segment(self, run: RunOpened, usage: SegmentUsage) -> None:
        """Record what a segment took, before the client is told of its end."""
        record = _SegmentRecord(run, usage)
        with self._journal.lock:
            self._open.setdefault(run.run_id, _Account(run)).take(record)
            self._append(record)

    def finish(self, run: RunOpened, status: str) -> None:
        """Record that a run is over, and have its row written."""
        record = _EndRecord(run, status, self._clock())
        with self._journal.lock:
            account = self._open.pop(run.run_id, None) or _Account(run)
            account.take(record)
            self._finished.append(account)
            self._append(record)
        self._thread.submit(self._write).add_done_callback(_log_failure)

    async def settled(self) -> None:
        """Return when all runs that were finished before have their rows.

        Raises:
            LedgerError: they cannot be written now. They are tried again with the next one.
        """
        await self._run(self._write)

    async def totals(self, *, key: str | None = None, since: float | None = None) -> list[Total]:
        """Return what the runs that are over took, by key and model.

        Args:
            key: counts only runs of this key.
            since: counts only runs that were created then or later; unix seconds.

        Raises:
            LedgerError: the file cannot be read, or lacks what cannot be written to it now.
        """

        def read() -> list[Total]:
            self._write()
            return _totals(self._database, key, since)

        return await self._run(read)

    def close(self) -> None:
        """Write what can be written, and let go of the files."""
        self._thread.submit(self._write).add_done_callback(_log_failure)
        self._thread.close(drops_work=False)
        self._resources.close()

    def _append(self, record: _Record) -> None:
        try:
            self._journal.append(self._encoder.encode(record))
        except OSError as error:
            self._num_lost += 1
            if self._clock() - self._warned_at >= _WARNING_INTERVAL_SECONDS:
                self._warned_at = self._clock()
                logger.error("the journal of the ledger cannot be written: %s", error)

    async def _run(self, function: Callable[[], T]) -> T:
        try:
            return await self._thread.run(function)
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger failed: {error}") from error

    def _recover(self, folder: Path) -> None:
        """Write the rows that the journal of the process before tells of, to the last."""
        path = folder / JOURNAL_FILE
        contents = read_journal(path)
        accounts, num_foreign = _accounts(contents.records)
        if num_damaged := contents.num_damaged + num_foreign:
            logger.error("%d damaged lines of %s are left out", num_damaged, path)
        if contents.is_torn:
            logger.warning("the last line of %s has no end, and is left out", path)
        interrupted = [account for account in accounts if account.end is None]
        for account in interrupted:
            account.take(_EndRecord(account.run, INTERRUPTED, self._clock()))
        if interrupted:
            logger.warning("%d runs were interrupted when the process ended", len(interrupted))
        self._put(accounts)
        if num_damaged:
            path.replace(path.with_name(f"{path.name}.damaged"))  # somebody may read more out of it

    # --- What follows is done on the thread --------------------------------------------------

    def _write(self) -> None:
        with self._stages.timed(Stage.LEDGER):
            with self._journal.lock:
                accounts = list(self._finished)
            self._put(accounts)
            for _ in accounts:
                self._finished.popleft()
            if self._journal.is_rewrite_due:
                self._rewrite_journal()

    def _put(self, accounts: Iterable[_Account]) -> None:
        with self._database as database:
            for account in accounts:
                put = database.execute(_PUT_RUN, _run_row(account, self._prices))
                if put.rowcount == 1:  # and not there already
                    database.executemany(_PUT_SEGMENT, _segment_rows(account))

    def _rewrite_journal(self) -> None:
        try:
            self._journal.rewrite(self._snapshot)
        except OSError as error:
            logger.error("the journal of the ledger cannot be rewritten: %s", error)

    def _snapshot(self) -> Iterable[bytes]:
        """Return the records of all runs that have no row yet."""
        accounts = [*self._finished, *self._open.values()]
        return (msgspec.json.encode(record) for account in accounts for record in account.records())


def read_totals(folder: Path, *, key: str | None = None, since: float | None = None) -> list[Total]:
    """Return what ``Ledger.totals`` does, of a folder that a process may be using.

    Runs that have no row yet are not in it.

    Raises:
        LedgerError: there is no ledger, or it cannot be read.
    """
    path = folder / LEDGER_FILE
    try:
        database = open_sqlite_read_only(path, _FORMAT, timeout_seconds=_BUSY_SECONDS)
        with closing(database):
            return _totals(database, key, since)
    except SqliteFileError as error:
        raise LedgerError(f"the ledger: {error}") from error
    except sqlite3.Error as error:
        raise LedgerError(f"the ledger: {unusable(path, error)}") from error


def _totals(database: sqlite3.Connection, key: str | None, since: float | None) -> list[Total]:
    parameters = {"key": key, "since": float("-inf") if since is None else since}
    [(version,)] = database.execute("PRAGMA user_version")
    # Who only reads may come before a server that brings the file to this version.
    statement = _TOTALS.format(is_simulated="is_simulated" if version >= 2 else "0")
    return [
        Total(*[*figures, bool(is_simulated)])
        for *figures, is_simulated in database.execute(statement, parameters)
    ]


def _log_failure(writing: "Future[None]") -> None:
    if (error := writing.exception()) is not None:
        logger.error("runs are not in the ledger yet, and are tried again later", exc_info=error)


def check_ledger(folder: Path) -> None:
    """Make sure that a ``Ledger`` can be opened in ``folder`` now, and leave it as it is.

    Raises:
        LedgerError: as by ``Ledger``.
    """
    with ExitStack() as resources, _told_as_ledger_errors(folder):
        if (folder / LOCK_FILE).exists():
            _lock(folder, resources)
        check_sqlite(folder / LEDGER_FILE, _FORMAT, timeout_seconds=_BUSY_SECONDS)
        read_journal(folder / JOURNAL_FILE)


@contextmanager
def _told_as_ledger_errors(folder: Path) -> Iterator[None]:
    """Raise what fails when the files in ``folder`` are opened as a ``LedgerError``."""
    try:
        yield
    except SqliteFileError as error:
        raise LedgerError(f"the ledger: {error}") from error
    except sqlite3.Error as error:
        raise LedgerError(f"the ledger: {unusable(folder / LEDGER_FILE, error)}") from error
    except OSError as error:
        raise LedgerError(f"cannot open the ledger in {folder}: {error}") from error


def _lock(folder: Path, resources: ExitStack) -> None:
    """Make the folder if need be, and hold its lock until ``resources`` are closed.

    It is not the lock of the SQLite file: others may read that, while it is written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Whatever thread closes the ledger lets go of it.
    lock = FileLock(folder / LOCK_FILE, mode=0o600, thread_local=False)
    try:
        resources.enter_context(lock.acquire(blocking=False))
    except Timeout as error:
        raise LedgerError(f"the ledger: cannot use {folder}: {IN_USE}") from error


def _accounts(records: Iterable[bytes]) -> tuple[list[_Account], int]:
    """Return the runs that ``records`` tell of, in the order in which they were over, then those
    that were not; and how many records tell of nothing that is known here."""
    accounts: dict[str, _Account] = {}
    finished: dict[str, _Account] = {}
    num_unknown = 0
    decoder = msgspec.json.Decoder(_Record)
    for encoded in records:
        try:
            record = decoder.decode(encoded)
        except msgspec.DecodeError:
            num_unknown += 1
            continue
        account = accounts.setdefault(record.run.run_id, _Account(record.run))
        account.take(record)
        if account.end is not None:
            finished.setdefault(record.run.run_id, account)
    return list((finished | accounts).values()), num_unknown


def _run_row(account: _Account, prices: Prices) -> tuple[str | int | float | None, ...]:
    run, end = account.run, account.end
    assert end is not None, "a run that has a row is over"
    segments = account.segments.values()
    input_tokens = sum(usage.input_tokens for usage in segments)
    cached_tokens = sum(usage.cached_tokens for usage in segments)
    output_tokens = sum(usage.output_tokens for usage in segments)
    price = prices.get(run.model)
    return (
        *(run.run_id, run.key, run.model, run.requested_model, run.design, end.status),
        *(run.created_at, end.finished_at, len(segments)),
        *(input_tokens, cached_tokens, output_tokens),
        sum(usage.reasoning_tokens for usage in segments),
        sum(usage.seconds for usage in segments),
        None if price is None else price.cost(input_tokens, cached_tokens, output_tokens),
        run.is_simulated,
    )


def _segment_rows(account: _Account) -> Iterator[tuple[str | int | float, ...]]:
    run_id = account.run.run_id
    return ((run_id, *msgspec.structs.astuple(usage)) for usage in account.segments.values())
