import resource
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.journal import Journal, JournalContents, read_journal

RECORDS = [b'{"run":"run_%d","tokens":%d}' % (number, number * 37) for number in range(12)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def append(journal: Journal, *records: bytes) -> None:
    for record in records:
        with journal.lock:
            journal.append(record)


def keep(*records: bytes) -> Callable[[], Sequence[bytes]]:
    return lambda: records


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """Let the disk be full, as it were. A write that goes over it is cut, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- Appending and reading -----------------------------------------------------------------------


def test_a_record_can_be_read_from_the_moment_it_is_appended(path: Path) -> None:
    with closing(Journal(path)) as journal:
        append(journal, b"one", b"", b"three \xff")

        assert read_journal(path) == JournalContents([b"one", b"", b"three \xff"], 0, False)


def test_a_file_that_is_not_there_is_empty(path: Path) -> None:
    assert read_journal(path) == JournalContents([], 0, False)


def test_a_new_journal_takes_the_place_of_what_was_there(path: Path) -> None:
    path.write_bytes(b"old")

    with closing(Journal(path, [b"kept"])) as journal:
        append(journal, b"new")

    assert read_journal(path).records == [b"kept", b"new"]


def test_the_file_is_for_the_eyes_of_its_owner(path: Path) -> None:
    path.touch(mode=0o644)
    with closing(Journal(path)) as journal:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

        journal.rewrite(keep(b"one"))

        assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- Damage --------------------------------------------------------------------------------------


def file_of(records: Sequence[bytes]) -> bytes:
    with TemporaryDirectory() as folder:
        Journal(Path(folder, "journal"), records).close()
        return Path(folder, "journal").read_bytes()


WHOLE = file_of(RECORDS)


def test_a_last_line_without_end_is_left_out(path: Path) -> None:
    path.write_bytes(WHOLE[:-1])

    assert read_journal(path) == JournalContents(RECORDS[:-1], 0, True)


def test_a_damaged_line_is_left_out_and_those_after_it_are_not(path: Path) -> None:
    path.write_bytes(WHOLE.replace(b"run_3", b"run_8"))

    assert read_journal(path) == JournalContents(RECORDS[:3] + RECORDS[4:], 1, False)


@pytest.mark.slow
@given(position=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255))
def test_no_byte_can_change_without_being_noticed(position: int, byte: int) -> None:
    damaged = WHOLE[:position] + bytes([byte]) + WHOLE[position + 1 :]

    contents = read_bytes(damaged)

    is_noticed = contents.num_damaged > 0 or contents.is_torn
    assert is_noticed == (damaged != WHOLE)
    assert len(contents.records) >= len(RECORDS) - 2  # a changed end of line damages two
    assert is_subsequence(contents.records, RECORDS)


@pytest.mark.slow
@given(
    start=st.integers(0, len(WHOLE)),
    length=st.integers(0, 200),
    replacement=st.binary(max_size=200),
    end=st.integers(0, len(WHOLE) + 200),
)
def test_whatever_becomes_of_the_bytes_what_is_read_was_written(
    start: int, length: int, replacement: bytes, end: int
) -> None:
    damaged = (WHOLE[:start] + replacement + WHOLE[start + length :])[:end]

    assert is_subsequence(read_bytes(damaged).records, RECORDS)


def read_bytes(data: bytes) -> JournalContents:
    with TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        path.write_bytes(data)
        return read_journal(path)


def is_subsequence(some: Sequence[bytes], all_: Sequence[bytes]) -> bool:
    rest = iter(all_)
    return all(record in rest for record in some)


# --- Rewriting -----------------------------------------------------------------------------------


def test_a_rewrite_keeps_what_is_wanted_and_what_is_appended_meanwhile(path: Path) -> None:
    with closing(Journal(path)) as journal:
        append(journal, b"one", b"two")

        def records() -> Iterator[bytes]:
            append(journal, b"meanwhile")
            yield b"two"

        journal.rewrite(records)
        append(journal, b"later")

    assert read_journal(path).records == [b"two", b"meanwhile", b"later"]


def test_until_a_rewrite_is_complete_the_old_file_is(path: Path) -> None:
    with closing(Journal(path)) as journal:
        append(journal, b"one")

        def records() -> Iterator[bytes]:
            append(journal, b"meanwhile")
            assert read_journal(path).records == [b"one", b"meanwhile"]
            yield b"two"

        journal.rewrite(records)


def test_what_a_process_that_died_in_a_rewrite_left_is_no_obstacle(path: Path) -> None:
    path.with_name("journal.new").write_bytes(b"half a li")

    with closing(Journal(path, [b"one"])) as journal:
        path.with_name("journal.new").write_bytes(b"half a li")
        journal.rewrite(keep(b"two"))

    assert read_journal(path) == JournalContents([b"two"], 0, False)
    assert [file.name for file in path.parent.iterdir()] == ["journal"]


def test_a_rewrite_is_due_when_the_file_is_long_and_twice_as_long_as_after_the_last(
    path: Path,
) -> None:
    with closing(Journal(path, max_bytes=1000)) as journal:
        append(journal, bytes(900))
        assert not journal.is_rewrite_due
        append(journal, bytes(900))
        assert journal.is_rewrite_due

        journal.rewrite(keep(bytes(900), bytes(900)))  # all is still wanted

        assert not journal.is_rewrite_due
        append(journal, bytes(900))
        assert not journal.is_rewrite_due
        append(journal, bytes(900))
        assert journal.is_rewrite_due


def test_nothing_is_lost_between_a_thread_that_appends_and_one_that_rewrites(path: Path) -> None:
    records = [b"%d" % number for number in range(2000)]
    appended: list[bytes] = []

    def append_all() -> None:
        for record in records:
            with journal.lock:
                appended.append(record)
                journal.append(record)

    with closing(Journal(path)) as journal:
        thread = Thread(target=append_all)
        thread.start()
        num_rewrites = 0
        while thread.is_alive() or num_rewrites == 0:
            journal.rewrite(lambda: tuple(appended))
            num_rewrites += 1
        thread.join()

    assert read_journal(path) == JournalContents(records, 0, False)


# --- A disk that is full -------------------------------------------------------------------------


def test_a_record_that_does_not_fit_spoils_no_other(path: Path) -> None:
    with closing(Journal(path)) as journal:
        append(journal, b"one")
        with no_file_longer_than(path.stat().st_size + 5), pytest.raises(OSError):
            append(journal, b"two")

        append(journal, b"three")

    assert read_journal(path) == JournalContents([b"one", b"three"], 1, False)


def test_a_record_that_was_not_written_makes_a_rewrite_due(path: Path) -> None:
    with closing(Journal(path)) as journal:
        append(journal, b"one")
        with no_file_longer_than(path.stat().st_size), pytest.raises(OSError):
            append(journal, b"two")
        assert journal.is_rewrite_due

        journal.rewrite(keep(b"one", b"two"))

        assert not journal.is_rewrite_due
        assert read_journal(path) == JournalContents([b"one", b"two"], 0, False)


def test_a_record_that_is_not_written_during_a_rewrite_is_in_the_new_file(path: Path) -> None:
    with closing(Journal(path)) as journal:
        append(journal, b"one")

        def records() -> Iterator[bytes]:
            with no_file_longer_than(path.stat().st_size), pytest.raises(OSError):
                append(journal, b"two")
            yield b"one"

        journal.rewrite(records)

    assert read_journal(path) == JournalContents([b"one", b"two"], 0, False)


def test_a_rewrite_that_fails_changes_nothing(path: Path) -> None:
    with closing(Journal(path)) as journal:
        append(journal, b"one")
        with no_file_longer_than(100), pytest.raises(OSError):
            journal.rewrite(keep(bytes(1000)))

        append(journal, b"two")

        assert read_journal(path) == JournalContents([b"one", b"two"], 0, False)
        journal.rewrite(keep(b"three"))
        assert read_journal(path) == JournalContents([b"three"], 0, False)
