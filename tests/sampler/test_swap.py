import math
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from errno import ENOSPC
from pathlib import Path
from threading import Event, Thread

import pytest
from filelock import FileLock

from sampler.swap import Bytes, SwapEntry, SwapError, SwapStore

HEADER_BYTES = 28
DEADLINE_SECONDS = 10.0
CHUNKS: list[Bytes] = [
    b"some bytes",
    bytes(1000),
    bytearray(b"and others"),
    memoryview(b"0123")[1:3],
    b"",
]
CONTENT = b"".join(CHUNKS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SwapStore]:
    store = SwapStore(tmp_path)
    yield store
    store.close()


def wait_until_empty(store: SwapStore) -> None:
    """Files are removed by a thread of their own."""
    for path in files(store):
        wait_until_gone(path)


def wait_until_gone(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while path.exists():
        assert time.monotonic() < deadline, "it was not removed"
        time.sleep(0.001)


def files(store: SwapStore) -> list[Path]:
    return sorted(store.directory.iterdir())


def read(entry: SwapEntry, *lengths: int) -> bytes:
    buffers = [bytearray(length) for length in lengths or [entry.num_bytes]]
    entry.read_into(buffers)
    return b"".join(buffers)


# --- What is swapped out -------------------------------------------------------------------------


def test_what_was_written_comes_back_in_pieces_of_any_length(store: SwapStore) -> None:
    entry = store.put(CHUNKS, 3)

    assert (entry.num_blocks, entry.num_bytes) == (3, len(CONTENT))
    assert read(entry) == CONTENT
    assert read(entry, 1, 0, len(CONTENT) - 1) == CONTENT


def test_nothing_can_be_swapped_out_too(store: SwapStore) -> None:
    assert read(store.put([], 0)) == b""


def test_views_of_wider_elements_are_written_as_bytes(store: SwapStore) -> None:
    entry = store.put([memoryview(bytes(range(16))).cast("I")], 1)

    assert read(entry) == bytes(range(16))


def test_the_store_knows_how_much_it_holds(store: SwapStore) -> None:
    entries = [store.put([bytes(100)], 2), store.put([bytes(50)], 1)]
    assert (store.num_blocks, store.num_bytes) == (3, 150 + 2 * HEADER_BYTES)
    assert store.num_bytes == sum(file.stat().st_size for file in files(store))

    entries[0].delete()

    assert (store.num_blocks, store.num_bytes) == (1, 50 + HEADER_BYTES)


def test_nobody_else_can_read_it(store: SwapStore) -> None:
    entry = store.put(CHUNKS, 1)

    modes = [stat.S_IMODE(path.stat().st_mode) for path in (store.directory, *files(store))]

    assert modes == [0o700, 0o600]
    assert stat.S_IMODE(store.directory.parent.stat().st_mode) == 0o700
    entry.delete()


# --- Deleting ------------------------------------------------------------------------------------


def test_a_deleted_entry_cannot_be_read_and_is_deleted_only_once(store: SwapStore) -> None:
    entry = store.put(CHUNKS, 1)

    entry.delete()
    entry.delete()

    wait_until_empty(store)
    with pytest.raises(SwapError):
        read(entry)


def test_an_entry_that_nobody_needs_is_deleted_on_any_thread(store: SwapStore) -> None:
    entries = [store.put(CHUNKS, 1) for _ in range(3)]

    thread = Thread(target=entries.clear)
    thread.start()
    thread.join()

    assert store.num_blocks == 0
    wait_until_empty(store)


# --- Damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 8, 16, 24, 27, 28, 500, -1])
def test_a_changed_bit_is_noticed(store: SwapStore, position: int) -> None:
    entry = store.put(CHUNKS, 1)
    (file,) = files(store)
    content = bytearray(file.read_bytes())
    content[position] ^= 4
    file.write_bytes(content)

    with pytest.raises(SwapError):
        read(entry)


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, HEADER_BYTES + 5, -1])
def test_a_file_that_was_cut_off_is_noticed(store: SwapStore, length: int) -> None:
    entry = store.put(CHUNKS, 1)
    (file,) = files(store)
    file.write_bytes(file.read_bytes()[:length])

    with pytest.raises(SwapError):
        read(entry)


def test_a_file_that_grew_is_noticed(store: SwapStore) -> None:
    entry = store.put(CHUNKS, 1)
    (file,) = files(store)
    file.write_bytes(file.read_bytes() + b"x")

    with pytest.raises(SwapError):
        read(entry)


def test_a_missing_file_is_noticed(store: SwapStore) -> None:
    entry = store.put(CHUNKS, 1)
    files(store)[0].unlink()

    with pytest.raises(SwapError):
        read(entry)


def test_the_file_of_another_entry_is_noticed(store: SwapStore) -> None:
    entries = [store.put(CHUNKS, 1) for _ in range(2)]
    first, second = files(store)
    second.replace(first)

    with pytest.raises(SwapError):
        read(entries[0])


@pytest.mark.parametrize("length", [0, len(CONTENT) - 1, len(CONTENT) + 1])
def test_room_for_more_or_less_than_was_written_is_refused(store: SwapStore, length: int) -> None:
    entry = store.put(CHUNKS, 1)

    with pytest.raises(SwapError):
        read(entry, length)


# --- No room -------------------------------------------------------------------------------------


def test_what_exceeds_the_capacity_leaves_nothing_behind(tmp_path: Path) -> None:
    store = SwapStore(tmp_path, capacity_bytes=1000)
    kept = store.put([bytes(500)], 1)

    with pytest.raises(SwapError, match="1000 bytes"):
        store.put([bytes(300), bytes(300)], 1)

    assert len(files(store)) == 1
    kept.delete()
    filled = store.put([bytes(1000 - HEADER_BYTES)], 1)
    assert store.num_bytes == 1000
    filled.delete()
    store.close()


@pytest.mark.parametrize(("num_bytes", "num_left"), [(300, 3), (299, 2), (0, 0)])
def test_what_is_left_of_the_capacity_is_counted_in_blocks(
    tmp_path: Path, num_bytes: int, num_left: int
) -> None:
    used = 2 * HEADER_BYTES + 300
    store = SwapStore(tmp_path, capacity_bytes=used + HEADER_BYTES + num_bytes)
    assert store.num_blocks_left == math.inf, "nobody knows yet what one takes"

    _entries = [store.put([bytes(200)], 2), store.put([bytes(100)], 1)]

    assert store.num_blocks_left == num_left
    if num_left:
        store.put([bytes(100)] * num_left, num_left)
    with pytest.raises(SwapError):
        store.put([bytes(100)] * (num_left + 1), num_left + 1)
    store.close()


def test_without_a_capacity_any_number_of_blocks_is_left(store: SwapStore) -> None:
    _entry = store.put(CHUNKS, 1)

    assert store.num_blocks_left == math.inf


def test_a_full_disk_leaves_nothing_behind(store: SwapStore) -> None:
    """A bound on the size of files stops the write half way, as a full disk does."""
    kept = store.put([bytes(500)], 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(SwapError):
            store.put([bytes(9_000), bytes(9_000)], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert len(files(store)) == 1
    assert read(kept) == bytes(500)


@pytest.mark.parametrize("error", [OSError(ENOSPC, "full"), RuntimeError(), KeyboardInterrupt()])
def test_what_fails_while_it_is_written_leaves_nothing_behind(
    store: SwapStore, error: BaseException
) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"first"
        raise error

    with pytest.raises(SwapError if isinstance(error, OSError) else type(error)):
        store.put(chunks(), 1)

    assert files(store) == []
    assert store.num_blocks == 0


# --- Directories ---------------------------------------------------------------------------------


def test_a_closed_store_leaves_no_directory_and_takes_nothing(tmp_path: Path) -> None:
    store = SwapStore(tmp_path)
    entry = store.put(CHUNKS, 1)

    store.close()
    store.close()

    assert not store.directory.exists()
    with pytest.raises(SwapError):
        read(entry)
    with pytest.raises(SwapError):
        store.put(CHUNKS, 1)
    entry.delete()


def test_a_store_that_nobody_needs_leaves_no_directory(tmp_path: Path) -> None:
    store = SwapStore(tmp_path)
    directory = store.directory

    del store

    assert not directory.exists()


DIES = """
import os, pathlib, sys
from sampler.swap import SwapStore
store = SwapStore(pathlib.Path(sys.argv[1]))
entry = store.put([b"what was said"], 1)
print(store.directory, flush=True)
if sys.argv[2] == "killed":
    os._exit(1)
"""


def directory_of_a_process_that_is(how: str, parent: Path) -> Path:
    command = [sys.executable, "-c", DIES, str(parent), how]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return Path(ended.stdout.strip())


@pytest.mark.slow
def test_a_start_removes_what_dead_processes_left_and_nothing_of_living_ones(
    tmp_path: Path,
) -> None:
    living = SwapStore(tmp_path)
    entry = living.put(CHUNKS, 1)
    dead = directory_of_a_process_that_is("killed", tmp_path)
    assert (dead / "0").exists()
    half_made = dead.with_name("process-half-made")
    half_made.mkdir()

    started = SwapStore(tmp_path)

    wait_until_gone(dead)
    wait_until_gone(half_made)
    assert read(entry) == CONTENT
    started.close()
    assert living.directory.exists()
    living.close()
    [root] = tmp_path.iterdir()
    assert list(root.iterdir()) == []


def test_nobody_waits_while_leftovers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = SwapStore(tmp_path)
    leftover = living.directory.with_name("process-dead")
    leftover.mkdir()
    may_go_on = Event()
    remove = shutil.rmtree

    def remove_slowly(path: Path, *, ignore_errors: bool) -> None:
        may_go_on.wait(DEADLINE_SECONDS)
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove_slowly)

    stores = [SwapStore(tmp_path) for _ in range(2)]

    deleted = stores[0].put(CHUNKS, 1)
    deleted.delete()
    wait_until_empty(stores[0])
    assert read(stores[1].put(CHUNKS, 1)) == CONTENT
    assert leftover.exists()
    may_go_on.set()
    wait_until_gone(leftover)
    for store in (*stores, living):
        store.close()


def test_a_process_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """Whatever it has locked."""
    hanging = SwapStore(tmp_path)
    root = hanging.directory.parent
    with ExitStack() as locked:
        for name in ("lock", "process-dead.lock"):
            locked.enter_context(FileLock(root / name))

        store = SwapStore(tmp_path)

    assert read(store.put(CHUNKS, 1)) == CONTENT
    store.close()
    hanging.close()


def test_a_directory_that_finds_no_room_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / f"suspended-sampling-{os.getuid()}"
    root.mkdir()

    make = Path.mkdir

    def fail(path: Path, mode: int = 0o777, **options: bool) -> None:
        if path.name.startswith("process-"):
            raise OSError(ENOSPC, "full")
        make(path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fail)
        with pytest.raises(SwapError, match="full"):
            SwapStore(tmp_path)

    assert list(root.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_ends_leaves_no_directory(tmp_path: Path) -> None:
    directory = directory_of_a_process_that_is("done", tmp_path)

    assert directory.parent.parent == tmp_path
    assert not directory.exists()


@pytest.mark.slow
def test_processes_that_start_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        DIES.replace("print(", "print(len(os.listdir(store.directory)), "),
    ]
    running = [
        subprocess.Popen([*command, str(tmp_path), "done"], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]

    said = [process.communicate()[0].split()[0] for process in running]

    assert said == ["1"] * 4, "a file"


def test_by_default_it_is_where_the_system_keeps_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    store = SwapStore()

    assert store.directory.is_relative_to(tmp_path)
    store.close()


def test_a_directory_that_another_user_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be read by that user."""
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)

    with pytest.raises(SwapError, match="not a directory of this user"):
        SwapStore(tmp_path)


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"suspended-sampling-{os.getuid()}").symlink_to(elsewhere)

    with pytest.raises(SwapError, match="not a directory of this user"):
        SwapStore(tmp_path)

    assert list(elsewhere.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(SwapError, match="cannot make"):
        SwapStore(file)
