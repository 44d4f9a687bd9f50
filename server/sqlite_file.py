"""A SQLite file of ours: for the eyes of this user alone, and refused by name if it is another's.

Its header says by an application id that it is one of ours, and by a version what is in it.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from server.folders import obstacle_to

IN_USE = "it is in use; each server needs a --data-dir of its own, or --no-store"
"""Why a file or a folder cannot be used that another process uses."""

_NEW = 0
"""The version of a file with nothing in it."""


class SqliteFileError(Exception):
    """The file cannot be used; the message says which, and why."""


@dataclass(frozen=True)
class FileFormat:
    """What is in a file."""

    application_id: int
    """By which a file is known to be one of ours. 32 bits."""
    version: int
    """Above 0."""
    schema: str
    """The statements that make an empty file one of ours."""
    migrations: Mapping[int, str] = field(default_factory=dict)
    """The statements that make a file of a version one of the next, for each version before."""


def open_sqlite(
    path: Path, file_format: FileFormat, *, pragmas: tuple[str, ...], timeout_seconds: float
) -> sqlite3.Connection:
    """Return a connection to a file that is sound and of this version; it and its folder are made
    if need be.

    Any thread may use it, one after the other. It keeps its log beside the file (WAL).

    Args:
        path: of the file.
        file_format: what it must have in it.
        pragmas: as ``name = value``, set before anything else is done.
        timeout_seconds: how long to wait, now and later, for other connections.

    Raises:
        SqliteFileError: it is damaged, foreign, from a later version of this program, or in use.
    """
    try:
        _create_for_this_user(path)
        database = sqlite3.connect(path, timeout=timeout_seconds, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise SqliteFileError(f"cannot open {path}: {error}") from error
    try:
        _set_up(database, file_format, pragmas)
    except SqliteFileError as error:
        database.close()
        raise SqliteFileError(f"cannot use {path}: {error}") from None
    except sqlite3.Error as error:
        database.close()
        raise unusable(path, error) from error
    return database


def check_sqlite(path: Path, file_format: FileFormat, *, timeout_seconds: float) -> None:
    """Make sure that ``open_sqlite`` can open a file now, or make it. Nothing is made here, and
    nobody is kept out afterwards.

    Args:
        path: of the file.
        file_format: what it must have in it.
        timeout_seconds: how long to wait for other connections.

    Raises:
        SqliteFileError: as by ``open_sqlite``, or the file cannot be made.
    """
    try:
        if not path.exists():
            folder = path.parent
            if path.is_symlink():  # whose own folder would be made, but not that of what it names
                folder = path.resolve().parent
                folder.stat()
            if why := obstacle_to(folder):
                raise SqliteFileError(f"cannot make {path}: {why}")
            return
        uri = f"{path.resolve().as_uri()}?mode=rw"
        database = sqlite3.connect(uri, uri=True, timeout=timeout_seconds, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise SqliteFileError(f"cannot open {path}: {error}") from error
    with closing(database):
        try:
            version = _version(database, file_format)
            _check_is_sound(database)
            database.execute("BEGIN IMMEDIATE")  # which is no attempt yet to write
            database.execute(f"PRAGMA user_version = {version}")
            database.execute("ROLLBACK")
        except SqliteFileError as error:
            raise SqliteFileError(f"cannot use {path}: {error}") from None
        except sqlite3.Error as error:
            raise unusable(path, error) from error


def open_sqlite_read_only(
    path: Path, file_format: FileFormat, *, timeout_seconds: float
) -> sqlite3.Connection:
    """Return a connection that changes nothing in a file, which another process may be writing. It
    may be of a version before this one.

    Raises:
        SqliteFileError: there is no such file, or it is not one of ours of a version known here.
    """
    try:
        database = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=timeout_seconds
        )
    except sqlite3.Error as error:
        raise SqliteFileError(f"cannot open {path}: {error}") from error
    try:
        if _version(database, file_format) == _NEW:
            raise SqliteFileError("it is empty")
    except SqliteFileError as error:
        database.close()
        raise SqliteFileError(f"cannot use {path}: {error}") from None
    except sqlite3.Error as error:
        database.close()
        raise unusable(path, error) from error
    return database


def unusable(path: Path, error: sqlite3.Error) -> SqliteFileError:
    """Return the error that says, of one of SQLite's, what is wrong with the file."""
    match error.sqlite_errorcode & 0xFF:  # without what makes it an extended one
        case sqlite3.SQLITE_BUSY:
            why = IN_USE
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            why = f"it is damaged ({error})"
        case _:
            why = str(error)
    return SqliteFileError(f"cannot use {path}: {why}")


def _create_for_this_user(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # By name and never by a descriptor: to close one drops all locks of this process on the file.
    path.touch(mode=0o600)
    path.chmod(0o600)


def _set_up(
    database: sqlite3.Connection, file_format: FileFormat, pragmas: tuple[str, ...]
) -> None:
    for pragma in pragmas:
        database.execute(f"PRAGMA {pragma}")
    version = _version(database, file_format)
    database.execute("PRAGMA journal_mode = WAL")
    if version == _NEW:
        database.executescript(
            f"BEGIN; {file_format.schema}"
            f"PRAGMA application_id = {file_format.application_id};"
            f"PRAGMA user_version = {file_format.version}; COMMIT;"
        )
    _check_is_sound(database)
    if version != _NEW:
        _migrate(database, file_format, version)


def _check_is_sound(database: sqlite3.Connection) -> None:
    for (finding,) in database.execute("PRAGMA quick_check(1)"):
        if finding != "ok":
            raise SqliteFileError(f"it is damaged ({finding})")


def _migrate(database: sqlite3.Connection, file_format: FileFormat, version: int) -> None:
    """Bring a sound file of ``version`` to this one, step by step, each of them whole or not."""
    for before in range(version, file_format.version):
        database.executescript(
            f"BEGIN; {file_format.migrations[before]} PRAGMA user_version = {before + 1}; COMMIT;"
        )


def _version(database: sqlite3.Connection, file_format: FileFormat) -> int:
    """Return the version of the file, ``_NEW`` where it is empty; else it must be one of ours."""
    [(application_id,)] = database.execute("PRAGMA application_id")
    [(version,)] = database.execute("PRAGMA user_version")
    [(num_tables,)] = database.execute("SELECT count(*) FROM sqlite_schema")
    if (application_id, version, num_tables) == (0, _NEW, 0):
        return _NEW
    if application_id != file_format.application_id:
        raise SqliteFileError("it is the database of another program")
    if version > file_format.version:
        raise SqliteFileError(
            f"it is of version {version}, and this program knows {file_format.version}"
        )
    return int(version)
