"""What the server adds to each token that it streams, and to each append.

No model runs: the accelerator is simulated. The server is a process of its own, the client reads
bytes and counts them. What is below the server is measured beside it, in turns (``floors``): the
engine alone, which samples and sends nothing; the steps of the simulated model, which writes as
much as a real one for each token; and a bare application under the same configuration, which
encodes and sends an event for each token and does nothing else.

Appends go to a server whose model has a pace. One that is as fast as can be holds the interpreter,
as no accelerator would, until it is ahead by all that it may, and the first event waits for that.
"""

import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.figures import Figure, figure, ratio
from scripts.benchmarks.floors import TOOL, floors_command, kv_bytes
from scripts.benchmarks.pairing import again, alternate, wait_until_idle
from scripts.benchmarks.raw_socket import RawSocket, SocketError, skim_all
from scripts.benchmarks.section import Grid, Section
from scripts.benchmarks.served import Served, running, serving

JsonObject = dict[str, Any]
Rows = dict[str, dict[str, Figure]]

RESPONSES = "/v1/responses?dialect=append"

_STREAMS = (8, 1)
"""Of the eight first: with that all memory has been touched, which costs more than a token."""
_RATE = 4000.0
"""Tokens a second of each stream that a server is asked to keep up with."""
_PACE = 200.0
"""About what the embedded model samples a second, alone."""
_CONTEXT = 8192
_AROUND_TOKENS = 512
"""More than a prompt, a call and its output take."""
_REST_SECONDS = 0.0002


def run(bench: Bench) -> Section:
    """Measure the section."""
    tokens = bench.pick(4000, 500)
    held = bench.pick(4000, 1000)  # or most of the time would be that of the requests
    room = (max(_STREAMS) + 1) * (held + _AROUND_TOKENS)
    with (
        _simulating(0, room) as server,
        running(floors_command(0, room)) as floors,
        _simulating(_RATE, room) as fast,
        running(floors_command(_PACE, 10 * _CONTEXT)) as slow,
    ):
        _wait_for(server, floors, fast, slow)
        cpu = _cpu_per_token(server, floors, tokens, bench.repeats(7, 2), bench.pick(2, 1))
        trips = _round_trips(fast, floors, bench.pick(100, 15), bench.repeats(5, 2))
        reached = _reached(fast, held, bench.repeats(3, 1))
        paced = _paced(slow, bench.pick(400, 100), bench.repeats(3, 1))
        resumes = _resumes(slow, bench.pick(100, 15), bench.repeats(3, 1))
    return Section(
        "server-cost",
        "what the server adds to tokens and to appends; the model is simulated",
        [
            Grid("CPU per token, tokens back to back, µs", cpu),
            Grid(f"streams at {_RATE:,.0f} tokens/s each", reached),
            Grid(f"a token's way at {_PACE:g} tokens/s, sampled to read by the client, ms", paced),
            Grid("a small append on an idle server, sent to first event read, µs", trips),
            Grid(
                f"a resume while 8 runs decode at {_PACE:g} tokens/s, append received, ms", resumes
            ),
        ],
        {"is_simulated": True, "tokens": tokens},
        [
            "the model's step: of the simulated one, by the server's own clock",
            "a step in flight is waited for, so a step begins up to "
            f"{1000 / _PACE:g} ms after its chunk was handed over",
        ],
    )


def _wait_for(*servers: Served) -> None:
    """Wait until all of them listen, and are done with starting."""
    for server in servers:
        assert server.port
    wait_until_idle([server.pid for server in servers])


@contextmanager
def _simulating(rate: float, room: int) -> Iterator[Served]:
    gib = kv_bytes(room) / (1 << 30)
    simulated = ["--simulate", f"{rate:g}", "--simulate-calls", "1", "--simulate-tool", TOOL]
    words = ["--simulate-words", str(1 << 20), "--kv-memory", f"{gib:.6f}"]
    with serving([*simulated, *words]) as server:
        yield server


# --- Requests -------------------------------------------------------------------------------------

_QUESTION = {"role": "user", "content": "Tell me of the harbour."}
_CALL = {"type": "function_call", "call_id": "call_1", "name": TOOL, "arguments": "{}"}
_ANSWER = {"role": "assistant", "content": "It lay quiet."}
_OUTPUT = "The harbour lay quiet in the early light."


def _output(call_id: str) -> JsonObject:
    return {"type": "function_call_output", "call_id": call_id, "output": _OUTPUT}


def _create(num_tokens: int, *items: JsonObject) -> JsonObject:
    """Return a request. The model calls its tool, and in its second turn says words without end;
    that of ``floors`` goes on with calls after that."""
    parameters = {"type": "object", "properties": {}}
    return {
        "type": "response.create",
        "input": [_QUESTION, *items],
        "tools": [{"type": "function", "name": TOOL, "parameters": parameters}],
        "temperature": 0,
        "max_output_tokens": num_tokens,
        "store": False,
    }


def words(num_tokens: int) -> JsonObject:
    """Return a request that is answered with so many tokens of words: the call is made already."""
    return _create(num_tokens, _CALL, _output("call_1"))


def _append(call_id: str) -> JsonObject:
    return {"type": "response.append", "input": [_output(call_id)]}


def called(closing: bytes) -> str:
    """Return the id of the last call that a response at rest has made.

    Raises:
        SocketError: it has made none.
    """
    for item in reversed(json.loads(closing)["response"]["output"]):
        if item["type"] == "function_call":
            return str(item["call_id"])
    raise SocketError("the simulated model made no call")


# --- Tokens ---------------------------------------------------------------------------------------


def _cpu_per_token(
    server: Served, floors: Served, tokens: int, repeats: int, warm_ups: int
) -> Rows:
    rows: Rows = {}
    for streams in _STREAMS:
        took = _cpu_with(server, floors, streams, tokens, repeats, warm_ups)
        for name, one in took.items():
            rows.setdefault(name, {})[_streams(streams)] = one
    return rows


def _streams(number: int) -> str:
    return "1 stream" if number == 1 else f"{number} streams"


def _cpu_with(
    server: Served, floors: Served, streams: int, tokens: int, repeats: int, warm_ups: int
) -> dict[str, Figure]:
    with ExitStack() as stack:

        def cost_at(served: Served, path: str, **members: Any) -> Callable[[], float]:
            number = 1 if members else streams
            sockets = [stack.enter_context(RawSocket(served.port, path)) for _ in range(number)]
            request = {**words(tokens), **members}
            return partial(_cpu_microseconds, served, sockets, request, streams * tokens)

        of_server = cost_at(server, RESPONSES)
        measurements = {
            "total": of_server,
            "engine": cost_at(floors, "/engine"),
            "model": cost_at(floors, "/model", streams=streams),
            "bare": cost_at(floors, "/bare"),
            again("total"): of_server,
        }
        settle = partial(wait_until_idle, [server.pid, floors.pid])
        samples = alternate(measurements, repeats, settle=settle, warm_ups=warm_ups)
    took = {name: figure(values, "µs") for name, values in samples.items()}
    own = difference(took["total"], took["engine"])
    cores = figure([each * 1e-6 * _RATE * streams for each in own.samples], "cores")
    return {
        "total": took["total"],
        again("total"): took[again("total")],
        "the model's steps alone": took["model"],
        "engine alone, with them": took["engine"],
        "bare": took["bare"],
        "server: total less engine": own,
        # Whatever else the machine does can only add.
        "the same, lowest less lowest": figure([took["total"].low - took["engine"].low], "µs"),
        "server / bare": ratio(own, took["bare"]),
        "engine and server: total less steps": difference(took["total"], took["model"]),
        f"server, cores at {_RATE:,.0f}/s a stream": cores,
    }


def difference(above: Figure, below: Figure) -> Figure:
    """Return the first less the second, round by round, as ``figures.ratio`` does."""
    pairs = zip(above.samples, below.samples, strict=True)
    return figure([a - b for a, b in pairs], above.unit)


def _cpu_microseconds(
    served: Served, sockets: Sequence[RawSocket], request: JsonObject, num_tokens: int
) -> float:
    """Return the processor time of each of ``num_tokens``, which all ``sockets`` bring together."""
    before = served.cpu_seconds()
    for one in sockets:
        one.send(request)
    skim_all(sockets)
    return 1e6 * (served.cpu_seconds() - before) / num_tokens


def _reached(server: Served, tokens: int, repeats: int) -> Rows:
    rows: Rows = {}
    for streams in _STREAMS:
        with ExitStack() as stack:
            sockets = [
                stack.enter_context(RawSocket(server.port, RESPONSES)) for _ in range(streams)
            ]
            reach = partial(_reach, server, sockets, tokens)
            samples = alternate(
                {_streams(streams): reach, again(_streams(streams)): reach},
                repeats,
                settle=partial(wait_until_idle, [server.pid]),
                warm_ups=1,
            )
        for name, reached in samples.items():
            rows[name] = {
                "tokens/s, slowest stream": figure([rate for rate, _ in reached], "tokens/s"),
                "cores used": figure([cores for _, cores in reached], "cores"),
            }
    return rows


def _reach(server: Served, sockets: Sequence[RawSocket], tokens: int) -> tuple[float, float]:
    """Return the tokens a second of the slowest of ``sockets``, and the cores used for all."""
    began_at, before = time.monotonic(), server.cpu_seconds()
    for one in sockets:
        one.send(words(tokens))
    times = skim_all(sockets)
    cores = (server.cpu_seconds() - before) / (time.monotonic() - began_at)
    return min(tokens / (last - first) for first, last in times), cores


def _paced(server: Served, tokens: int, repeats: int) -> Rows:
    bare = {"max_output_tokens": tokens, "seconds": 1 / _PACE}
    of_server = partial(_ways, server, RESPONSES, words(tokens))
    late = alternate(
        {
            "bare": partial(_ways, server, "/bare", bare),
            "server": of_server,
            again("server"): of_server,
        },
        repeats,
        settle=partial(wait_until_idle, [server.pid]),
        warm_ups=1,
    )
    rows = {name: summary(samples, "ms") for name, samples in late.items()}
    added = {c: difference(rows["server"][c], rows["bare"][c]) for c in rows["bare"]}
    return {**rows, "server less bare": added}


def _ways(server: Served, path: str, request: JsonObject) -> list[float]:
    """Return how long each token was on its way, in milliseconds."""
    _noted(server)
    with RawSocket(server.port, path) as one:
        one.send(request)
        frames = one.segment()
    read = [now for now, text in frames if b"response.output_text.delta" in text[:60]]
    there = _noted(server)["token_times"]
    if not 0 <= len(there) - len(read) <= 1:  # the last one may have ended the turn
        raise SocketError(f"{len(there)} tokens came in {len(read)} frames")
    return [1000 * (late - early) for early, late in zip(there, read, strict=False)]


def _noted(server: Served) -> dict[str, list[float]]:
    with RawSocket(server.port, "/noted") as one:
        one.send({})
        [(_, text), _] = one.segment()
    noted: dict[str, list[float]] = json.loads(text)
    return noted


# --- Appends --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trip:
    """An append to its first event, in microseconds."""

    whole: float
    queued: float = 0.0
    """Until the model's first step began, by the server's own report, as what follows."""
    prefill: float = 0.0
    """Of the model, until its first token was there."""


def _round_trips(server: Served, floors: Served, number: int, repeats: int) -> Rows:
    with RawSocket(floors.port, "/bare") as below, RawSocket(server.port, RESPONSES) as one:

        def trips() -> list[Trip]:
            return [_trip(one) for _ in range(number)]

        bare, took, took_again = alternate(
            {
                "bare": lambda: [_bare_trip(below) for _ in range(number)],
                "server": trips,
                again("server"): trips,
            },
            repeats,
            settle=partial(wait_until_idle, [server.pid, floors.pid]),
            warm_ups=1,
        ).values()
    return trip_rows(bare, took, took_again)


def trip_rows(
    bare: Sequence[Sequence[Trip]],
    trips: Sequence[Sequence[Trip]],
    trips_again: Sequence[Sequence[Trip]],
) -> Rows:
    """Return what the appends of each round took, on a bare application and on the server, there
    twice."""

    def row(rounds: Sequence[Sequence[Trip]], value: Callable[[Trip], float]) -> dict[str, Figure]:
        return summary([[value(trip) for trip in each] for each in rounds], "µs")

    rows = {
        "bare": row(bare, lambda trip: trip.whole),
        "server": row(trips, lambda trip: trip.whole),
        again("server"): row(trips_again, lambda trip: trip.whole),
        "of which to the model's step": row(trips, lambda trip: trip.queued),
        "of which that step": row(trips, lambda trip: trip.prefill),
        "server, without that step": row(trips, lambda trip: trip.whole - trip.prefill),
    }
    without = rows["server, without that step"]
    return {**rows, "the same / bare": {"median": ratio(without["median"], rows["bare"]["median"])}}


def _bare_trip(one: RawSocket) -> Trip:
    _rest()
    sent_at = time.monotonic()
    one.send({"max_output_tokens": 1, "input": [_output("call_1")]})
    return Trip(1e6 * (one.segment()[0][0] - sent_at))


def _trip(one: RawSocket) -> Trip:
    one.send(_create(64))
    closing = one.segment()[-1][1]
    _rest()
    sent_at = time.monotonic()
    one.send(_append(called(closing)))
    frames = one.segment()
    before, after = time_info(closing), time_info(frames[-1][1])
    took = {name: 1e6 * (after[name] - before[name]) for name in after}
    queued = took["pre_inference"] + took["queue"]
    return Trip(1e6 * (frames[0][0] - sent_at), queued, took["prefill"])


def time_info(closing: bytes) -> dict[str, float]:
    """Return the seconds of a run so far, by the server's own report."""
    seconds: dict[str, float] = json.loads(closing)["response"]["suspend:run"]["time_info"]
    return seconds


def _rest() -> None:
    """Let the server come to rest. Who sleeps meanwhile measures how processors wake up."""
    resting_at = time.monotonic()
    while time.monotonic() < resting_at + _REST_SECONDS:
        pass


def _resumes(server: Served, number: int, repeats: int) -> Rows:
    waits = partial(_resume_waits, server, number)
    with _decoding(server, 8):
        # There is no rest to wait for: eight runs decode all the time.
        took, took_again = alternate(
            {"once": waits, "again": waits}, repeats, settle=lambda: None
        ).values()
    return resume_rows(took, took_again)


Waits = tuple[Sequence[float], Sequence[float]]
"""Of some resumes: milliseconds to the chunk handed over, and to the step that begins with it."""


def resume_rows(took: Sequence[Waits], took_again: Sequence[Waits]) -> Rows:
    """Return what the resumes of each round waited for, which were measured twice."""
    rows: Rows = {}
    for place, name in enumerate(
        ("to the chunk handed to the model", "to the step that begins with it")
    ):
        rows[name] = summary([each[place] for each in took], "ms")
        rows[again(name)] = summary([each[place] for each in took_again], "ms")
    return rows


def _resume_waits(server: Served, number: int) -> Waits:
    _noted(server)
    _resume_often(server, number)
    noted = _noted(server)
    return (
        [1000 * seconds for seconds in noted["handed_after"]],
        [1000 * seconds for seconds in noted["stepped_after"]],
    )


def _resume_often(server: Served, number: int) -> None:
    with RawSocket(server.port, RESPONSES) as one:
        one.send(_create(64, _CALL, _output("call_1"), _ANSWER, _QUESTION))
        for _ in range(number):
            one.send(_append(called(one.segment()[-1][1])))
        one.segment()  # or the last one would be cut short, and not be noted


@contextmanager
def _decoding(server: Served, number: int) -> Iterator[None]:
    """Keep ``number`` runs decoding."""
    is_over, request = threading.Event(), words(_CONTEXT - _AROUND_TOKENS)
    with ExitStack() as stack:
        sockets = [stack.enter_context(RawSocket(server.port, RESPONSES)) for _ in range(number)]

        def read_on(one: RawSocket) -> None:
            while not is_over.is_set():
                if one.skim():
                    one.send(request)

        for one in sockets:
            one.send(request)
        readers = [threading.Thread(target=read_on, args=(one,)) for one in sockets]
        for one, reader in zip(sockets, readers, strict=True):
            one.skim()  # it has begun
            reader.start()
        try:
            yield
        finally:
            is_over.set()
            for reader in readers:
                reader.join()


# --- Figures --------------------------------------------------------------------------------------


def summary(rounds: Sequence[Sequence[float]], unit: str) -> dict[str, Figure]:
    """Return the median and the 99th percentile of each round."""
    return {
        "median": figure([statistics.median(each) for each in rounds], unit),
        "p99": figure([percentile(each, 0.99) for each in rounds], unit),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return what ``share`` of ``values`` are not above, by nearest rank."""
    ranked = sorted(values)
    return ranked[max(1, math.ceil(share * len(ranked))) - 1]
