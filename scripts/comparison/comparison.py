"""The comparison as a whole: one experiment after the other, whatever becomes of each.

What was measured is written down after each experiment. One that fails, or an interruption, takes
nothing of it away: a note says what is missing, and the results are not called complete.
"""

import asyncio
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

from sampler.runner_choice import RunnerOptions
from scripts.benchmarks.machine import Neighbours, machine, versions
from scripts.comparison import agreement
from scripts.comparison.agreement import measure_agreement
from scripts.comparison.baselines import measure_baselines
from scripts.comparison.engines import RemoteModel, Servers
from scripts.comparison.experiments import (
    ENDPOINT,
    EXPERIMENTS,
    Experiment,
    Point,
    at_endpoint,
    experiments,
    outside,
)
from scripts.comparison.outside_servers import installed_servers
from scripts.comparison.results import Design, Results, Trial
from scripts.comparison.statistics import SAME_AGAIN
from scripts.comparison.trials import WARM_UP, Cell, Numbers, Rounds, measure, measure_round

AGREEMENT = "agreement"
OUTSIDE = "outside"
NAMES = (*EXPERIMENTS, ENDPOINT, AGREEMENT, OUTSIDE)
"""All that can be asked for, in the order in which it is made."""
USUAL = tuple(name for name in NAMES if name != ENDPOINT)
"""What is made where nothing is asked for."""

_MANY_BUSY_CORES = 0.15
"""With more than that, other programs are felt in the figures."""
_SECONDS = {AGREEMENT: (220.0, 38.0), OUTSIDE: (320.0, 60.0)}
"""About what they take: in full, and where it has to be quick."""
_OUTSIDE_ENGINE = "int4"

_EXTENT = (
    "full",
    "quick: few workloads, mostly on simulated accelerators; tools of whole traces answer at once",
)


@dataclass(frozen=True)
class Choices:
    """What a person asked for."""

    is_quick: bool = False
    only: tuple[str, ...] = USUAL
    designs: tuple[Design, ...] = tuple(Design)
    repeats: int | None = None
    """Rounds of each experiment; None for as many as there is time for."""
    threads: int | None = None
    """That a model computes with; None for what each server chooses."""
    remote: RemoteModel | None = None
    """What ``ENDPOINT`` is measured on."""
    llama_cpp_python: Path | None = None
    transformers_python: Path | None = None

    def rounds(self, budget_seconds: float) -> Rounds:
        """Return the rounds of an experiment, which begins now."""
        if self.repeats is not None:
            return Rounds(least=self.repeats, most=self.repeats, budget_seconds=budget_seconds)
        most = 5 if self.is_quick else 12
        return Rounds(least=2, most=most, budget_seconds=budget_seconds)


class Observer(Protocol):
    """Is told what happens while it happens."""

    def began(self, name: str, doing: str) -> None:
        """An experiment, by its name and its title, has begun."""

    def doing(self, what: str, done: int, total: int) -> None:
        """Something is measured now, the ``done``-th of ``total`` in its round."""

    def ended(self, name: str, what: str) -> None:
        """An experiment is over, and this came of it."""


class NothingToMeasureError(Exception):
    """Nothing is left of an experiment."""


class Comparison:
    """Makes the experiments that were asked for, and keeps what was measured in ``results``."""

    def __init__(self, choices: Choices, command: str, folder: Path, observer: Observer) -> None:
        """Prepare it.

        Args:
            choices: what is made.
            command: what to type to have it again.
            folder: where results are written to.
            observer: is told how far it is.
        """
        self._choices = choices
        self._folder = folder
        self._observer = observer
        self._began_at = time.monotonic()
        chosen = list(experiments(is_quick=choices.is_quick))
        if choices.remote is not None:
            chosen.append(at_endpoint(choices.remote.engine, is_quick=choices.is_quick))
        self._experiments = {each.name: each for each in chosen if each.name in choices.only}
        self._outside = outside(is_quick=choices.is_quick)
        traces = [trace for each in self._experiments.values() for trace in each.traces()]
        options = () if choices.threads is None else ("--threads", str(choices.threads))
        traces += self._outside.workload.traces()
        self._servers = Servers(traces, options, choices.remote)
        self._numbers = Numbers()
        self.results = Results(
            command=command,
            began_at=time.time(),
            is_quick=choices.is_quick,
            machine=machine(),
            versions=versions(),
            settings=self._settings(),
        )

    @property
    def names(self) -> list[str]:
        """What is made, in this order."""
        return [name for name in NAMES if name in self._choices.only]

    def budget_seconds(self, name: str) -> float:
        """Return about how long an experiment may take."""
        if name in self._experiments:
            return self._experiments[name].budget_seconds
        return _SECONDS[name][self._choices.is_quick]

    async def run(self) -> None:
        """Make all experiments. On cancellation the servers are stopped, and what was measured is
        written down, as it is after each of them."""
        with self._servers:
            failed = [name for name in self.names if not await self._succeeds(name)]
        has_measured = bool(self.results.trials or self.results.agreements)
        self.results.is_complete = has_measured and not failed
        self._write()

    async def _succeeds(self, name: str) -> bool:
        neighbours, num_trials = Neighbours(), len(self.results.trials)
        try:
            outcome = await self._make(name)
        except asyncio.CancelledError:
            self._note(f"{name}: interrupted, and what would follow is missing")
            raise
        except NothingToMeasureError as nothing:
            self._note(f"{name}: {nothing}")
            self._observer.ended(name, "nothing to measure")
            return False
        except Exception as error:  # noqa: BLE001  what the others measured is not to be lost
            traceback.print_exc()
            self._note(f"{name}: not completed: {_reason(error)}")
            self._servers.close()  # whatever state they are in
            self._observer.ended(name, "failed")
            return False
        finally:
            self._write()
        if (busy_cores := neighbours.busy_cores()) > _MANY_BUSY_CORES:
            self._note(f"{name}: other programs kept {busy_cores:.1f} cores busy")
        num_trials = len(self.results.trials) - num_trials
        self._observer.ended(name, outcome or f"{num_trials} trials")
        return True

    async def _make(self, name: str) -> str:
        if name == AGREEMENT:
            return await self._agree()
        if name == OUTSIDE:
            return await self._compare_outside()
        return await self._experiment(self._experiments[name])

    def _note(self, text: str) -> None:
        self.results.notes.append(text)

    def _write(self) -> None:
        self.results.seconds = time.monotonic() - self._began_at
        path = self._folder / "results.json"
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(self.results.encode())
        written.replace(path)  # whoever reads it has all of it

    def _settings(self) -> dict[str, object]:
        engines = {engine: None for each in self._experiments.values() for engine in each.engines}
        return {
            "experiments": ", ".join(self.names),
            "extent": _EXTENT[self._choices.is_quick],
            **{
                f"server for {engine}": " ".join(self._servers.options(engine))
                for engine in engines
            },
        }

    # --- Experiments ------------------------------------------------------------------------------

    async def _experiment(self, experiment: Experiment) -> str:
        self._observer.began(experiment.name, experiment.title)
        choices, num_rounds = self._choices, 0
        if not experiment.cells(choices.designs, 0):
            raise NothingToMeasureError("it has none of the designs that were chosen")
        rounds = choices.rounds(experiment.budget_seconds)
        warm_up = experiment.warm_up_cells(choices.designs, is_quick=choices.is_quick)
        await self._round(warm_up, WARM_UP, "warm-up", lambda trial: None)
        for number in rounds:
            cells = experiment.cells(choices.designs, number)
            taken = self.results.trials.append
            await self._round(cells, number, f"round {number + 1}", taken)
            num_rounds += 1
        return "1 round" if num_rounds == 1 else f"{num_rounds} rounds"

    async def _round(
        self, cells: Sequence[Cell], number: int, doing: str, taken: Callable[[Trial], None]
    ) -> None:
        done = count()

        def begun(cell: Cell) -> None:
            what = f"{doing}: {cell.engine}, {cell.workload.label}, {cell.design}"
            self._observer.doing(what, next(done), len(cells))

        await measure_round(self._servers, cells, number, self._numbers, taken, begun)

    async def _agree(self) -> str:
        self._observer.began(AGREEMENT, "Whether the designs sample the same tokens")
        self._servers.close()  # what they hold is not needed any more
        server = await self._servers.get("float32")
        plan = agreement.QUICK if self._choices.is_quick else agreement.FULL
        designs = [each for each in agreement.DESIGNS if each in self._choices.designs]
        total, done = plan.num_runs(designs), count()
        if total == 0:
            raise NothingToMeasureError("it compares none of the designs that were chosen")

        def begun(design: Design) -> None:
            self._observer.doing(design, next(done), total)

        self.results.agreements += await measure_agreement(server.endpoint, plan, designs, begun)
        self._servers.close()
        return f"{total} runs"

    async def _compare_outside(self) -> str:
        self._observer.began(OUTSIDE, "Servers of other kinds")
        point, choices = self._outside, self._choices
        threads = RunnerOptions(num_threads=choices.threads).threads
        installed = installed_servers(
            point.workload,
            llama_cpp_python=choices.llama_cpp_python,
            transformers_python=choices.transformers_python,
            threads=threads,
        )
        self.results.notes += installed.notes
        self.results.versions |= installed.versions
        if not installed.servers:
            return "none is installed"
        num_rounds = choices.repeats or (2 if choices.is_quick else 5)
        ours = [design for twice in SAME_AGAIN.items() for design in twice]
        total = (1 + num_rounds) * (len(installed.servers) + len(ours))
        done = count()
        self.results.notes += await measure_baselines(
            installed.servers,
            point.workload,
            range(num_rounds),
            experiment=OUTSIDE,
            x=point.x,
            threads=threads,
            numbers=self._numbers,
            taken=self.results.trials.append,
            begun=lambda name: self._observer.doing(name, min(next(done), total - 1), total),
            ours={design: partial(self._ours, point, design) for design in ours},
        )
        return ", ".join(installed.versions)

    async def _ours(self, point: Point, design: Design, round_number: int) -> Trial:
        server = await self._servers.get(_OUTSIDE_ENGINE)
        cell = Cell(OUTSIDE, _OUTSIDE_ENGINE, point.workload, point.x, design)
        return await measure(server, cell, round_number, self._numbers)


def _reason(error: BaseException) -> str:
    """Return what went wrong, of a group of errors the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def known(names: Iterable[str], all_names: Sequence[str], what: str) -> list[str]:
    """Return ``names`` without repetitions.

    Raises:
        ValueError: one of them is not among ``all_names``.
    """
    for name in names:
        if name not in all_names:
            raise ValueError(f"there is no {what} {name!r}; there are: {'; '.join(all_names)}")
    return list(dict.fromkeys(names))
