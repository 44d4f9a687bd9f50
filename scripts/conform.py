"""``scripts/conform``: put a server of the Responses API to checks, ours or anybody's.

What has to hold, and who says so, is in ``protocol/conformance``; this plays it over sockets.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from protocol.codec import encode
from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check, Cost, Target, Way, affordable
from protocol.conformance.play import Result

# scripts/conform starts Python with -P, and scripts/ is no installed package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from scripts.conformance.address import Address, address_of
from scripts.conformance.fuzz import fuzz_checks
from scripts.conformance.listing import Listing, UnreachableError, listing_of
from scripts.conformance.report import (
    STYLES,
    as_json,
    as_junit,
    counts,
    is_clean,
    print_plain,
    print_report,
)
from scripts.conformance.suite import Played, Suite, not_run
from scripts.conformance.tokens import estimated_input

INTERRUPTED = 130
"""Exit status, as shells give it after Ctrl-C."""
_MAX_LEVELS = 100
"""Of what goes into each request: what is deeper cannot be written as JSON from any depth of calls,
and a server that refuses it does nothing wrong."""
_MAX_SHOWN = 60
"""How much of an option is repeated."""


def _writable(file: Path | None) -> Path | None:
    """Open it before anything is sent: results are not to be lost to a wrong path.

    Raises:
        BadParameter: it cannot be opened.
    """
    try:
        if file is not None:
            file.open("ab").close()  # an older report stays until there is another
    except OSError as error:
        raise typer.BadParameter(f"cannot write {file}: {error.strerror}") from None
    return file


def main(
    url: Annotated[
        str,
        typer.Argument(help="Of the API, such as http://127.0.0.1:8000/v1; /v1 may be left out."),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Named in each request.", show_default="the first that is listed"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CONFORM_API_KEY", help="Sent as a bearer token.", show_default=False),
    ] = None,
    dialect: Annotated[
        list[Way] | None,
        typer.Option(help="Only checks in this dialect; repeatable.", show_default="all"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Only checks of this name or rule, such as 'limit-*'; repeatable.",
            show_default="all",
        ),
    ] = None,
    fuzz: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Also send up to N frames of junk in each dialect, the same each time.",
        ),
    ] = 0,
    max_requests: Annotated[
        int,
        typer.Option(
            min=1,
            help="Do not run checks that would make more. "
            "The list of models and WebSocket upgrades do not count.",
        ),
    ] = 1000,
    max_output_tokens: Annotated[
        int, typer.Option(min=16, help="The limit of each response.")
    ] = 128,
    members: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="JSON",
            help='More members for each create, such as {"reasoning": {"effort": "none"}}.',
        ),
    ] = "{}",
    jobs: Annotated[int, typer.Option(min=1, help="How many checks run at a time.")] = 8,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for any one thing.")
    ] = 30.0,
    list_checks: Annotated[
        bool,
        typer.Option("--list", help="Print what would be checked and what it costs; send nothing."),
    ] = False,
    as_document: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_writable,
            help="Write a JUnit report too.",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Check a server of the Responses API.

    The exit status is 0 if a check passed, and none failed or is in error; 1 if not.
    It is 2 for wrong options, and 130 after an interruption.
    """
    try:
        address = address_of(url, api_key)
        extra = _members(members)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    checks = chosen((*CHECKS, *fuzz_checks(fuzz)), dialect or (), only or ())
    if not checks:
        raise typer.BadParameter("no check is of these dialects and names")
    target = Target(model, max_output_tokens, extra, api_key is not None)
    out = Console(width=None if sys.stdout.isatty() else 120)
    messages = Console(stderr=True)
    if list_checks:
        _print_list(out, checks, target)
        return
    listing = _listing(address, timeout)
    if listing.note:
        print_plain(messages, listing.note)
    target = replace(target, model=model or listing.first)
    paid = affordable(checks, max_requests)
    _print_budget(messages, address, target, checks, paid)
    with Screen(messages, len(paid)) as screen:
        suite = Suite(address, target, screen, jobs, timeout)
        is_interrupted = _is_interrupted(suite, paid)
    all_played = _in_order(checks, paid, screen.played)
    notes = list(filter(None, [listing.note, *_notes(suite, all_played)]))
    try:
        if as_document:
            print(as_json(address.url, all_played, notes))
        else:
            print_report(out, all_played, notes)
    finally:  # whoever reads the one may have gone away, and the other is still of use
        if junit is not None:
            _write(junit, as_junit(all_played))
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if not is_clean(all_played):
        raise typer.Exit(1)


def _members(text: str) -> dict[str, Any]:
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    try:
        members = json.loads(text)
        is_too_deep = _is_deeper(members, _MAX_LEVELS)
        encode({} if is_too_deep else {"with": members})
    except ValueError as error:
        raise ValueError(f"expected a JSON object, got {shown!r}: {error}") from None
    except RecursionError:
        members, is_too_deep = None, True
    if is_too_deep:
        raise ValueError(f"expected at most {_MAX_LEVELS} levels of JSON, got {shown!r}")
    if not isinstance(members, dict):
        raise ValueError(f"expected a JSON object, got {shown!r}")
    return members


def _is_deeper(value: Any, num_levels: int) -> bool:
    """Tell whether ``value`` has more levels of objects and arrays than ``num_levels``."""
    level = [value]
    for _ in range(num_levels + 1):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _listing(address: Address, timeout: float) -> Listing:
    """Return what the server lists.

    Raises:
        SystemExit: nobody is there.
    """
    try:
        return asyncio.run(listing_of(address, timeout))
    except UnreachableError as error:
        raise SystemExit(f"conform: {error}") from None


def _print_list(console: Console, checks: Sequence[Check], target: Target) -> None:
    for check in checks:
        print_plain(console, f"{check.name}  {check.says}")
        source = f"{check.rule.id}: {check.rule.source}"
        print_plain(console, f"    {source}; {_cost([check], target)}", style="dim")


def _print_budget(
    console: Console,
    address: Address,
    target: Target,
    checks: Sequence[Check],
    paid: Sequence[Check],
) -> None:
    model = target.model or "the server's model"
    left_out = len(checks) - len(paid)
    print_plain(
        console,
        f"{len(paid)} checks of {model} at {address.url}: {_cost(paid, target)}"
        + (f"; {left_out} checks are beyond --max-requests" if left_out else ""),
    )


def _cost(checks: Sequence[Check], target: Target) -> str:
    cost = Cost.of(checks, target)
    return (
        f"at most {cost.num_requests:,} requests and {cost.num_output_tokens:,} output tokens, "
        f"about {estimated_input(checks, target):,} input tokens"
    )


def _notes(suite: Suite, all_played: Sequence[Played]) -> Iterator[str]:
    """Return what is to be known beside the results."""
    if suite.overlap.is_serial:
        yield "the server takes one response at a time"
    if not counts(all_played)[Result.PASSED]:
        yield "no check passed, so nothing is known to be right"


def _write(file: Path, report: bytes) -> None:
    try:
        file.write_bytes(report)
    except OSError as error:
        raise SystemExit(f"conform: cannot write {file}: {error.strerror}") from None


def _is_interrupted(suite: Suite, checks: Sequence[Check]) -> bool:
    """Play, and tell whether Ctrl-C or a signal to end came between."""
    try:
        asyncio.run(_cancelled_on_signals(suite.play(checks)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return True
    return False


async def _cancelled_on_signals(running: Coroutine[Any, Any, None]) -> None:
    task = asyncio.current_task()
    assert task is not None, "called from a coroutine"
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await running


def _in_order(
    checks: Sequence[Check], paid: Sequence[Check], all_played: Sequence[Played]
) -> list[Played]:
    """Return what each of ``checks`` came to, those too that were not played."""
    known = {played.verdict.check.name: played for played in all_played}
    names = {check.name for check in paid}
    return [
        known.get(check.name)
        or not_run(check, "interrupted" if check.name in names else "beyond --max-requests")
        for check in checks
    ]


class Screen:
    """Shows how far it is, and each failure as it comes."""

    def __init__(self, console: Console, num_checks: int) -> None:
        self.played: list[Played] = []
        self._console = console
        self._running: list[str] = []
        self._bars = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._bars.add_task("", total=num_checks)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def began(self, check: Check) -> None:
        self._running.append(check.name)
        self._bars.update(self._bar, description=self._running[0])

    def ended(self, played: Played) -> None:
        self.played.append(played)
        verdict = played.verdict
        self._running.remove(verdict.check.name)
        self._bars.update(self._bar, advance=1, description=", ".join(self._running[:1]))
        if verdict.result in (Result.FAILED, Result.ERROR):
            line = f"{verdict.result.value}: {verdict.check.name}"
            self._console.print(line, style=STYLES[verdict.result], highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
