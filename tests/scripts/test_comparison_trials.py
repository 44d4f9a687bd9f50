"""Designs take turns, for as long as there is time, and no two agent runs are the same."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sampler.traces import Trace, TraceTurn
from scripts.comparison import trials
from scripts.comparison.agents import CompareError, Endpoint
from scripts.comparison.engines import Server
from scripts.comparison.results import AgentRun, Design
from scripts.comparison.server_counts import ServerCounts
from scripts.comparison.trials import Cell, Numbers, Rounds, in_turns, measure, numbered
from scripts.comparison.workloads import Workload

DESIGNS = (Design.STATELESS, Design.CHAINED, Design.SUSPENDED)


def trace(*items: dict[str, object]) -> Trace:
    return Trace(name="t", input=items or "Look.", turns=(TraceTurn(text="Done."),))


def test_another_design_begins_in_each_round() -> None:
    orders = [list(in_turns(DESIGNS, number)) for number in range(4)]

    assert [order[0] for order in orders] == [*DESIGNS, DESIGNS[0]]
    assert all(set(order) == set(DESIGNS) for order in orders)


def test_no_designs_have_no_turns() -> None:
    assert list(in_turns((), 3)) == []


def test_runs_are_told_apart_by_numbers_of_one_length() -> None:
    numbers = Numbers()

    inputs = [str(numbers.unlike_all_others(trace()).input) for _ in range(12)]

    assert len(set(inputs)) == 12
    assert len({len(text) for text in inputs}) == 1
    assert all(text.startswith("Task 0000") and text.endswith("Look.") for text in inputs)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Look.", "Task 000007. Look."),
        (
            [{"type": "input_text", "text": "Look."}],
            [
                {"type": "input_text", "text": "Task 000007. "},
                {"type": "input_text", "text": "Look."},
            ],
        ),
    ],
)
def test_the_number_precedes_the_first_message(content: object, expected: object) -> None:
    message: dict[str, object] = {"role": "user", "content": content}
    other: dict[str, object] = {"role": "user", "content": "More."}

    found = numbered(trace(message, other), 7)

    assert found.name == "t"
    assert found.input == (message | {"content": expected}, other)
    assert message["content"] == content


def test_a_trace_that_begins_otherwise_cannot_be_numbered() -> None:
    with pytest.raises(CompareError, match="begins with a message"):
        numbered(trace({"type": "item_reference", "id": "msg_1"}), 1)


# --- One trial -----------------------------------------------------------------------------------


class Laggard:
    """A server that comes to rest only when somebody waits for it: work before a trial, and after
    the client was told."""

    pid = 7

    def __init__(self) -> None:
        self.seconds_done = 0.0
        self.seconds_left = 40.0  # of whoever came before

    def cpu_seconds(self) -> float:
        return self.seconds_done

    def rest(self, pids: Sequence[int]) -> None:
        assert pids == [self.pid]
        self.seconds_done += self.seconds_left
        self.seconds_left = 0.0

    async def hold(self, *_: object) -> AgentRun:
        self.seconds_done += 1.0
        self.seconds_left += 2.0
        return AgentRun(seconds=1.0, wall_seconds=1.0, turns=[])

    async def counts(self, *_: object) -> ServerCounts:
        return ServerCounts({"encodes": self.seconds_done})


async def test_a_trial_is_charged_for_all_that_is_done_for_it_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: Any = Laggard()
    for name, replaced in {
        "hold": served.hold,
        "wait_until_idle": served.rest,
        "server_counts": served.counts,
        "new_client": Unused,
    }.items():
        monkeypatch.setattr(trials, name, replaced)
    server = Server("int4", served, Endpoint("http://127.0.0.1:1", "m"))
    cell = Cell("calls", "int4", Workload("1 call", trace()), 1.0, Design.CHAINED)

    found = await measure(server, cell, 0, Numbers())

    assert found.cpu_seconds == 1.0 + 2.0
    assert found.counts == {"encodes": 1.0 + 2.0}


class Unused:
    """Stands for a client that nobody asks."""

    async def __aenter__(self) -> "Unused":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


# --- Rounds --------------------------------------------------------------------------------------


class Clock:
    """Tells a time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made(rounds: Rounds, clock: Clock, seconds: float) -> Iterator[int]:
    """Take ``seconds`` for each round."""
    for number in rounds:
        clock.now += seconds
        yield number


def test_a_round_that_would_not_end_in_time_is_not_begun() -> None:
    clock = Clock()

    rounds = Rounds(least=1, most=10, budget_seconds=35, clock=clock)

    assert list(made(rounds, clock, 10)) == [0, 1, 2]


def test_some_rounds_are_made_whatever_they_take() -> None:
    clock = Clock()

    rounds = Rounds(least=2, most=10, budget_seconds=5, clock=clock)

    assert list(made(rounds, clock, 10)) == [0, 1]


def test_there_are_no_more_rounds_than_wanted() -> None:
    clock = Clock()

    rounds = Rounds(least=1, most=3, budget_seconds=100, clock=clock)

    assert list(made(rounds, clock, 1)) == [0, 1, 2]


def test_time_before_the_first_round_counts() -> None:
    clock = Clock()

    rounds = Rounds(least=1, most=10, budget_seconds=35, clock=clock)
    clock.now = 20

    assert list(made(rounds, clock, 10)) == [0]
