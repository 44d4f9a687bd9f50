"""A file of short records that outlive the process from the moment they are appended.

A record is a line: its checksum, then its bytes, in one write to the end of the file. The system
has it when ``append`` returns, so nothing that happens to the process can take it back. (A power
failure can: nothing waits for the disk here.)

The file does not grow for ever. At some length its owner says which records are still wanted, and a
new file with these takes its place, while appending goes on.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

MAX_BYTES = 1024 * 1024
"""From what length on a rewrite is due, if it was not half as long after the last one."""


@dataclass(frozen=True)
class JournalContents:
    """What was found in a file."""

    records: list[bytes]
    """In the order in which they were appended."""
    num_damaged: int
    """Lines that are not as they were written, and were skipped."""
    is_torn: bool
    """Whether the end of the last line is missing; it was skipped, too."""


def read_journal(path: Path) -> JournalContents:
    """Return what is in a file: nothing, if there is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return JournalContents([], 0, False)
    read = [_record(line) for line in lines]
    records = [record for record in read if record is not None]
    return JournalContents(records, len(read) - len(records), rest != b"")


def _line(record: bytes) -> bytes:
    assert b"\n" not in record, "a record is a line"
    return b"%08x %s\n" % (zlib.crc32(record), record)


def _record(line: bytes) -> bytes | None:
    """Return what ``_line`` was given, or None if it never made this line."""
    _, _, record = line.partition(b" ")
    return record if line + b"\n" == _line(record) else None


class Journal:
    """A new file with ``records``, in the place of what was there.

    Args:
        path: of the file, which is made for the eyes of this user alone.
        records: what is in it to begin with.
        max_bytes: from what length on it is worth a rewrite.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(
        self, path: Path, records: Iterable[bytes] = (), *, max_bytes: int = MAX_BYTES
    ) -> None:
        self.lock = Lock()
        """Held to append. Who also holds it to change what the records tell of is sure that
        ``rewrite`` finds both in step."""
        self._path = path
        self._max_bytes = max_bytes
        self._is_whole = True
        self._since_snapshot: list[bytes] | None = None  # lines, while the file is being rewritten
        self._file = self._new_file(records)
        self._num_kept_bytes = self._file.num_bytes
        with _closed_on_error(self._file):
            self._file.move_to(path)
            _sync_folder(path.parent)

    def append(self, record: bytes) -> None:
        """Add a record, in one write. ``lock`` is the caller's to hold.

        Raises:
            OSError: it was not written. The next rewrite makes up for it.
        """
        line = _line(record)
        if self._since_snapshot is not None:
            self._since_snapshot.append(line)
        try:
            self._file.append(line)
        except OSError:
            self._is_whole = False
            raise

    @property
    def is_rewrite_due(self) -> bool:
        """Whether the file has grown so much, or lacks a record that could not be written."""
        limit = max(self._max_bytes, 2 * self._num_kept_bytes)
        return self._file.num_bytes >= limit or not self._is_whole

    def rewrite(self, snapshot: Callable[[], Iterable[bytes]]) -> None:
        """Put a new file in the place of this one, on a thread that may wait for the disk.

        Appending goes on meanwhile, and waits for no more than a change of names.

        Args:
            snapshot: gives the records to keep of those appended so far. It is called with ``lock``
                held, and must be quick; what it returns is iterated without.

        Raises:
            OSError: it was not possible, and nothing has changed.
        """
        with self.lock:
            records = snapshot()
            self._since_snapshot = []
        try:
            replaced = self._replace(self._new_file(records))
        finally:
            self._since_snapshot = None
        replaced.close()
        _sync_folder(self._path.parent)

    def _replace(self, file: "_File") -> "_File":
        """Go on with ``file``, and return the one used before."""
        num_kept_bytes = file.num_bytes
        with _closed_on_error(file), self.lock:
            assert self._since_snapshot is not None, "lines are being collected"
            file.append(b"".join(self._since_snapshot))
            file.move_to(self._path)
            replaced, self._file = self._file, file
            self._num_kept_bytes = num_kept_bytes
            self._is_whole = True
        return replaced

    def _new_file(self, records: Iterable[bytes]) -> "_File":
        """Return a file beside this one that is safe on the disk."""
        file = _File(self._path.with_name(f"{self._path.name}.new"))
        with _closed_on_error(file):
            file.append(b"".join(map(_line, records)))
            file.sync()
        return file

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class _File:
    """A new file that only grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)  # left by a process that died
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(path, flags, 0o600)
        self._is_cut = False  # the last line has no end
        self.num_bytes = 0

    def append(self, lines: bytes) -> None:
        # What there is of a line that did not fit is a damaged line, and not part of the next.
        data = b"\n" + lines if self._is_cut else lines
        num_written = os.write(self._descriptor, data)
        self.num_bytes += num_written
        self._is_cut = num_written < len(data)
        if self._is_cut:
            raise OSError(
                f"expected to write {len(data)} bytes to {self._path}, wrote {num_written}"
            )

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def move_to(self, path: Path) -> None:
        os.replace(self._path, path)
        self._path = path

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def _closed_on_error(file: _File) -> Iterator[None]:
    try:
        yield
    except OSError:
        file.close()
        raise


def _sync_folder(folder: Path) -> None:
    """Have the change of a name survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
