"""``scripts/conform``: put a server of the Responses API to checks, ours or anybody's.

What has to hold, and who says so, is in ``protocol/conformance``; this plays it over sockets.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import httpx2
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from protocol.conformance.catalogue import CHECKS, chosen
from protocol.conformance.check import Check, Cost, Target, Way, affordable
from protocol.conformance.play import Result
from scripts.conformance.address import Address, address_of
from scripts.conformance.fuzz import fuzz_checks
from scripts.conformance.report import STYLES, as_json, as_junit, is_clean, print_report
from scripts.conformance.suite import Played, Suite, not_run
from scripts.conformance.wires import http_client

INTERRUPTED = 130
"""Exit status, as shells give it after Ctrl-C."""


def main(
    url: Annotated[str, typer.Argument(help="Of the server, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[
        str | None, typer.Option(help="Asked for by each request.", show_default="the first listed")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CONFORM_API_KEY", help="Sent as a bearer token.", show_default=False),
    ] = None,
    dialect: Annotated[
        list[Way] | None, typer.Option(help="Only this; repeatable.", show_default="all")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Only checks of this name or rule, which may have *; repeatable.",
            show_default="all",
        ),
    ] = None,
    fuzz: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Send up to N frames of junk in each dialect, always the same."
        ),
    ] = 0,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Do not make more; checks beyond it are not run.")
    ] = 1000,
    max_output_tokens: Annotated[
        int, typer.Option(min=16, help="The limit of each response.")
    ] = 128,
    members: Annotated[
        str,
        typer.Option(
            "--with", metavar="JSON", help='Members of each create: {"reasoning": {"effort": …}}.'
        ),
    ] = "{}",
    jobs: Annotated[int, typer.Option(min=1, help="Checks at a time.")] = 8,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Wait for any one thing so long.")
    ] = 30.0,
    list_checks: Annotated[
        bool, typer.Option("--list", help="Say what would be checked, and what it costs.")
    ] = False,
    as_document: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a JUnit report.", show_default="none")
    ] = None,
) -> None:
    """Check a server, and end with status 0 if nothing failed."""
    try:
        address = address_of(url, api_key)
        extra = _members(members)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    checks = chosen((*CHECKS, *fuzz_checks(fuzz)), dialect or (), only or ())
    if not checks:
        raise typer.BadParameter("no check is of these dialects and names")
    out = Console(width=None if sys.stdout.isatty() else 120)
    messages = Console(stderr=True)
    if list_checks:
        _print_list(out, checks)
        return
    target = Target(
        model or _first_model(address, timeout), max_output_tokens, extra, api_key is not None
    )
    paid = affordable(checks, max_requests)
    _print_budget(messages, address, target, checks, paid)
    with Screen(messages, len(paid)) as screen:
        suite = Suite(address, target, screen, jobs, timeout)
        is_interrupted = _is_interrupted(suite, paid)
    all_played = _in_order(checks, paid, screen.played)
    notes = ["the server takes one response at a time"] if suite.overlap.is_serial else []
    if junit is not None:
        junit.write_bytes(as_junit(all_played))
    if as_document:
        print(as_json(address.url, all_played, notes))
    else:
        print_report(out, all_played, notes)
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if not is_clean(all_played):
        raise typer.Exit(1)


def _members(text: str) -> dict[str, Any]:
    try:
        members = json.loads(text)
    except json.JSONDecodeError:
        members = None
    if not isinstance(members, dict):
        raise ValueError(f"expected a JSON object, got {text!r}")
    return members


def _first_model(address: Address, timeout: float) -> str | None:
    """Return the first model that the server lists; None if it lists none.

    Raises:
        SystemExit: nobody is there.
    """

    async def listed() -> httpx2.Response:
        async with http_client(address, timeout) as http:
            return await http.get(f"{address.url}/models")

    try:
        answer = asyncio.run(listed())
    except httpx2.TransportError as error:
        raise SystemExit(f"conform: cannot connect to {address.url}: {error}") from None
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return None


def _print_list(console: Console, checks: Sequence[Check]) -> None:
    for check in checks:
        console.print(f"{check.name}  {check.says}", highlight=False, markup=False, soft_wrap=True)
        source = f"    {check.rule.id}: {check.rule.source}; {check.num_requests} requests"
        console.print(source, highlight=False, markup=False, soft_wrap=True, style="dim")


def _print_budget(
    console: Console,
    address: Address,
    target: Target,
    checks: Sequence[Check],
    paid: Sequence[Check],
) -> None:
    cost = Cost.of(paid, target)
    model = target.model or "the server's model"
    left_out = len(checks) - len(paid)
    console.print(
        f"{len(paid)} checks of {model} at {address.url}: at most {cost.num_requests:,} requests "
        f"and {cost.num_output_tokens:,} output tokens"
        + (f"; {left_out} checks are beyond --max-requests" if left_out else ""),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


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
