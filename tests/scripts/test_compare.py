"""The command: what it makes, what it leaves behind, and what it refuses."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from scripts import compare as command
from scripts.compare import Screen
from scripts.comparison import comparison
from scripts.comparison.agents import CompareError, Endpoint
from scripts.comparison.agreement import GREEDY, Difference
from scripts.comparison.agreement import agreement as agreement_of_runs
from scripts.comparison.comparison import NAMES, OUTSIDE, Choices, Comparison, known
from scripts.comparison.engines import Server, Servers, simulated
from scripts.comparison.experiments import Experiment, Part, Point
from scripts.comparison.results import Agreement, Design, Results, Trial
from scripts.comparison.trials import Cell, Numbers
from scripts.comparison.workloads import Workload, synthetic_trace
from tests.scripts.example_results import split, turn
from tests.scripts.example_results import trial as example_trial

app = typer.Typer()
app.command()(command.main)

Measure = Callable[[Cell, int], Trial]
DESIGNS = (Design.STATELESS_CACHE, Design.SUSPENDED)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], None]:
    """Returns what puts a function in the place of what measures a cell, so without a server."""

    def replace(measure: Measure) -> None:
        async def measure_round(
            servers: Servers,
            cells: Sequence[Cell],
            round_number: int,
            numbers: Numbers,
            taken: Callable[[Trial], None],
            begun: Callable[[Cell], None],
        ) -> None:
            for cell in cells:
                begun(cell)
                taken(measure(cell, round_number))
                await asyncio.sleep(0)

        monkeypatch.setattr(comparison, "measure_round", measure_round)

    return replace


def made_up(cell: Cell, round_number: int) -> Trial:
    turns = [turn(split(decode=0.02, pre_inference=0.005))] * len(cell.workload.trace.turns)
    return example_trial(
        cell.design,
        turns,
        experiment=cell.experiment,
        engine=cell.engine,
        workload=cell.workload.label,
        x=cell.x,
        round_number=round_number,
    )


def compare(folder: Path, *arguments: str) -> tuple[Result, Results]:
    """Run the command, and return how it ended and what it left."""
    result = CliRunner().invoke(app, ["--quick", "--out", str(folder), *arguments])
    page = (folder / "report.html").read_text()
    assert page.rstrip().endswith("</html>")
    return result, Results.decode((folder / "results.json").read_bytes())


@pytest.mark.slow
def test_each_round_measures_each_cell(measured: Callable[[Measure], None], tmp_path: Path) -> None:
    measured(made_up)

    result, results = compare(tmp_path, "--only", "tools", "--repeats", "2")

    assert result.exit_code == 0, result.output
    assert results.is_complete
    assert results.is_quick
    assert {trial.experiment for trial in results.trials} == {"tools"}
    assert {trial.round for trial in results.trials} == {0, 1}
    cells = {(trial.workload, trial.design, trial.round) for trial in results.trials}
    assert len(cells) == len(results.trials) == 2 * 2 * 4
    assert "tools: 2 rounds" in result.output
    assert str(tmp_path / "report.html") in result.output


@pytest.mark.slow
def test_a_failure_does_not_take_the_others_with_it(
    measured: Callable[[Measure], None], tmp_path: Path
) -> None:
    def measure(cell: Cell, round_number: int) -> Trial:
        if cell.experiment == "results":
            raise CompareError("it said something else")
        return made_up(cell, round_number)

    measured(measure)

    result, results = compare(
        tmp_path, "--only", "results", "--only", "connections", "--repeats", "1"
    )

    assert result.exit_code == 1
    assert not results.is_complete
    assert results.notes[0] == "results: not completed: CompareError: it said something else"
    assert {trial.experiment for trial in results.trials} == {"connections"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (("tools", "--designs", "suspended, inject"), "tools: it has none of the designs"),
        (("agreement", "--designs", "suspended"), "agreement: it compares none of the designs"),
    ],
)
def test_an_experiment_of_which_nothing_is_left_is_not_complete(
    arguments: tuple[str, ...],
    note: str,
    measured: Callable[[Measure], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    async def no_server(servers: Servers, engine: str) -> Server:
        return Server(engine, Mock(), Endpoint("http://127.0.0.1:1", "m"))

    measured(made_up)
    monkeypatch.setattr(Servers, "get", no_server)

    result, results = compare(tmp_path, "--only", *arguments)

    assert result.exit_code == 1
    assert not results.is_complete
    assert results.notes[0].startswith(note)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("design", "exit_code"), [(Design.SUSPENDED_INJECT, 1), (Design.STATELESS, 0)]
)
def test_tokens_that_differ_where_they_must_not_are_a_failure(
    design: Design, exit_code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def measure_agreement(*_: object) -> list[Agreement]:
        return [agreement_of_runs(design, GREEDY, [Difference(2, 20, False, 1, 3)])]

    async def no_server(servers: Servers, engine: str) -> Server:
        assert engine == "float32"
        return Server(engine, Mock(), Endpoint("http://127.0.0.1:1", "m"))

    monkeypatch.setattr(comparison, "measure_agreement", measure_agreement)
    monkeypatch.setattr(Servers, "get", no_server)

    result, results = compare(tmp_path, "--only", "agreement")

    assert result.exit_code == exit_code, result.output
    assert results.is_complete
    assert ("tokens differ: suspended, inject (greedy): 1 of 1 run" in result.output) == exit_code
    page = (tmp_path / "report.html").read_text()
    assert ("do not sample the same tokens" in page) == exit_code


@pytest.mark.slow
def test_a_warm_up_takes_of_the_time_there_is(
    measured: Callable[[Measure], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = []

    def rounds(choices: Choices, budget_seconds: float) -> Iterator[int]:
        taken.append("the time begins")
        return iter([0])

    def measure(cell: Cell, round_number: int) -> Trial:
        taken.append("a trial")
        return made_up(cell, round_number)

    monkeypatch.setattr(Choices, "rounds", rounds)
    measured(measure)

    compare(tmp_path, "--only", "results")

    assert taken[0] == "the time begins"


@pytest.mark.slow
async def test_ours_are_measured_twice_beside_outside_servers_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    async def measure_baselines(*_: object, ours: Mapping[str, object], **__: object) -> list[str]:
        asked.extend(ours)
        return []

    installed = Mock(servers=[Mock()], notes=[], versions={})
    monkeypatch.setattr(comparison, "installed_servers", lambda *_, **__: installed)
    monkeypatch.setattr(comparison, "measure_baselines", measure_baselines)

    await Comparison(Choices(is_quick=True, only=(OUTSIDE,)), "", tmp_path, Mock()).run()

    assert set(asked) == {
        *(Design.STATELESS_CACHE, Design.AGAIN),
        *(Design.SUSPENDED, Design.SUSPENDED_AGAIN),
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_what_was_measured(
    number: signal.Signals, measured: Callable[[Measure], None], tmp_path: Path
) -> None:
    def measure(cell: Cell, round_number: int) -> Trial:
        if cell.experiment == "concurrency":
            os.kill(os.getpid(), number)
        return made_up(cell, round_number)

    measured(measure)

    result, results = compare(
        tmp_path, "--only", "tools", "--only", "concurrency", "--repeats", "1"
    )

    assert result.exit_code == command.INTERRUPTED
    assert not results.is_complete
    assert "concurrency: interrupted, and what would follow is missing" in results.notes
    assert len([trial for trial in results.trials if trial.experiment == "tools"]) == 2 * 4


@pytest.mark.slow
def test_only_some_designs_can_be_compared(
    measured: Callable[[Measure], None], tmp_path: Path
) -> None:
    measured(made_up)
    designs = [word for each in DESIGNS for word in ("--designs", each)]

    _, results = compare(tmp_path, "--only", "connections", "--repeats", "1", *designs)

    assert {trial.design for trial in results.trials} == set(DESIGNS)


@pytest.mark.parametrize(
    ("option", "name", "named"),
    [("--only", "cals", "experiment 'cals'"), ("--designs", "suspend", "design 'suspend'")],
)
def test_unknown_names_are_refused(option: str, name: str, named: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "new"), option, name])

    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "new").exists()


def test_a_refusal_says_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"no experiment 'x'; there are: calls; context; .*outside"
    ):
        known(["x"], NAMES, "experiment")

    assert known(["tools", "calls", "tools"], NAMES, "experiment") == ["tools", "calls"]


def test_rounds_that_are_asked_for_are_made() -> None:
    assert list(Choices(repeats=3).rounds(0.0)) == [0, 1, 2]
    assert list(Choices().rounds(0.0)) == [0, 1]


def test_the_screen_keeps_what_each_experiment_came_to() -> None:
    shown = StringIO()

    with Screen(Console(file=shown, force_terminal=True, width=120)) as screen:
        screen.expect({"calls": 60.0, "pace": 30.0})
        screen.began("calls", "Number of tool calls")
        screen.doing("round 1: int4, 5 calls, suspended", 2, 7)
        screen.ended("calls", "4 rounds")

    assert "calls: 4 rounds, 0 s" in shown.getvalue()


# --- With a server -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_is_compared_in_all_designs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = synthetic_trace("small", num_calls=2, context_tokens=150, result_tokens=20)
    points = (Point(2, Workload("2 calls", trace, concurrency=2)),)
    small = Experiment(
        "calls", "Small", "?", "calls", 1.0, (Part(simulated(4000), points, tuple(Design)),)
    )
    monkeypatch.setattr(comparison, "experiments", lambda **_: (small,))

    result, results = compare(tmp_path, "--only", "calls", "--repeats", "1", "--threads", "1")

    assert result.exit_code == 0, results.notes
    by_design = {trial.design: trial for trial in results.trials}
    assert set(by_design) == set(Design)
    for trial in results.trials:
        assert [len(run.turns) for run in trial.runs] == [3, 3]
        assert trial.cpu_seconds is not None
        assert trial.cpu_seconds > 0
        assert trial.counts["tokens_forwarded"] > 0
        assert trial.loop_lag["+Inf"] > 0
    forgetting, suspended = by_design[Design.STATELESS], by_design[Design.SUSPENDED]
    assert forgetting.counts["template_renders"] == 2 * 3
    assert suspended.counts["template_renders"] == 2
    assert forgetting.counts["tokens_forwarded"] > 2 * suspended.counts["tokens_forwarded"]
    assert "server for simulated 4000" in results.settings


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--write-traces", "/nowhere/traces"], "cannot write /nowhere/traces"),
        (["--out", f"{__file__}/below"], "cannot write to"),
        (["--endpoint", "host"], "endpoint host: the URL"),
        (["--endpoint", ""], "endpoint : the URL"),
        (["--endpoint", "http://127.0.0.1:1", "--endpoint-model", ""], "a model has a name"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_measured(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, options, env={"COLUMNS": "200"})

    assert result.exit_code == 2
    assert says in result.output


def test_a_report_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "report.html").mkdir()

    assert CliRunner().invoke(app, ["--out", str(tmp_path)]).exit_code == 2
