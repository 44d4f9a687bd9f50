import asyncio
import resource
import signal
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.codec import decode_object, encode
from server.response_store import APPLICATION_ID, ResponseStore, StoredResponse, StoreError
from tests.protocol.streams import new_response, new_stream, two_segments
from tests.server.played_runs import message, stored

TTL_SECONDS = 1000.0


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
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "responses.db"


@pytest.fixture
def store(path: Path, clock: Clock) -> Iterator[ResponseStore]:
    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        yield store


def response(
    id_: str = "resp_1", key: str = "", status: str = "completed", **changes: Any
) -> StoredResponse:
    resource = msgspec.structs.replace(new_response(), id=id_, status=status)
    return stored(resource, key=key, **changes)


def rows(path: Path) -> int:
    """Return how many responses are in a file that is closed."""
    with closing(sqlite3.connect(path)) as database:
        [(number,)] = database.execute("SELECT count(*) FROM responses")
        return int(number)


# --- Keeping and finding -------------------------------------------------------------------------


async def test_a_response_is_got_as_it_was_put(store: ResponseStore) -> None:
    events = two_segments(stream := new_stream())
    put = stored(
        stream.response,
        events,
        input_items=[message("msg_in_1", "Wie ist das Wetter in Tromsø? 🌧"), {"id": "x", "n": 1.5}],
        conversation=bytes(range(256)),
    )

    await store.put(put)

    assert await store.get("", "resp_1") == put
    assert len(put.events) == len(events)
    assert put.item_ids == ("msg_1", "fc_1", "fc_2", "msg_2")


async def test_a_response_without_events_and_items_is_got_as_it_was_put(
    store: ResponseStore,
) -> None:
    put = response(input_items=[], conversation=b"", item_ids=())

    await store.put(put)

    assert await store.get("", "resp_1") == put


async def test_what_is_put_again_takes_the_place_of_what_was(store: ResponseStore) -> None:
    await store.put(response(item_ids=("msg_1", "msg_2"), status="queued"))
    second = response(item_ids=("msg_2", "msg_3"), conversation=b"longer")

    await store.put(second)

    assert await store.get("", "resp_1") == second
    assert await store.get_by_item("", "msg_1") is None
    assert await store.get_by_item("", "msg_2") == second
    assert await store.get_by_item("", "msg_3") == second


async def test_what_was_never_put_is_not_found(store: ResponseStore) -> None:
    await store.put(response(item_ids=("msg_1",)))

    assert await store.get("", "resp_2") is None
    assert await store.get("", "msg_1") is None
    assert await store.get_by_item("", "msg_2") is None
    assert await store.get_by_item("", "resp_1") is None
    assert not await store.delete("", "resp_2")


async def test_an_item_of_two_responses_is_found_in_the_later_one(store: ResponseStore) -> None:
    await store.put(response("resp_1", item_ids=("msg_1",)))
    await store.put(response("resp_2", item_ids=("msg_1", "msg_2")))

    found = await store.get_by_item("", "msg_1")

    assert found is not None
    assert found.id == "resp_2"


async def test_an_id_that_is_given_twice_is_one_item(store: ResponseStore) -> None:
    put = response(item_ids=("msg_1", "msg_1"))

    await store.put(put)

    assert await store.get_by_item("", "msg_1") == put


@pytest.mark.parametrize(
    "id_", ["", "a' OR '1'='1", "../../etc/passwd", "a\x00b", "é" * 300, "%", "_", "RESP_1"]
)
async def test_an_id_is_nothing_but_an_id(store: ResponseStore, id_: str) -> None:
    await store.put(response("resp_1", item_ids=("resp_1",)))
    assert await store.get("", id_) is None
    assert await store.get_by_item("", id_) is None
    assert not await store.delete("", id_)
    odd = response(id_, item_ids=(id_,))

    await store.put(odd)

    assert await store.get("", id_) == odd
    assert await store.get_by_item("", id_) == odd


# --- Keys ----------------------------------------------------------------------------------------


async def test_a_key_sees_nothing_of_another(store: ResponseStore) -> None:
    await store.put(put := response(key="ada", item_ids=("msg_1",)))

    for other in ("", "bob", "ADA"):
        assert await store.get(other, "resp_1") is None
        assert await store.get_by_item(other, "msg_1") is None
        assert not await store.delete(other, "resp_1")
    assert await store.get("ada", "resp_1") == put


async def test_the_same_ids_under_two_keys_are_two_responses(store: ResponseStore) -> None:
    await store.put(response(key="ada", item_ids=("msg_1",)))
    await store.put(of_bob := response(key="bob", item_ids=("msg_1",), conversation=b"bob's"))

    assert await store.delete("ada", "resp_1")

    assert await store.get("ada", "resp_1") is None
    assert await store.get_by_item("ada", "msg_1") is None
    assert await store.get("bob", "resp_1") == of_bob
    assert await store.get_by_item("bob", "msg_1") == of_bob


# --- Deleting and expiring -----------------------------------------------------------------------


async def test_a_response_is_deleted_with_its_items(store: ResponseStore) -> None:
    await store.put(response("resp_1", item_ids=("msg_1", "msg_2")))
    await store.put(kept := response("resp_2", item_ids=("msg_2",)))

    assert await store.delete("", "resp_1")

    assert await store.get("", "resp_1") is None
    assert await store.get_by_item("", "msg_1") is None
    assert await store.get_by_item("", "msg_2") == kept
    assert not await store.delete("", "resp_1")


async def test_an_expired_response_is_out_of_sight_at_once(
    store: ResponseStore, clock: Clock
) -> None:
    await store.put(response(item_ids=("msg_1",)))
    clock.now += TTL_SECONDS - 0.001
    assert await store.get("", "resp_1") is not None
    assert await store.get_by_item("", "msg_1") is not None

    clock.now += 0.001

    assert await store.get("", "resp_1") is None
    assert await store.get_by_item("", "msg_1") is None
    assert not await store.delete("", "resp_1")


async def test_a_response_that_is_put_again_lives_anew(store: ResponseStore, clock: Clock) -> None:
    await store.put(response())
    clock.now += TTL_SECONDS - 1

    await store.put(response())

    clock.now += TTL_SECONDS - 1
    assert await store.get("", "resp_1") is not None


async def test_expired_responses_are_deleted_once_a_minute_at_most(
    path: Path, clock: Clock
) -> None:
    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        await store.put(response("resp_1"))
        clock.now += 50
        await store.put(response("resp_2"))
        clock.now += TTL_SECONDS - 50  # the first has expired
        await store.put(response("resp_3"))
        clock.now += 59  # so has the second
        await store.put(response("resp_4"))
    assert rows(path) == 3

    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        await store.put(response("resp_5"))

    assert rows(path) == 3


async def test_a_shorter_time_to_live_holds_for_what_is_there(path: Path, clock: Clock) -> None:
    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        await store.put(response())
    clock.now += 10

    with closing(ResponseStore(path, 10, clock)) as store:
        assert await store.get("", "resp_1") is None


async def test_without_end_nothing_expires(path: Path, clock: Clock) -> None:
    with closing(ResponseStore(path, float("inf"), clock)) as store:
        await store.put(response("resp_1"))
        clock.now += 1e12
        await store.put(response("resp_2"))

        assert await store.get("", "resp_1") is not None


# --- Many at once --------------------------------------------------------------------------------


async def test_many_callers_do_not_get_into_each_others_way(store: ResponseStore) -> None:
    async def live(number: int) -> None:
        id_, key = f"resp_{number}", f"key_{number % 3}"
        await store.put(response(id_, key, status="queued"))
        await store.put(put := response(id_, key, item_ids=(f"msg_{number}",)))
        assert await store.get(key, id_) == put
        assert await store.get_by_item(key, f"msg_{number}") == put
        assert await store.delete(key, id_) == (number % 2 == 0)

    async def keep(number: int) -> None:
        await store.put(response(f"kept_{number}"))

    async with asyncio.TaskGroup() as tasks:
        for number in range(0, 40, 2):
            tasks.create_task(live(number))
            tasks.create_task(keep(number))

    assert await store.get("", "kept_38") is not None


async def test_a_put_whose_caller_is_cancelled_is_whole_or_not_there(store: ResponseStore) -> None:
    puts = [
        asyncio.ensure_future(store.put(response(f"resp_{number}", item_ids=(f"msg_{number}",))))
        for number in range(10)
    ]
    await puts[0]

    for put in puts[1:]:
        put.cancel()
    await asyncio.gather(*puts, return_exceptions=True)

    assert await store.get("", "resp_0") is not None
    for number in range(10):
        found = await store.get("", f"resp_{number}")
        assert await store.get_by_item("", f"msg_{number}") == found


# --- Another process -----------------------------------------------------------------------------


async def test_what_was_put_is_there_after_a_restart(path: Path, clock: Clock) -> None:
    put = response(item_ids=("msg_1",))
    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        await store.put(put)

    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        assert await store.get("", "resp_1") == put
        assert await store.get_by_item("", "msg_1") == put


@pytest.mark.parametrize("status", ["queued", "in_progress"])
async def test_what_a_dead_process_left_unfinished_has_failed(
    path: Path, clock: Clock, status: str
) -> None:
    put = response(status=status, item_ids=("msg_1",), events=[b'{"type":"response.created"}'])
    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        await store.put(put)
        assert await store.get("", "resp_1") == put

    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        found = await store.get("", "resp_1")

    assert found is not None
    assert decode_object(found.response) == decode_object(put.response) | {
        "status": "failed",
        "error": {
            "code": "server_error",
            "message": "the server stopped before the response was finished",
        },
    }
    assert msgspec.structs.replace(found, response=put.response) == put


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "cancelled"])
async def test_what_was_finished_stays_what_it_is(path: Path, clock: Clock, status: str) -> None:
    put = response(status=status)
    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        await store.put(put)

    with closing(ResponseStore(path, TTL_SECONDS, clock)) as store:
        assert await store.get("", "resp_1") == put


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
import msgspec
from server.response_store import ResponseStore, StoredResponse

async def main():
    store = ResponseStore(Path(sys.argv[1]), 1000.0)
    for data in sys.stdin.buffer:
        await store.put(msgspec.json.decode(data, type=StoredResponse))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_process_loses_nothing_that_was_put(path: Path) -> None:
    finished, queued = response("resp_1"), response("resp_2", status="queued")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(path), stdin=asyncio.subprocess.PIPE
    )
    await process.communicate(encode(finished) + b"\n" + encode(queued))
    assert process.returncode == -signal.SIGKILL

    with closing(ResponseStore(path, TTL_SECONDS)) as store:
        assert await store.get("", "resp_1") == finished
        found = await store.get("", "resp_2")

    assert found is not None
    assert decode_object(found.response)["status"] == "failed"


# --- The file ------------------------------------------------------------------------------------


async def test_the_file_is_for_the_eyes_of_its_owner(path: Path, store: ResponseStore) -> None:
    await store.put(response())

    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes[path.name] == 0o600
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_could_read_is_closed_to_them(path: Path) -> None:
    ResponseStore(path, TTL_SECONDS).close()
    path.chmod(0o644)

    ResponseStore(path, TTL_SECONDS).close()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()

    ResponseStore(tmp_path / "empty.db", TTL_SECONDS).close()

    assert rows(tmp_path / "empty.db") == 0


def test_a_file_has_one_owner_at_a_time(path: Path, store: ResponseStore) -> None:
    with pytest.raises(StoreError, match="in use"):
        ResponseStore(path, TTL_SECONDS)

    store.close()
    ResponseStore(path, TTL_SECONDS).close()


def fill(path: Path) -> None:
    """Make a store of many pages."""

    async def put() -> None:
        with closing(ResponseStore(path, TTL_SECONDS)) as store:
            for number in range(20):
                await store.put(response(f"resp_{number}", conversation=bytes(5000)))

    asyncio.run(put())


def write_garbage(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"This was once a text about the weather in Oslo. " * 100)


def cut_short(path: Path) -> None:
    fill(path)
    path.write_bytes(path.read_bytes()[:6000])


def overwrite_pages(path: Path) -> None:
    fill(path)
    data = bytearray(path.read_bytes())
    data[4096:20000] = b"\xff" * (20000 - 4096)
    path.write_bytes(data)


def make_foreign(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")


def make_newer(path: Path) -> None:
    ResponseStore(path, TTL_SECONDS).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")


def make_folder(path: Path) -> None:
    path.mkdir(parents=True)


def put_file_in_place_of_folder(path: Path) -> None:
    path.parent.touch()


BAD_FILES = {
    "garbage": (write_garbage, "it is damaged"),
    "cut short": (cut_short, "it is damaged"),
    "overwritten": (overwrite_pages, "it is damaged"),
    "foreign": (make_foreign, "another program"),
    "newer": (make_newer, "version 99"),
    "a folder": (make_folder, "cannot open"),
    "in a file": (put_file_in_place_of_folder, "cannot open"),
}


@pytest.mark.parametrize(("spoil", "why"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_cannot_be_used_is_refused_by_name(
    path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    spoil(path)

    with pytest.raises(StoreError, match=why) as raised:
        ResponseStore(path, TTL_SECONDS)

    assert str(path) in str(raised.value)


def test_a_refused_file_is_left_as_it_was(path: Path) -> None:
    make_foreign(path)
    before = path.read_bytes()

    with pytest.raises(StoreError):
        ResponseStore(path, TTL_SECONDS)

    assert path.read_bytes() == before
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,)


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """Let the disk be full, as it were."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_put_that_fails_changes_nothing(store: ResponseStore) -> None:
    await store.put(put := response(item_ids=("msg_1",)))

    with no_file_longer_than(200_000), pytest.raises(StoreError):
        await store.put(response(item_ids=("msg_2",), conversation=bytes(1_000_000)))

    assert await store.get("", "resp_1") == put
    assert await store.get_by_item("", "msg_1") == put
    assert await store.get_by_item("", "msg_2") is None
    await store.put(later := response(item_ids=("msg_2",), conversation=bytes(1_000_000)))
    assert await store.get_by_item("", "msg_2") == later
