"""Responses on disk: what a later request may name, and what may be looked up.

SQLite, on one thread of its own, so that the event loop never waits for a disk. The file belongs to
one process at a time: the store holds its lock for as long as it is open. Hence a response that is
still in progress when the file is opened was left so by a process that died, and is made a failed
one; and a process that dies in the middle of a write leaves what was there before it.

Each row belongs to a key. Nothing here can be reached, or found to exist, with another key.
"""

import asyncio
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

import msgspec

from protocol import errors
from protocol.response import ResponseError
from protocol.validation import JsonObject
from sampler.worker_thread import WorkerThread
from server.sqlite_file import (
    FileFormat,
    SqliteFileError,
    check_sqlite,
    open_sqlite,
    unusable,
)
from server.work import Stage, Tallies

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

APPLICATION_ID = 0x73757370  # "susp", by which a file is known to be one of ours
SCHEMA_VERSION = 1
PURGE_INTERVAL_SECONDS = 60.0
MAX_UNWRITTEN = 64
"""How many responses may wait to be written before their senders wait too."""

STOPPED = ResponseError("server_error", "the server stopped before the response was finished")
"""Why a response failed whose process ended first."""

_SCHEMA = """
CREATE TABLE responses (
    row INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    id TEXT NOT NULL,
    model TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    stored_at REAL NOT NULL,
    is_finished INTEGER NOT NULL,
    item_ids BLOB NOT NULL,
    response BLOB NOT NULL,
    input_items BLOB NOT NULL,
    conversation BLOB NOT NULL,
    events BLOB NOT NULL,
    UNIQUE (key, id)
);
CREATE INDEX responses_by_age ON responses (stored_at);
CREATE INDEX unfinished_responses ON responses (row) WHERE NOT is_finished;
CREATE TABLE items (
    key TEXT NOT NULL,
    id TEXT NOT NULL,
    response INTEGER NOT NULL REFERENCES responses (row) ON DELETE CASCADE,
    PRIMARY KEY (key, id, response)
) WITHOUT ROWID;
CREATE INDEX items_by_response ON items (response);
"""
_FORMAT = FileFormat(APPLICATION_ID, SCHEMA_VERSION, _SCHEMA)

_PRAGMAS = (
    "locking_mode = EXCLUSIVE",  # kept from the first write on
    "foreign_keys = ON",
    "synchronous = NORMAL",  # with WAL a lost write, never a torn one
)

_COLUMNS = "id, key, model, created_at, response, input_items, conversation, events, item_ids"

_PUT = f"""
INSERT INTO responses ({_COLUMNS}, stored_at, is_finished)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key, id) DO UPDATE SET
    model = excluded.model, created_at = excluded.created_at, response = excluded.response,
    input_items = excluded.input_items, conversation = excluded.conversation,
    events = excluded.events, item_ids = excluded.item_ids, stored_at = excluded.stored_at,
    is_finished = excluded.is_finished
RETURNING row
"""

_GET = f"SELECT {_COLUMNS} FROM responses WHERE key = ? AND id = ? AND stored_at > ?"

_GET_BY_ITEM = f"""
SELECT {_COLUMNS} FROM responses
WHERE row IN (SELECT response FROM items WHERE key = ? AND id = ?) AND stored_at > ?
ORDER BY row DESC LIMIT 1
"""


class StoreError(Exception):
    """The file cannot be used, or not any more."""


class _State(msgspec.Struct):
    status: str
    error: ResponseError | None = None


_UNFINISHED = ("queued", "in_progress")


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response and what it was made from."""

    id: str
    key: str
    """The id of the API key it belongs to; empty where the server asks for none."""
    model: str
    created_at: int
    response: bytes
    """The JSON of the resource."""
    input_items: list[JsonObject]
    """The whole input in effect, as it would stand on the wire; each item has an id of its own."""
    conversation: bytes
    """Input and output as the sampler has them; not looked into here."""
    events: list[bytes]
    """The JSON of its events, in order."""
    item_ids: tuple[str, ...]
    """The items that a reference may name."""

    @property
    def is_finished(self) -> bool:
        """Whether it has come to its end, whichever that was."""
        return self._state.status not in _UNFINISHED

    @property
    def is_refused(self) -> bool:
        """Whether it failed for what it was asked: nothing can go on from that."""
        error = self._state.error
        return error is not None and error.code == errors.INVALID_PROMPT

    @property
    def _state(self) -> _State:
        return msgspec.json.decode(self.response, type=_State)


_Row: TypeAlias = tuple[str, str, str, int, bytes, bytes, bytes, bytes, bytes]


class ResponseStore:
    """The responses of one file.

    Args:
        path: of the file. It and its folder are made for the eyes of this user alone.
        ttl_seconds: for how long a response can be had after it was put, the last time.
        clock: gives unix seconds.
        stages: where the time that the thread takes to write is added.

    Raises:
        StoreError: the file is damaged, foreign, from a later version of this program, or in use.
    """

    def __init__(
        self,
        path: Path,
        ttl_seconds: float,
        clock: Callable[[], float] = time.time,
        stages: Tallies | None = None,
    ) -> None:
        self._stages = stages or Tallies()
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._purged_at = float("-inf")
        self._database = _open(path)
        self._thread = WorkerThread("response-store")
        self._num_unwritten = 0

    async def put(self, stored: StoredResponse) -> None:
        """Keep ``stored``, in the place of what was kept of that response before.

        On cancellation: it is kept, or nothing was changed.
        """
        await self._run(self._put, stored)

    async def put_soon(self, stored: StoredResponse) -> None:
        """Keep ``stored`` like ``put``, without waiting for it: who asks from now on finds it.

        Where many are still to be written, one of them is waited for. A failure is logged.
        """
        self._num_unwritten += 1
        write = self._thread.submit(self._put, stored)
        write.add_done_callback(partial(self._written, stored.id))
        if self._num_unwritten > MAX_UNWRITTEN:
            await asyncio.wait([asyncio.wrap_future(write)])

    async def get(self, key: str, response_id: str) -> StoredResponse | None:
        """Return the response, if there is one."""
        return await self._run(self._find, _GET, key, response_id)

    async def get_by_item(self, key: str, item_id: str) -> StoredResponse | None:
        """Return the latest response that has the item, if there is one."""
        return await self._run(self._find, _GET_BY_ITEM, key, item_id)

    async def delete(self, key: str, response_id: str) -> bool:
        """Delete the response with its items, and say whether there was one."""
        return await self._run(self._delete, key, response_id)

    def close(self) -> None:
        """Write what is to be written, and let go of the file."""
        self._thread.close(drops_work=False)
        self._database.close()

    def _written(self, response_id: str, write: Future[None]) -> None:
        self._num_unwritten -= 1
        if error := write.exception():
            logger.error("response %s is not stored: %s", response_id, error)

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await self._thread.run(function, *args, **kwargs)
        except sqlite3.Error as error:
            raise StoreError(f"the response store failed: {error}") from error

    # --- What follows is done on the thread --------------------------------------------------

    def _put(self, stored: StoredResponse) -> None:
        with self._stages.timed(Stage.STORE):
            self._write(stored)

    def _write(self, stored: StoredResponse) -> None:
        row = (
            *(stored.id, stored.key, stored.model, stored.created_at, stored.response),
            msgspec.json.encode(stored.input_items),
            stored.conversation,
            zlib.compress(msgspec.msgpack.encode(stored.events)),
            msgspec.json.encode(stored.item_ids),
            self._clock(),
            stored.is_finished,
        )
        with self._database as database:
            self._purge()
            [(number,)] = database.execute(_PUT, row).fetchall()
            database.execute("DELETE FROM items WHERE response = ?", (number,))
            database.executemany(
                "INSERT OR IGNORE INTO items VALUES (?, ?, ?)",
                [(stored.key, item_id, number) for item_id in stored.item_ids],
            )

    def _find(self, query: str, key: str, id_: str) -> StoredResponse | None:
        row = self._database.execute(query, (key, id_, self._oldest())).fetchone()
        return None if row is None else _stored_response(row)

    def _delete(self, key: str, response_id: str) -> bool:
        with self._database as database:
            deleted = database.execute(
                "DELETE FROM responses WHERE key = ? AND id = ? RETURNING stored_at > ?",
                (key, response_id, self._oldest()),
            ).fetchall()
        return deleted == [(True,)]

    def _purge(self) -> None:
        """Delete what nobody can see any more, unless that was done just now."""
        if self._clock() - self._purged_at < PURGE_INTERVAL_SECONDS:
            return
        self._database.execute("DELETE FROM responses WHERE stored_at <= ?", (self._oldest(),))
        self._purged_at = self._clock()

    def _oldest(self) -> float:
        return self._clock() - self._ttl_seconds


def _stored_response(row: _Row) -> StoredResponse:
    id_, key, model, created_at, response, input_items, conversation, events, item_ids = row
    return StoredResponse(
        id=id_,
        key=key,
        model=model,
        created_at=created_at,
        response=response,
        input_items=msgspec.json.decode(input_items),
        conversation=conversation,
        events=msgspec.msgpack.decode(zlib.decompress(events), type=list[bytes]),
        item_ids=msgspec.json.decode(item_ids, type=tuple[str, ...]),
    )


# --- Opening -------------------------------------------------------------------------------------


def check_store(path: Path) -> None:
    """Make sure that a ``ResponseStore`` can be opened in a file now, and leave it as it is.

    Raises:
        StoreError: as by ``ResponseStore``.
    """
    try:
        check_sqlite(path, _FORMAT, timeout_seconds=0)
    except SqliteFileError as error:
        raise StoreError(f"the response store: {error}") from error


def _open(path: Path) -> sqlite3.Connection:
    try:
        database = open_sqlite(path, _FORMAT, pragmas=_PRAGMAS, timeout_seconds=0)
        try:
            _fail_unfinished(database)
        except sqlite3.Error as error:
            database.close()
            raise unusable(path, error) from error
    except SqliteFileError as error:
        raise StoreError(f"the response store: {error}") from error
    return database


def _fail_unfinished(database: sqlite3.Connection) -> None:
    """Make what a dead process left in progress a failed response, its events as far as they went.

    It writes in any case, which takes the lock.
    """
    database.execute("BEGIN EXCLUSIVE")
    with database:
        unfinished = "SELECT row, response FROM responses WHERE NOT is_finished"
        for row, response in database.execute(unfinished).fetchall():
            failed = msgspec.json.decode(response) | {
                "status": "failed",
                "error": msgspec.to_builtins(STOPPED),
            }
            database.execute(
                "UPDATE responses SET response = ?, is_finished = TRUE WHERE row = ?",
                (msgspec.json.encode(failed), row),
            )
