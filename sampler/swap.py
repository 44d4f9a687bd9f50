"""What is swapped out, in files that do not outlive the process.

Below the directory that is given, each user has one directory, and in it each process has one of
its own, beside a lock that the process holds as long as it lives, and before it makes the
directory. So whoever starts next can tell what a dead process has left, which it removes, from what
a living one still needs, and no process ever waits for another. Files and directories are the
user's alone: they hold what was said in conversations.

A file is written under another name and then renamed, with a header that says how long it is and
what its checksum is. What comes back is what was written, or a ``SwapError``.
"""

import math
import os
import secrets
import shutil
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO, NamedTuple
from weakref import finalize

from filelock import FileLock

Bytes = bytes | bytearray | memoryview

_MAGIC = b"kv-swap1"
_HEADER = struct.Struct("<8sQQI")


class SwapError(Exception):
    """Something could not be written, or what is there is not what was written."""


class _Header(NamedTuple):
    serial: int
    """No two files of a process have the same."""
    num_bytes: int
    """Of content."""
    checksum: int
    """CRC-32: it is to notice a damaged file, not a forged one, and takes 7.0 GB/s on one core of
    an AMD EPYC, where SHA-256 takes 2.0 and BLAKE2b 1.3, which some disks are faster than."""

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, *self)


class SwapEntry:
    """What was swapped out at once. Its file is deleted when it is collected."""

    def __init__(self, store: "SwapStore", path: Path, header: _Header, num_blocks: int) -> None:
        self._store = store
        self._path = path
        self._header = header
        self.num_blocks = num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of content."""
        return self._header.num_bytes

    def read_into(self, buffers: Iterable[Bytes]) -> None:
        """Fill ``buffers``, which are writable and have room for exactly what was written.

        Raises:
            SwapError: the file is gone, damaged or of another length. What the buffers hold is
                then worth nothing.
        """
        try:
            with self._path.open("rb") as file:
                self._read_into(buffers, file)
        except OSError as error:
            raise SwapError(f"cannot read what was swapped out: {error}") from error

    def delete(self) -> None:
        """Have the file removed, if it is there still. Any thread may call this; none waits."""
        self._store.forget(self._path)

    def __del__(self) -> None:
        self.delete()

    def _read_into(self, buffers: Iterable[Bytes], file: BinaryIO) -> None:
        if file.read(_HEADER.size) != self._header.encode():
            raise SwapError("a swap file has another header than was written")
        num_read = checksum = 0
        for buffer in map(_flat, buffers):
            num_read += file.readinto(buffer)  # type: ignore[attr-defined]
            checksum = zlib.crc32(buffer, checksum)
        read = _Header(self._header.serial, num_read, checksum)
        if read != self._header or file.read(1):
            raise SwapError(f"a swap file does not hold what was written: {read} {self._header}")


class SwapStore:
    """Swaps out to a directory of this process, which is removed with it.

    One thread puts; any thread deletes.
    """

    def __init__(self, directory: Path | None = None, capacity_bytes: int | None = None) -> None:
        """Make the directory, and have what dead processes have left beside it removed.

        That may be much, and goes on after this returns, on a thread of its own.

        Args:
            directory: where; by default in the system's directory for temporary files, which on
                some systems is in memory.
            capacity_bytes: of all files together.

        Raises:
            SwapError: it cannot be made there.
        """
        self.capacity_bytes = capacity_bytes
        try:
            self.directory, lock = _own_directory(directory or Path(tempfile.gettempdir()))
        except OSError as error:
            raise SwapError(f"cannot make a directory to swap out to: {error}") from error
        self._serials = count()
        # Entries are forgotten by whatever thread collects them: each access is a single operation.
        self._sizes: dict[Path, tuple[int, int]] = {}
        """Blocks and bytes of each file."""
        # To remove a file of 46 MB takes 2 ms. Entries are collected in the event loop too, a
        # thousand at once where a thousand runs end, and that is not to wait for the disk.
        self._doomed: SimpleQueue[Path | None] = SimpleQueue()
        Thread(target=_remove_files, args=(self._doomed,), name="swap", daemon=True).start()
        # What is not closed is closed when it is collected, or the interpreter ends.
        self._close = finalize(self, _end, self._doomed, self.directory, lock)
        # Not the thread above: what is deleted here is not to wait for it.
        Thread(
            target=_remove_leftovers, args=(self.directory,), name="swap leftovers", daemon=True
        ).start()

    @property
    def num_blocks(self) -> int:
        """Blocks that are swapped out."""
        return sum(num_blocks for num_blocks, _ in list(self._sizes.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, headers included."""
        return sum(num_bytes for _, num_bytes in list(self._sizes.values()))

    @property
    def num_blocks_left(self) -> float:
        """Blocks that can still be swapped out, if each takes what those do that are here."""
        sizes = list(self._sizes.values())
        num_blocks = sum(num_blocks for num_blocks, _ in sizes)
        num_bytes = sum(num_bytes for _, num_bytes in sizes)
        content_bytes = num_bytes - _HEADER.size * len(sizes)
        if self.capacity_bytes is None or not content_bytes:
            return math.inf
        bytes_left = max(0, self.capacity_bytes - num_bytes - _HEADER.size)
        return bytes_left * num_blocks // content_bytes

    def put(self, chunks: Iterable[Bytes], num_blocks: int) -> SwapEntry:
        """Write ``chunks``, contiguous ones, to a new file. They count as ``num_blocks`` blocks.

        Raises:
            SwapError: the disk or the capacity does not suffice, or the store is closed. Nothing is
                left behind.
        """
        serial = next(self._serials)
        path = self.directory / str(serial)
        unfinished = path.with_suffix(".unfinished")
        try:
            header = self._write(unfinished, serial, chunks)
            unfinished.rename(path)
        except BaseException as error:
            with suppress(OSError):
                unfinished.unlink()
            if isinstance(error, OSError):
                raise SwapError(f"cannot swap out: {error}") from error
            raise
        self._sizes[path] = num_blocks, _HEADER.size + header.num_bytes
        return SwapEntry(self, path, header, num_blocks)

    def forget(self, path: Path) -> None:
        """Have the file of an entry removed soon; does nothing where that has been done."""
        if self._sizes.pop(path, None):
            self._doomed.put(path)

    def close(self) -> None:
        """Remove the directory and all that is swapped out."""
        self._close()

    def _write(self, path: Path, serial: int, chunks: Iterable[Bytes]) -> _Header:
        capacity = None if self.capacity_bytes is None else self.capacity_bytes - self.num_bytes
        header = _Header(serial, 0, 0)
        with FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            _write_all(file, header.encode())
            for chunk in map(_flat, chunks):
                num_bytes = header.num_bytes + len(chunk)
                if capacity is not None and _HEADER.size + num_bytes > capacity:
                    raise SwapError(f"swapped out files may take {self.capacity_bytes} bytes")
                _write_all(file, chunk)
                header = _Header(serial, num_bytes, zlib.crc32(chunk, header.checksum))
            file.seek(0)
            _write_all(file, header.encode())
        return header


def _flat(buffer: Bytes) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # cast refuses empty ones


def _write_all(file: FileIO, chunk: Bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]  # a system call writes 2 GiB at most


def _own_directory(parent: Path) -> tuple[Path, FileLock]:
    """Return a new directory for this process, and the lock that says it lives."""
    directory = _users_directory(parent) / f"process-{secrets.token_hex(8)}"
    # The lock comes first, or the directory could be taken for a leftover in between. Nobody else
    # knows the name yet, so it is free.
    lock = _life_lock(directory)
    lock.acquire(blocking=False)
    try:
        directory.mkdir(mode=0o700)
    except BaseException:
        _remove(directory, lock)
        raise
    return directory, lock


def _users_directory(parent: Path) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    root = parent / f"suspended-sampling-{user}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    # Where all may write, anybody may have made it first, or a link in its place.
    if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != user):
        raise SwapError(f"{root} is not a directory of this user")
    root.chmod(0o700)
    return root


def _life_lock(directory: Path) -> FileLock:
    # Whatever thread closes the store lets go of it.
    return FileLock(directory.with_suffix(".lock"), thread_local=False)


def _remove_leftovers(own: Path) -> None:
    """Remove what dead processes have left beside ``own``, the directory of this one."""
    with suppress(OSError):  # the directory above is gone too
        for directory in filter(Path.is_dir, own.parent.iterdir()):
            if directory != own:
                _remove_if_dead(directory)


def _remove_if_dead(directory: Path) -> None:
    lock = _life_lock(directory)
    with suppress(OSError):  # in use, or removed by its own process in this moment
        lock.acquire(blocking=False)
        _remove(directory, lock)


def _remove_files(doomed: "SimpleQueue[Path | None]") -> None:
    while (path := doomed.get()) is not None:
        with suppress(OSError):
            path.unlink()


def _end(doomed: "SimpleQueue[Path | None]", directory: Path, lock: FileLock) -> None:
    doomed.put(None)
    _remove(directory, lock)


def _remove(directory: Path, lock: FileLock) -> None:
    # In this order: some systems do not remove what is open, and a directory without a lock is one
    # that the next process removes, should this one die meanwhile.
    lock.release()
    with suppress(OSError):
        os.unlink(lock.lock_file)
    shutil.rmtree(directory, ignore_errors=True)
