"""Many suspended runs, each on a socket of its own: what they hold, and whether all come back.

The accelerator is simulated, but its caches are as large as those of SmolLM2-135M, and what it says
depends on each position of them. One server has memory for all its runs, and it is seen what each
one takes of it. Another has memory for a few, the others are in files, and each answer is compared
with that of the same run where there was room. No two runs share a block. What it takes to suspend
and to resume is measured on both in turns, some runs at a time.
"""

import json
import math
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
import psutil

from scripts.benchmarks import passage
from scripts.benchmarks.bench import Bench
from scripts.benchmarks.figures import Figure, figure
from scripts.benchmarks.floors import kv_bytes
from scripts.benchmarks.pairing import again, wait_until_idle
from scripts.benchmarks.raw_socket import RawSocket, SocketError
from scripts.benchmarks.section import Grid, Section
from scripts.benchmarks.served import Served, serving

JsonObject = dict[str, Any]

_TOOL = "look_up"
_RESPONSES = "/v1/responses?dialect=append"
_DAY_SECONDS = "86400"
_ANSWER_TOKENS = 16

_RUN_TOKENS = 2304
"""More than a run has in the end."""
_MEMORY_SHARE = 0.5
"""Of what is free, for the runs that stay in memory."""
_DISK_SHARE = 0.8
"""Of what is free, for those that are in files."""
_OTHER_FILES = 256
"""That are open beside the sockets."""
_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that would have the caches in memory once more."""

_KIB, _GIB = 1 << 10, 1 << 30


class WrongAnswerError(RuntimeError):
    """A run that was suspended went on otherwise than the same run where there was room."""


def run(bench: Bench) -> Section:
    """Measure the section."""
    sizes = Sizes.asked(bench)
    with (
        tempfile.TemporaryDirectory(dir=sizes.directory) as folder,
        serving(_options(sizes.num_kept + 2, "preserve", sizes)) as roomy,
        serving([*_options(sizes.num_in_pool, "swap", sizes), "--swap-dir", folder]) as narrow,
    ):
        measured = _measure(roomy, narrow, sizes)
    return Section(
        "suspended-sockets",
        f"{sizes.num_swapped:,} suspended runs on as many sockets; the model is simulated",
        [
            Grid(f"{sizes.num_kept:,} runs in memory, KiB a run", _column(measured.memory)),
            Grid(
                f"{sizes.num_swapped:,} runs, memory for {sizes.num_in_pool:,}, others in files",
                _column(measured.outcome),
            ),
            Grid("a run, ms", times(measured.suspend_ms, measured.resume_ms)),
        ],
        {
            "is_simulated": True,
            "tokens_a_run": measured.tokens_a_run,
            "swap_directory": str(sizes.directory),
        },
        [
            *sizes.notes,
            "suspend: request sent to suspended; the next run of a batch waits until this one is "
            "swapped out, so the first one does not count",
            "all answers are those of the same runs where there was room",
        ],
    )


@dataclass(frozen=True)
class Sizes:
    """How many runs there are room for."""

    num_kept: int
    """In memory: an even number, of which one half is measured apart from the other."""
    num_swapped: int
    """On sockets, where there is memory for few."""
    num_in_pool: int
    """Those few."""
    idle_seconds: float
    directory: Path
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def asked(bench: Bench) -> "Sizes":
        """Return what is asked for, as far as this machine has room."""
        directory = directory_with_room()
        rooms = {
            "disk": _DISK_SHARE * shutil.disk_usage(directory).free / kv_bytes(_RUN_TOKENS),
            "open files": raised_open_files() - _OTHER_FILES,
        }
        memory = _MEMORY_SHARE * psutil.virtual_memory().available / kv_bytes(_RUN_TOKENS)
        num_swapped, fewer_swapped = fitting(bench.pick(1000, 12), rooms)
        num_kept, fewer_kept = fitting(bench.pick(100, 8), {"memory": memory})
        return Sizes(
            max(2, min(num_kept, num_swapped) // 2 * 2),
            num_swapped,
            max(2, num_swapped // 20),
            bench.pick(10.0, 1.5),
            directory,
            [*fewer_swapped, *fewer_kept],
        )


def fitting(number: int, rooms: dict[str, float]) -> tuple[int, list[str]]:
    """Return ``number`` or, where there is less room than that, what there is room for; and a note
    of what there is too little of.

    Raises:
        RuntimeError: there is no room for a single one.
    """
    what, room = min(rooms.items(), key=lambda item: item[1])
    if room < 1:
        raise RuntimeError(f"there is too little of this for a single run: {what}")
    if room >= number:
        return number, []
    return math.floor(room), [f"{math.floor(room):,} runs instead of {number:,}: {what}"]


def directory_with_room() -> Path:
    """Return where large files can be: on a disk, not in memory."""
    temporary = Path(tempfile.gettempdir())
    types = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    if file_system(temporary.resolve(), types) not in _IN_MEMORY:
        return temporary
    return platformdirs.user_cache_path("suspended-sampling", ensure_exists=True)


def file_system(path: Path, types: dict[str, str]) -> str | None:
    """Return the type of the file system that ``path``, which is absolute, is on.

    Args:
        path: of a file or a directory.
        types: of each file system, by where it is mounted.
    """
    return next((types[str(at)] for at in (path, *path.parents) if str(at) in types), None)


def raised_open_files() -> int:
    """Let this process, and those that it starts, have as many files open as it may, and return how
    many these are."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = 1 << 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def _options(num_runs: int, policy: str, sizes: Sizes) -> list[str]:
    """Return those of a server that has memory for ``num_runs``."""
    simulated = ["--simulate", "0", "--simulate-calls", "1", "--simulate-tool", _TOOL]
    return [
        *simulated,
        *("--simulate-words", str(_ANSWER_TOKENS)),
        *("--kv-memory", f"{num_runs * kv_bytes(_RUN_TOKENS) / _GIB:.6f}"),
        *("--suspend-policy", policy),
        *("--max-connections", str(sizes.num_swapped + 2)),
        *("--suspend-ttl", _DAY_SECONDS, "--connection-lifetime", _DAY_SECONDS),
    ]


# --- Runs -----------------------------------------------------------------------------------------


class Client:
    """One run on a socket of its own: it is suspended at a call, and answers after that."""

    def __init__(self, server: Served, number: int) -> None:
        self._socket = RawSocket(server.port, _RESPONSES)
        self._number = number
        self._call_id = ""
        self.num_tokens = 0
        """Of its context, once it is suspended."""
        self.said = ""
        """What it answered, once it is over."""

    def suspend(self) -> float:
        """Have the run begin, and return the milliseconds until it is suspended."""
        began_at = time.monotonic()
        self._socket.send(create(self._number))
        response = self._closing("response.done")
        elapsed = time.monotonic() - began_at
        self._call_id = response["output"][-1]["call_id"]
        self.num_tokens = response["usage"]["total_tokens"]
        return 1000 * elapsed

    def append(self) -> None:
        """Send the output of the call."""
        output = {"type": "function_call_output", "call_id": self._call_id, "output": "7 °C"}
        self._socket.send({"type": "response.append", "input": [output]})

    def finish(self) -> None:
        """Read to the end of the run."""
        response = self._closing("response.completed")
        self.said = response["output"][-1]["content"][0]["text"]

    def resume(self) -> float:
        """Have the run go on, and return the milliseconds until it is over."""
        began_at = time.monotonic()
        self.append()
        self.finish()
        return 1000 * (time.monotonic() - began_at)

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def _closing(self, event_type: str) -> JsonObject:
        event = json.loads(self._socket.segment()[-1][1])
        if event["type"] != event_type:
            raise SocketError(f"expected {event_type}, got {event}")
        response: JsonObject = event["response"]
        return response


def create(number: int) -> JsonObject:
    """Return the request of a run of about 2,000 tokens. The first words tell it from all others,
    so that they have no block in common."""
    parameters = {"type": "object", "properties": {}}
    return {
        "type": "response.create",
        "instructions": f"{number} is your number.",
        "input": [{"role": "user", "content": passage.text()}],
        "tools": [{"type": "function", "name": _TOOL, "parameters": parameters}],
        "temperature": 0,
        "store": False,
    }


@contextmanager
def _clients(server: Served, number: int) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        clients = [Client(server, index) for index in range(number)]
        for client in clients:
            stack.callback(client.close)
        yield clients


# --- What is measured -----------------------------------------------------------------------------


_KEPT, _SWAPPED = "in memory", "in files"
_BATCH = 4
"""Runs of one server before it is the other one's turn."""

Times = dict[str, list[float]]
"""Milliseconds of runs, by where they are."""


@dataclass(frozen=True)
class _Measured:
    """What runs came to, on both servers."""

    memory: dict[str, Figure]
    outcome: dict[str, Figure]
    suspend_ms: Times
    resume_ms: Times
    tokens_a_run: int


def _measure(roomy: Served, narrow: Served, sizes: Sizes) -> _Measured:
    _whole_run(roomy, sizes.num_swapped)  # what is made once is not to count
    resident, kv = roomy.resident_bytes(), _kv_bytes(roomy, "used")
    settle = partial(wait_until_idle, [roomy.pid, narrow.pid])
    with _clients(roomy, sizes.num_kept) as kept, _clients(narrow, sizes.num_swapped) as swapped:
        others = swapped[sizes.num_kept // 2 :]
        suspend_ms = in_turns(kept, swapped, Client.suspend, settle)
        for client in others:
            client.suspend()
        resident, kv = roomy.resident_bytes() - resident, _kv_bytes(roomy, "used") - kv
        outcome = _at_rest(narrow, sizes.idle_seconds)
        resume_ms = in_turns(kept, swapped, Client.resume, settle)
        outcome |= _resumed_at_once(others) | _work(narrow)
    outcome["answers after all left, s"] = figure([_seconds_to_answer(narrow)], "s")
    answers = [client.said for client in kept]
    answers += [_whole_run(roomy, number) for number in range(len(kept), len(swapped))]
    check([client.said for client in swapped], answers[: len(swapped)])
    return _Measured(
        memory_a_run(resident, kv, len(kept)),
        {"resumed": figure([len(swapped)], "runs"), **outcome},
        suspend_ms,
        resume_ms,
        kept[0].num_tokens,
    )


Each = TypeVar("Each")


def in_turns(
    kept: Sequence[Each],
    swapped: Sequence[Each],
    measure: Callable[[Each], float],
    settle: Callable[[], object],
) -> Times:
    """Return what ``measure`` gives for all of ``kept``, which is two halves of the same, and for
    half as many of ``swapped``.

    The first of each batch does not wait for what the one before has left to be done, so it counts
    only where it is alone.
    """
    half = len(kept) // 2
    places = {_KEPT: kept[:half], _SWAPPED: swapped[:half], again(_KEPT): kept[half:]}
    times: Times = {name: [] for name in places}
    for start in range(0, half, _BATCH):
        for name, each in places.items():
            settle()
            batch = [measure(one) for one in each[start : start + _BATCH]]
            times[name] += batch[1:] or batch
    return times


def _whole_run(server: Served, number: int) -> str:
    client = Client(server, number)
    try:
        client.suspend()
        client.resume()
        return client.said
    finally:
        client.close()


def memory_a_run(resident: int, kv: int, number: int) -> dict[str, Figure]:
    """Return what each of ``number`` runs takes of ``resident`` bytes, of which ``kv`` are keys and
    values."""
    each, kv_each = resident / number / _KIB, kv / number / _KIB
    return {
        "resident": figure([each], "KiB"),
        "keys and values": figure([kv_each], "KiB"),
        "beside them": figure([each - kv_each], "KiB"),
        "resident / keys and values": figure([each / kv_each], "x"),
    }


def _kv_bytes(server: Served, state: str) -> int:
    return int(server.metric("suspend_kv_blocks", state=state)) * kv_bytes(1)


def _at_rest(server: Served, idle_seconds: float) -> dict[str, Figure]:
    """Return what a server holds and does while all its runs are suspended."""
    swapped = _kv_bytes(server, "swapped")
    idle = _idle_share(server, idle_seconds)
    return {
        "swapped out, GiB": figure([swapped / _GIB], "GiB"),
        "server's memory, GiB": figure([server.resident_bytes() / _GIB], "GiB"),
        "idle, % of a core": figure([100 * idle], "%"),
    }


def _resumed_at_once(clients: Sequence[Client]) -> dict[str, Figure]:
    began_at = time.monotonic()
    for client in clients:
        client.append()
    for client in clients:
        client.finish()
    rate = len(clients) / (time.monotonic() - began_at)
    return {"resumed at once, a second": figure([rate], "runs/s")}


def _work(server: Served) -> dict[str, Figure]:
    return {
        "swaps out": figure([server.metric("suspend_swaps_out_total")], ""),
        "swaps in": figure([server.metric("suspend_swaps_in_total")], ""),
        "computed again": figure([server.metric("suspend_tokens_reforwarded_total")], "tokens"),
    }


def _seconds_to_answer(server: Served) -> float:
    began_at = time.monotonic()
    server.metric("suspend_swaps_in_total")
    return time.monotonic() - began_at


def _idle_share(server: Served, seconds: float) -> float:
    """Return how much of a core the server uses while all its runs are suspended."""
    time.sleep(1.0)  # what comes of the last suspension
    before, began_at = server.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    return (server.cpu_seconds() - before) / (time.monotonic() - began_at)


def check(found: Sequence[str], expected: Sequence[str]) -> None:
    """Make sure that all answers are as expected, and that these are different.

    Raises:
        WrongAnswerError: they are not.
    """
    wrong = [
        index for index, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1
    ]
    if wrong:
        raise WrongAnswerError(f"{len(wrong)} of {len(found)} runs, the first of them {wrong[0]}")
    if len(set(expected)) < len(expected):
        raise WrongAnswerError("two runs answer the same, so the answers show nothing")


def _column(figures: dict[str, Figure]) -> dict[str, dict[str, Figure]]:
    return {name: {"runs": one} for name, one in figures.items()}


def times(suspend_ms: Times, resume_ms: Times) -> dict[str, dict[str, Figure]]:
    """Return what it takes to suspend and to resume where there is room, where there is little,
    and what of that is swapping."""
    rows = {
        name: {"suspend": figure(suspend_ms[name], "ms"), "resume": figure(resume_ms[name], "ms")}
        for name in suspend_ms
    }
    swapping = {
        name: figure([rows[_SWAPPED][name].median - one.median], "ms")
        for name, one in rows[_KEPT].items()
    }
    return {**rows, "swapping, by the medians": swapping}
