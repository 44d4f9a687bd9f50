"""Many suspended runs, each on a socket of its own: what they hold, and whether all come back.

The accelerator is simulated, but its caches are as large as those of SmolLM2-135M, and what it says
depends on each position of them. First there is memory for all runs, and it is seen what each one
takes of it. Then there is memory for a few, the others are in files, and each answer is compared
with that of the same run where there was room. No two runs share a block.
"""

import json
import math
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from scripts.benchmarks import passage
from scripts.benchmarks.bench import Bench
from scripts.benchmarks.figures import Figure, figure
from scripts.benchmarks.floors import kv_bytes
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
        kept = _keep(roomy, sizes)
        swapped = _swap(narrow, sizes, kept.answers)
    return Section(
        "suspended-sockets",
        f"{sizes.num_swapped:,} suspended runs on as many sockets; the model is simulated",
        [
            Grid(f"{sizes.num_kept:,} runs in memory, KiB a run", _column(kept.memory)),
            Grid(
                f"{sizes.num_swapped:,} runs, memory for {sizes.num_in_pool:,}, others in files",
                _column(swapped.outcome),
            ),
            Grid("a run, ms", _times(kept, swapped)),
        ],
        {
            "is_simulated": True,
            "tokens_a_run": kept.tokens_a_run,
            "swap_directory": str(sizes.directory),
        },
        [
            *sizes.notes,
            "suspend: request sent to suspended; the next run waits until this one is swapped out",
            "all answers are those of the same runs where there was room",
        ],
    )


@dataclass(frozen=True)
class Sizes:
    """How many runs there are room for."""

    num_kept: int
    """In memory."""
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
        num_swapped, fewer_swapped = fitting(bench.pick(1000, 25), rooms)
        num_kept, fewer_kept = fitting(bench.pick(100, 10), {"memory": memory})
        return Sizes(
            min(num_kept, num_swapped),
            num_swapped,
            max(2, num_swapped // 20),
            bench.pick(10.0, 3.0),
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

    def answer(self) -> str:
        """Read to the end of the run, and return what it answers."""
        response = self._closing("response.completed")
        return str(response["output"][-1]["content"][0]["text"])

    def resume(self) -> tuple[float, str]:
        """Have the run go on, and return the milliseconds until it is over, and its answer."""
        began_at = time.monotonic()
        self.append()
        answer = self.answer()
        return 1000 * (time.monotonic() - began_at), answer

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


@dataclass(frozen=True)
class _Kept:
    """What runs came to that stayed in memory."""

    memory: dict[str, Figure]
    suspend_ms: Sequence[float]
    resume_ms: Sequence[float]
    answers: Sequence[str]
    """Of all runs, those included that are swapped out later."""
    tokens_a_run: int


def _keep(server: Served, sizes: Sizes) -> _Kept:
    _whole_run(server, sizes.num_swapped)  # what is made once is not to count
    blocks_before = server.metric("suspend_kv_blocks", state="used")
    before = server.resident_bytes()
    with _clients(server, sizes.num_kept) as clients:
        suspend_ms = [client.suspend() for client in clients]
        resident = server.resident_bytes() - before
        blocks = server.metric("suspend_kv_blocks", state="used") - blocks_before
        resumed = [client.resume() for client in clients]
        tokens_a_run = clients[0].num_tokens
    others = range(sizes.num_kept, sizes.num_swapped)
    return _Kept(
        memory_a_run(resident, int(blocks) * kv_bytes(1), sizes.num_kept),
        suspend_ms,
        [elapsed for elapsed, _ in resumed],
        [*(answer for _, answer in resumed), *(_whole_run(server, number) for number in others)],
        tokens_a_run,
    )


def _whole_run(server: Served, number: int) -> str:
    client = Client(server, number)
    try:
        client.suspend()
        _, answer = client.resume()
        return answer
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


@dataclass(frozen=True)
class _Swapped:
    """What runs came to that were swapped out."""

    outcome: dict[str, Figure]
    suspend_ms: Sequence[float]
    resume_ms: Sequence[float]


def _swap(server: Served, sizes: Sizes, answers: Sequence[str]) -> _Swapped:
    with _clients(server, sizes.num_swapped) as clients:
        suspend_ms = [client.suspend() for client in clients]
        swapped = server.metric("suspend_kv_blocks", state="swapped") * kv_bytes(1)
        idle = _idle_share(server, sizes.idle_seconds)
        resident = server.resident_bytes()
        one_by_one = clients[: sizes.num_in_pool]
        resumed = [client.resume() for client in one_by_one]
        began_at = time.monotonic()
        at_once = clients[sizes.num_in_pool :]
        for client in at_once:
            client.append()
        found = [answer for _, answer in resumed] + [client.answer() for client in at_once]
        elapsed = time.monotonic() - began_at
        swaps = {name: server.metric(f"suspend_swaps_{name}_total") for name in ("out", "in")}
        reforwarded = server.metric("suspend_tokens_reforwarded_total")
    began_at = time.monotonic()  # all have left at once
    server.metric("suspend_swaps_in_total")
    busy_seconds = time.monotonic() - began_at
    check(found, answers)
    outcome = {
        "resumed": figure([len(found)], "runs"),
        "swapped out, GiB": figure([swapped / _GIB], "GiB"),
        "server's memory, GiB": figure([resident / _GIB], "GiB"),
        "idle, % of a core": figure([100 * idle], "%"),
        "resumed at once, a second": figure([len(at_once) / elapsed], "runs/s"),
        "swaps out": figure([swaps["out"]], ""),
        "swaps in": figure([swaps["in"]], ""),
        "computed again": figure([reforwarded], "tokens"),
        "answers after all left, s": figure([busy_seconds], "s"),
    }
    return _Swapped(outcome, suspend_ms, [elapsed for elapsed, _ in resumed])


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


def _times(kept: _Kept, swapped: _Swapped) -> dict[str, dict[str, Figure]]:
    def row(suspend_ms: Sequence[float], resume_ms: Sequence[float]) -> dict[str, Figure]:
        return {"suspend": figure(suspend_ms, "ms"), "resume": figure(resume_ms, "ms")}

    rows = {
        "in memory": row(kept.suspend_ms, kept.resume_ms),
        "in files": row(swapped.suspend_ms, swapped.resume_ms),
    }
    swapping = {
        name: figure([rows["in files"][name].median - one.median], "ms")
        for name, one in rows["in memory"].items()
    }
    return {**rows, "swapping, by the medians": swapping}
