"""Trials in rounds: in each round all designs take turns, in an order that rotates.

A slow minute of the machine so hits all of them, and what is compared is compared within a round.
No two agent runs have the same context: the first message of each says a number of its own, all of
the same length in tokens. A cache that finds what it has seen before, as it should, would otherwise
know the whole run from the round before. Instructions and tools are the same in all runs of a
workload, as for agents of one product.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from protocol.validation import JsonObject
from sampler.traces import Trace
from scripts.benchmarks.pairing import wait_until_idle
from scripts.comparison.agents import CompareError, hold
from scripts.comparison.engines import Server, Servers, new_client
from scripts.comparison.results import AgentRun, Design, Trial
from scripts.comparison.server_counts import server_counts
from scripts.comparison.workloads import Workload

_NUMBER = re.compile(r"Task \d{6,}\. ")

WARM_UP = -1
"""The number of the round that is not kept."""


@dataclass(frozen=True)
class Cell:
    """What is measured in each round once."""

    experiment: str
    engine: str
    workload: Workload
    x: float
    design: Design


class Numbers:
    """Tells agent runs apart, whichever process and round they are in."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def unlike_all_others(self, trace: Trace) -> Trace:
        """Return ``trace``, its first message preceded by a number that no other run has."""
        return numbered(trace, next(self._numbers))


def numbered(trace: Trace, number: int) -> Trace:
    """Return ``trace`` with a number before its first message; it is replayed by the same name."""
    label = f"Task {number:06d}. "
    if isinstance(trace.input, str):
        return msgspec.structs.replace(trace, input=label + trace.input)
    first, *others = trace.input
    return msgspec.structs.replace(trace, input=(_preceded(first, label), *others))


def unnumbered(text: str) -> str:
    """Return the text of a first message without the number that ``numbered`` put before it."""
    number = _NUMBER.match(text)
    return text if number is None else text[number.end() :]


def _preceded(message: JsonObject, label: str) -> JsonObject:
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": label + content}
    if isinstance(content, list):
        return message | {"content": [{"type": "input_text", "text": label}, *content]}
    raise CompareError("expected a trace that begins with a message")


async def measure(server: Server, cell: Cell, round_number: int, numbers: Numbers) -> Trial:
    """Hold the agent runs of a cell, all at once.

    Raises:
        CompareError: one of them failed, or was not as the trace has it.
    """
    workload, served = cell.workload, server.served
    traces = list(map(numbers.unlike_all_others, workload.traces()))
    async with new_client() as client:
        await _settle(server)
        counts_before = await server_counts(client, server.endpoint)
        cpu_before, began_at = served.cpu_seconds(), time.perf_counter()
        runs = await _held_at_once(server, cell.design, traces)
        seconds = time.perf_counter() - began_at
        await _settle(server)  # what is done after the client was told is work too
        cpu_seconds = served.cpu_seconds() - cpu_before
        counted = (await server_counts(client, server.endpoint)).since(counts_before)
    return Trial(
        experiment=cell.experiment,
        engine=cell.engine,
        workload=workload.label,
        x=cell.x,
        design=cell.design,
        round=round_number,
        concurrency=workload.concurrency,
        runs=runs,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        counts=counted.counts,
        loop_lag=counted.loop_lag,
    )


async def _settle(server: Server) -> None:
    await asyncio.to_thread(wait_until_idle, [server.served.pid])


async def _held_at_once(server: Server, design: Design, traces: Sequence[Trace]) -> list[AgentRun]:
    try:
        async with asyncio.TaskGroup() as tasks:
            holding = [tasks.create_task(hold(design, server.endpoint, one)) for one in traces]
    except* CompareError as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in holding]
    raise first


def in_turns(designs: Sequence[Design], round_number: int) -> Iterator[Design]:
    """Give the designs in the order of a round: in each another one begins."""
    first = round_number % max(len(designs), 1)
    yield from designs[first:]
    yield from designs[:first]


class Rounds:
    """Decides whether there is time for one more round."""

    def __init__(
        self,
        *,
        least: int,
        most: int,
        budget_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count time.

        Args:
            least: rounds that there are whatever they take.
            most: rounds that there are if there is time.
            budget_seconds: for all of them; a round that would not end within is not begun.
            clock: tells the time in seconds.
        """
        self._least = least
        self._most = most
        self._budget_seconds = budget_seconds
        self._clock = clock
        self._began_at = clock()

    def __iter__(self) -> Iterator[int]:
        """Give the numbers of the rounds, from 0."""
        for number in range(self._most):
            round_began_at = self._clock()
            yield number
            took = self._clock() - round_began_at
            is_time = self.elapsed_seconds + took <= self._budget_seconds
            if number + 1 >= self._least and not is_time:
                return

    @property
    def elapsed_seconds(self) -> float:
        """How long it has taken so far."""
        return self._clock() - self._began_at


async def measure_round(
    servers: Servers,
    cells: Sequence[Cell],
    round_number: int,
    numbers: Numbers,
    taken: Callable[[Trial], None],
    begun: Callable[[Cell], None] = lambda cell: None,
) -> None:
    """Measure each of ``cells`` once, one after the other.

    Args:
        servers: of their engines.
        cells: in an order in which those that are to be compared lie side by side.
        round_number: that the trials bear.
        numbers: of their agent runs.
        taken: is given each trial as soon as it is over.
        begun: is told what is measured next.

    Raises:
        CompareError: one of them cannot be measured.
        ServerError: a server does not start.
    """
    for cell in cells:
        begun(cell)
        server = await servers.get(cell.engine)
        taken(await measure(server, cell, round_number, numbers))
