"""The experiments: what is varied in each of them, on which engines, and in which designs.

The real model shows all of a turn as it is, and is slow on a processor. Simulated accelerators have
the pace of servers that people use; they compute nothing, and everything around them is real. What
takes long on the real model and would show the same there is left to the simulated ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec

from sampler.traces import Trace, read_traces
from scripts.comparison.engines import simulated
from scripts.comparison.results import Design
from scripts.comparison.trials import Cell, in_turns
from scripts.comparison.workloads import ToolSeconds, Workload, synthetic_trace

TRACES = Path(__file__).parent / "traces"

_REAL = "int4"
_FAST = simulated(1000)

_FEW_CACHED = (
    Design.STATELESS_CACHE,
    Design.SUSPENDED,
    Design.AGAIN,
    Design.SUSPENDED_AGAIN,
)
"""Without the two that are measured twice nothing can be told from noise."""
_FEW = (*_FEW_CACHED, Design.STATELESS)
_CACHED = (*_FEW_CACHED, Design.CHAINED, Design.SUSPENDED_INJECT)
_ALL = (*_CACHED, Design.STATELESS)
_CONNECTIONS = (*_ALL, Design.STATELESS_CACHE_RECONNECT, Design.STATELESS_RECONNECT)
_SHIPPED = ("retrieval", "coding-agent", "many-small-calls")


@dataclass(frozen=True)
class Point:
    """A workload, and where it stands on the axis of its experiment."""

    x: float
    workload: Workload


@dataclass(frozen=True)
class Part:
    """What of an experiment is measured on one engine."""

    engine: str
    points: tuple[Point, ...]
    designs: tuple[Design, ...]


@dataclass(frozen=True)
class Experiment:
    """What is asked, and what is measured to answer it."""

    name: str
    title: str
    question: str
    x: str
    """What is varied, with its unit."""
    budget_seconds: float
    """That its warm-up and all of its rounds may take."""
    parts: tuple[Part, ...]

    def traces(self) -> list[Trace]:
        """Return those that are replayed."""
        points = [_small(), *(point for part in self.parts for point in part.points)]
        return [trace for point in points for trace in point.workload.traces()]

    @property
    def engines(self) -> list[str]:
        """Those that it is made on."""
        return list(dict.fromkeys(part.engine for part in self.parts))

    def cells(self, designs: Iterable[Design], round_number: int) -> list[Cell]:
        """Return what is measured in a round, of those ``designs``."""
        return [
            cell
            for part in self.parts
            for point in part.points
            for cell in self._cells(part, point, designs, round_number)
        ]

    def warm_up_cells(self, designs: Iterable[Design], *, is_quick: bool) -> list[Cell]:
        """Return what is measured before anything counts: each engine and design once, with the
        largest workload, which touches all memory, or where it has to be quick with a small one."""
        return [
            cell
            for part in self.parts
            for cell in self._cells(part, _small() if is_quick else part.points[-1], designs, 0)
        ]

    def _cells(
        self, part: Part, point: Point, designs: Iterable[Design], round_number: int
    ) -> Iterator[Cell]:
        wanted = set(designs)
        taking_part = [design for design in part.designs if design in wanted]
        for design in in_turns(taking_part, round_number):
            yield Cell(self.name, part.engine, point.workload, point.x, design)


# --- Workloads -----------------------------------------------------------------------------------


def _workload(
    label: str,
    *,
    num_calls: int = 5,
    context_tokens: int = 256,
    result_tokens: int = 60,
    tool_seconds: ToolSeconds = (0.0,),
    concurrency: int = 1,
) -> Workload:
    trace = synthetic_trace(
        f"{label}: {num_calls} calls, {context_tokens}, {result_tokens}",
        num_calls=num_calls,
        context_tokens=context_tokens,
        result_tokens=result_tokens,
        tool_seconds=tool_seconds,
        seed=num_calls + context_tokens + result_tokens,
    )
    return Workload(label, trace, concurrency)


@cache
def _small() -> Point:
    return Point(1, _workload("warm-up", num_calls=1))


def _calls(*numbers: int) -> tuple[Point, ...]:
    labels = {number: "1 call" if number == 1 else f"{number} calls" for number in numbers}
    return tuple(Point(n, _workload(labels[n], num_calls=n)) for n in numbers)


def _contexts(*numbers: int) -> tuple[Point, ...]:
    return tuple(Point(n, _workload(f"{n} tokens", num_calls=3, context_tokens=n)) for n in numbers)


def _results(*numbers: int) -> tuple[Point, ...]:
    return tuple(Point(n, _workload(f"results of {n} tokens", result_tokens=n)) for n in numbers)


_TOOLS: dict[str, tuple[float, ToolSeconds]] = {
    "none": (0.0, (0.0,)),
    "50 ms": (0.05, (0.05,)),
    "500 ms": (0.5, (0.5,)),
    "bimodal": (1.0, "bimodal"),
}
"""By label: where it stands on the axis, in seconds, and what the tools take."""


def _tools(*labels: str, num_calls: int) -> tuple[Point, ...]:
    return tuple(
        Point(x, _workload(label, num_calls=num_calls, tool_seconds=seconds))
        for label, (x, seconds) in ((label, _TOOLS[label]) for label in labels)
    )


def _concurrent(*numbers: int) -> tuple[Point, ...]:
    labels = {number: "1 agent" if number == 1 else f"{number} agents" for number in numbers}
    return tuple(Point(n, _workload(labels[n], concurrency=n)) for n in numbers)


def _pace(rate: float, num_calls: int) -> tuple[Point, ...]:
    return (Point(rate, _workload(f"{rate:g} tokens/s", num_calls=num_calls)),)


def _shipped(*names: str) -> tuple[Point, ...]:
    return tuple(
        Point(len(trace.turns) - 1, Workload(trace.name, trace, 1))
        for name in names
        for trace in read_traces(TRACES / f"{name}.jsonl")
    )


def _without_pauses(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Return ``points`` with tools that answer at once: what they take is counted apart anyway."""
    return tuple(
        Point(point.x, replace(point.workload, trace=_hurried(point.workload.trace)))
        for point in points
    )


def _hurried(trace: Trace) -> Trace:
    turns = [
        msgspec.structs.replace(
            turn, calls=tuple(msgspec.structs.replace(call, seconds=0.0) for call in turn.calls)
        )
        for turn in trace.turns
    ]
    return msgspec.structs.replace(trace, turns=tuple(turns))


# --- Experiments ---------------------------------------------------------------------------------

_TEXTS = {
    "calls": (
        "Number of tool calls",
        "How much does each design gain as an agent makes more tool calls?",
        "tool calls",
    ),
    "context": (
        "Length of the context",
        "Does the time of a turn depend on how much was said before?",
        "tokens at the start",
    ),
    "results": (
        "Length of tool results",
        "Does it matter how much a tool returns, which is new to all designs?",
        "tokens a result",
    ),
    "tools": (
        "Duration of tools",
        "What is left of the difference once tools take their time?",
        "seconds a tool runs (bimodal: most are short, a few take seconds)",
    ),
    "concurrency": (
        "Agents at once",
        "What becomes of the difference when several agents share the server?",
        "agents",
    ),
    "pace": (
        "Speed of the accelerator",
        "At which speed of sampling does the work around it begin to dominate?",
        "tokens sampled a second",
    ),
    "connections": (
        "Connections",
        "How much of the difference is the connection: kept alive, or a new one each turn?",
        "tool calls",
    ),
    "traces": (
        "Agent runs as they are",
        "What does a whole run of an agent take?",
        "tool calls",
    ),
}
"""By the experiment's name: its title, its question, and what is varied."""

EXPERIMENTS = tuple(_TEXTS)
"""Their names, in the order in which they are made."""

ENDPOINT = "endpoint"
"""The name of the one that is made after them, where there is an endpoint."""


def experiments(*, is_quick: bool) -> tuple[Experiment, ...]:
    """Return all experiments, in the order in which they are made."""
    return _quick() if is_quick else _full()


def at_endpoint(engine: str, *, is_quick: bool) -> Experiment:
    """Return the experiment on ``engine``, which is somewhere else. What the endpoint has to be
    able to say is the same in a quick one."""
    return Experiment(
        ENDPOINT,
        "Over an endpoint",
        "What is left of the differences where somebody else samples, and gets the whole history "
        "from the server in every design?",
        "tool calls",
        40 if is_quick else 180,
        (Part(engine, _calls(1, 10, 20), _ALL),),
    )


def outside(*, is_quick: bool) -> Point:
    """Return what outside servers are given to do."""
    num_calls = 3 if is_quick else 10
    return Point(num_calls, _workload(f"{num_calls} calls", num_calls=num_calls))


def _experiment(name: str, budget_seconds: float, *parts: Part) -> Experiment:
    return Experiment(name, *_TEXTS[name], budget_seconds, parts)


def _full() -> tuple[Experiment, ...]:
    """Return what takes about an hour and a quarter. Where a history is long, computing all of it
    again on the real model would take most of that; the simulated ones show it."""
    return (
        _experiment(
            "calls",
            660,
            Part(_REAL, _calls(1, 5, 10, 20), _ALL),
            Part(_REAL, _calls(43), _CACHED),
            Part(_FAST, _calls(1, 5, 10, 20, 43), _ALL),
        ),
        _experiment(
            "context",
            420,
            Part(_REAL, _contexts(256, 1000, 3000), _ALL),
            Part(_REAL, _contexts(6000), _CACHED),
            Part(_FAST, _contexts(256, 1000, 3000, 6000), _ALL),
        ),
        _experiment(
            "results",
            280,
            *(Part(engine, _results(20, 200, 600), _ALL) for engine in (_REAL, _FAST)),
        ),
        _experiment(
            "tools",
            370,
            *(Part(engine, _tools(*_TOOLS, num_calls=5), _FEW) for engine in (_REAL, _FAST)),
        ),
        _experiment(
            "concurrency",
            620,
            Part(_REAL, _concurrent(1, 4, 16), _CACHED),
            Part(_FAST, _concurrent(1, 4, 16), _ALL),
        ),
        _experiment(
            "pace",
            480,
            *(Part(simulated(rate), _pace(rate, 20), _ALL) for rate in (65, 1000, 4000)),
        ),
        _experiment(
            "connections",
            190,
            *(Part(engine, _calls(10), _CONNECTIONS) for engine in (_REAL, _FAST)),
        ),
        _experiment(
            "traces", 800, Part(_REAL, _shipped(*_SHIPPED), (*_FEW_CACHED, Design.CHAINED))
        ),
    )


def _quick() -> tuple[Experiment, ...]:
    """Return what takes less than five minutes: mostly on simulated accelerators."""
    return (
        _experiment(
            "calls", 72, Part(_REAL, _calls(1, 5), _ALL), Part(_FAST, _calls(1, 5, 20), _ALL)
        ),
        _experiment("context", 12, Part(_FAST, _contexts(256, 3000), _FEW)),
        _experiment("results", 11, Part(_FAST, _results(20, 200), _FEW)),
        _experiment("tools", 20, Part(_FAST, _tools("none", "500 ms", num_calls=3), _FEW_CACHED)),
        _experiment("concurrency", 12, Part(_FAST, _concurrent(1, 4), _FEW)),
        _experiment(
            "pace",
            46,
            Part(simulated(65), _pace(65, 4), _FEW_CACHED),
            *(Part(simulated(rate), _pace(rate, 4), _FEW) for rate in (1000, 4000)),
        ),
        _experiment("connections", 11, Part(_FAST, _calls(5), _CONNECTIONS)),
        _experiment(
            "traces",
            18,
            Part(simulated(4000), _without_pauses(_shipped("retrieval", "coding-agent")), _FEW),
        ),
    )
