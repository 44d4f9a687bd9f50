"""``scripts/compare``: four designs of serving agent runs, compared on one server, as a report.

Each design holds the same agent runs on the same model in the same process. In each round all take
turns; one of the designs measured twice says what is noise.
"""

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sampler.engines.endpoint.client import EndpointSettings, EndpointSettingsError
from sampler.traces import write_traces

# scripts/compare starts Python with -P, and scripts/ is no installed package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from scripts.comparison.comparison import NAMES, USUAL, Choices, Comparison, known
from scripts.comparison.engines import RemoteModel
from scripts.comparison.experiments import ENDPOINT, at_endpoint
from scripts.comparison.findings import disagreements
from scripts.comparison.report import summary, write_report
from scripts.comparison.results import Design

INTERRUPTED = 130
"""Exit status, as shells give it after Ctrl-C."""

_DESIGNS = [design.value for design in Design]

_REPORT = "report.html"


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Less than five minutes in all.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPERIMENT",
            help=f"Make only this one; repeatable. Of {', '.join(NAMES)}.",
            show_default=f"all but {ENDPOINT}",
        ),
    ] = None,
    designs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DESIGN",
            help=f"Compare only this one; repeatable. Of {'; '.join(_DESIGNS)}.",
            show_default="all",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds of each experiment.", show_default="what there is time for"
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Where report.html and results.json go.")
    ] = Path("compare-report"),
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Of each model.", show_default="what each server chooses"),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"Make the experiment {ENDPOINT!r} too, with a model at this endpoint for chat "
            "completions, which has to say what the traces say (docs/comparison.md). Its key is "
            "in OPENAI_API_KEY.",
            show_default="none",
        ),
    ] = None,
    endpoint_model: Annotated[
        str, typer.Option(metavar="NAME", help="Of the model there.")
    ] = "gpt-oss-120b",
    traces_file: Annotated[
        Path | None,
        typer.Option(
            "--write-traces",
            metavar="FILE",
            dir_okay=False,
            help=f"Write down the traces that {ENDPOINT!r} replays, and do nothing else.",
            show_default=False,
        ),
    ] = None,
    llama_cpp_python: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="The interpreter whose environment holds llama-cpp-python[server].",
            show_default="this one, if it does",
        ),
    ] = None,
    transformers_python: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="The interpreter whose environment holds transformers[serving].",
            show_default="this one, if it does",
        ),
    ] = None,
) -> None:
    """Compare, and write a report of it."""
    if endpoint is not None:
        _check_endpoint(endpoint, endpoint_model)
    remote = None if endpoint is None else RemoteModel(endpoint, endpoint_model)
    if traces_file is not None:
        with _mistakes_told(f"cannot write {traces_file}"):
            write_traces(traces_file, at_endpoint("", is_quick=quick).traces())
        return
    choices = Choices(
        is_quick=quick,
        only=tuple(_experiments(only or USUAL, remote)),
        designs=tuple(map(Design, _known(designs or _DESIGNS, _DESIGNS, "design"))),
        repeats=repeats,
        threads=threads,
        remote=remote,
        llama_cpp_python=llama_cpp_python,
        transformers_python=transformers_python,
    )
    with _mistakes_told(f"cannot write to {out}"):
        out.mkdir(parents=True, exist_ok=True)
        (out / _REPORT).open("ab").close()  # hours are not to be lost to a wrong path
    console = Console(width=None if sys.stdout.isatty() else 120)
    with Screen(console) as screen:
        command = shlex.join(["scripts/compare", *sys.argv[1:]])
        comparison = Comparison(choices, command, out, screen)
        screen.expect({name: comparison.budget_seconds(name) for name in comparison.names})
        is_interrupted = _is_interrupted(comparison)
        screen.write("writing the report")
        write_report(comparison.results, out / _REPORT)
    console.print(summary(comparison.results))
    faults = disagreements(comparison.results.agreements)
    for fault in faults:
        console.print(f"  tokens differ: {fault}", style="red", highlight=False, markup=False)
    for note in comparison.results.notes:
        console.print(f"  {note}", highlight=False, markup=False)
    console.print(f"report: {out / _REPORT}", highlight=False, soft_wrap=True)
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if faults or not comparison.results.is_complete:
        raise typer.Exit(1)


def _check_endpoint(url: str, model: str) -> None:
    try:
        EndpointSettings(url)
    except EndpointSettingsError as error:
        raise typer.BadParameter(f"endpoint {url}: {error}") from None
    if not model:
        raise typer.BadParameter("--endpoint-model: a model has a name")


@contextmanager
def _mistakes_told(what: str) -> Iterator[None]:
    """Say of what the system refuses that it is a wrong option."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{what}: {error.strerror}") from None


def _experiments(names: Sequence[str], remote: RemoteModel | None) -> list[str]:
    """Return the experiments of ``names``, and the one at ``remote`` where that is given."""
    if remote is not None:
        names = [*names, ENDPOINT]
    found = _known(names, NAMES, "experiment")
    if ENDPOINT in found and remote is None:
        raise typer.BadParameter(f"the experiment {ENDPOINT!r} needs --endpoint URL")
    return found


def _known(names: Sequence[str], all_names: Sequence[str], what: str) -> list[str]:
    try:
        return known(names, all_names, what)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _is_interrupted(comparison: Comparison) -> bool:
    """Make the comparison, and tell whether Ctrl-C or a signal to end came between."""
    try:
        asyncio.run(_cancelled_on_signals(comparison.run()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return True
    return False


async def _cancelled_on_signals(running: Coroutine[Any, Any, None]) -> None:
    task = asyncio.current_task()
    assert task is not None, "called from a coroutine"
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await running


class Screen:
    """Shows how far the comparison is, and what each experiment came to."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._whole = self._bars.add_task("all", total=None, count="")
        self._part = self._bars.add_task("", total=None, count="", visible=False)
        self._budgets: dict[str, float] = {}
        self._seconds_before = 0.0
        self._budget_seconds = 0.0
        self._began_at = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def expect(self, budgets: Mapping[str, float]) -> None:
        """Take note of what is to come, and of about how many seconds each may take."""
        self._budgets = dict(budgets)
        self._bars.update(self._whole, total=sum(budgets.values()))

    def began(self, name: str, doing: str) -> None:
        self._began_at = time.monotonic()
        self._budget_seconds = self._budgets[name]
        self._bars.reset(self._part, total=None, count="", visible=True, description=doing)
        number = list(self._budgets).index(name) + 1
        self._bars.update(self._whole, count=f"{number}/{len(self._budgets)}")

    def doing(self, what: str, done: int, total: int) -> None:
        count = f"{done + 1}/{total}"
        self._bars.update(self._part, description=what, completed=done, total=total, count=count)
        elapsed = min(time.monotonic() - self._began_at, self._budget_seconds)
        self._bars.update(self._whole, completed=self._seconds_before + elapsed)

    def ended(self, name: str, what: str) -> None:
        self._seconds_before += self._budgets[name]
        self._bars.update(self._whole, completed=self._seconds_before)
        self._bars.update(self._part, visible=False)
        seconds = time.monotonic() - self._began_at
        self.write(f"{name}: {what}, {seconds:.0f} s")

    def write(self, text: str) -> None:
        """Leave a line."""
        self._console.print(text, highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
