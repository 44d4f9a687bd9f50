"""``scripts/usage``: what runs took and cost, by key and model."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.ledger import LedgerError, Total, read_totals
from server.settings import default_data_dir

DATA_DIR = default_data_dir()
_COLUMNS = ("runs", "segments", "input", "cached", "output", "reasoning", "cost, $")
_WIDEST = 1000
"""Columns: more than any row takes."""


def main(
    data_dir: Annotated[Path, typer.Option(help="That of the server.")] = DATA_DIR,
    key: Annotated[
        str | None, typer.Option(help="Count only runs of this API key, by its name.")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"],
            help="Count only runs that began then or later, in local time.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON for programs.")
    ] = False,
) -> None:
    """Show what runs took and cost, by key and model. A server may be using the directory.

    What a simulated accelerator made up says so, whatever name and price it has.

    Runs that are not over yet are not counted, nor those that a server which died had not written:
    the next one will.
    """
    try:
        began_since = since.timestamp() if since else None
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{since} is out of range", param_hint="--since") from error
    try:
        totals = read_totals(data_dir, key=key, since=began_since)
    except LedgerError as error:
        raise SystemExit(f"usage: {error}") from error
    if as_json:
        print(json.dumps([asdict(total) for total in totals]))
    else:
        # What is read by a program, or kept in a file, is as wide as it is.
        console = Console(width=None if sys.stdout.isatty() else _WIDEST)
        console.print(_table(totals) if totals else "no runs")


def _table(totals: Sequence[Total]) -> Table:
    table = Table()
    for column in ("key", "model"):
        table.add_column(column, overflow="fold")
    for column in _COLUMNS:
        table.add_column(column, justify="right", overflow="fold")
    for total in totals:
        counts = (
            *(total.num_runs, total.num_segments, total.input_tokens, total.cached_tokens),
            *(total.output_tokens, total.reasoning_tokens),
        )
        key = total.key or "(none)"
        model = f"{total.model} (simulated)" if total.is_simulated else total.model
        # Names are no markup.
        table.add_row(Text(key), Text(model), *(f"{count:,}" for count in counts), _cost(total))
    return table


def _cost(total: Total) -> str:
    """Return the cost in dollars, and how many runs are not in it."""
    if total.cost_nanodollars is None:
        return "no price"
    dollars = f"{Decimal(total.cost_nanodollars).scaleb(-9):,.6f}"
    unpriced = total.num_unpriced_runs
    return f"{dollars} and {unpriced:,} unpriced" if unpriced else dollars


if __name__ == "__main__":
    typer.run(main)
