"""The report: one HTML file that needs nothing but a browser, and a table for the terminal.

A reader who has never seen this project is meant to understand it. What it says is made from the
figures by rules (``findings``, ``claims``), so a report of other figures says something else; a
partial one says that it is partial, and leaves out what it cannot say.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.table import Table
from rich.text import Text

from scripts.comparison import findings, tables
from scripts.comparison.claims import claims
from scripts.comparison.drawing import STYLES
from scripts.comparison.plots import plots
from scripts.comparison.results import Design, Results
from scripts.comparison.statistics import BASELINE, CONFIDENCE, Measured
from scripts.comparison.wording import minutes, plural, share

_TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Description:
    """What a design does at a tool call."""

    design: Design
    transport: str
    sent: str
    """By the client, with the tools' outputs."""
    done: str
    """By the server, before the model goes on."""
    kept: str
    """Between two turns."""


DESCRIPTIONS = (
    Description(
        Design.STATELESS_CACHE,
        "one HTTP request for each turn, connection kept alive",
        "the whole history",
        "reads, checks, authenticates and renders all of it again; finds tokens and KV prefix by "
        "content, so that only what is new is encoded and prefilled",
        "caches: tokens, model configuration, KV prefix",
    ),
    Description(
        Design.CHAINED,
        "one WebSocket for the run",
        "the new items, and previous_response_id",
        "begins a new response on top of a kept one: checks and encodes what is new, and goes on "
        "from its KV cache",
        "the last response with its tokens and KV cache",
    ),
    Description(
        Design.SUSPENDED,
        "one WebSocket for the run",
        "the tools' outputs",
        "wakes the run: encodes the outputs, one forward pass; nothing was closed, so nothing is "
        "opened, and accounting is done once, at the end",
        "the run itself: sampler, tokens, grammar, KV cache",
    ),
    Description(
        Design.STATELESS,
        "one HTTP request for each turn, connection kept alive",
        "the whole history",
        "does all of it again: checks, renders, encodes and prefills every token",
        "nothing",
    ),
)


def write_report(results: Results, path: Path) -> None:
    """Write the report of ``results``, whole or partial, to ``path``: all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        written.write_text(render(results), encoding="utf-8")
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def render(results: Results) -> str:
    """Return the report of ``results`` as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(_contents(results))


def _contents(results: Results) -> dict[str, Any]:
    measured, everything = ours(results), Measured(results.trials)
    return {
        "results": results,
        "began_at": datetime.fromtimestamp(results.began_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "took": minutes(results.seconds),
        "baseline": BASELINE,
        "descriptions": DESCRIPTIONS,
        "colors": {str(design): style.color for design, style in STYLES.items()},
        "answer": findings.answer(measured),
        "summary": tables.summary_grids(measured),
        "claims": [(claim, tables.evidence_grid(claim)) for claim in claims(measured)],
        "plots": plots(measured),
        "stages": tables.stage_grids(measured),
        "lag": tables.lag_grid(measured),
        "disagreements": findings.disagreements(results.agreements),
        "agreement": tables.agreement_grid(results.agreements),
        "endpoint": tables.endpoint_grids(measured),
        "endpoint_tells_times": findings.endpoint_tells_times(measured),
        "outside": tables.outside_grids(everything),
        "where_not": findings.where_not(measured),
        "indifference": tables.indifference_grid(measured),
        "num_judged": len(findings.judged_cells(measured)),
        "small": share(findings.SMALL),
        "left": findings.what_is_left(measured),
        "rounds": _rounds(measured),
        "confidence": share(CONFIDENCE),
        "facts": [
            tables.facts_grid(title, facts)
            for title, facts in (
                ("Machine", results.machine),
                ("Versions", results.versions),
                ("Settings", results.settings),
            )
            if facts
        ],
        "cells": tables.cells_grid(measured),
    }


def ours(results: Results) -> Measured:
    """Return the trials of this server's designs."""
    names = {str(design) for design in Design}
    return Measured(trial for trial in results.trials if trial.design in names)


def _rounds(measured: Measured) -> str:
    numbers = [measured.num_rounds(cell) for cell in measured.cells()]
    if not numbers:
        return "no rounds"
    low, high = min(numbers), max(numbers)
    return plural(low, "round") if low == high else f"{low} to {high} rounds"


# --- The terminal ---------------------------------------------------------------------------------

_SHOWN = (0, 1, 2, 3, 9)
"""Of the summary's columns, those that a terminal has room for."""


def summary(results: Results) -> Table:
    """Return the most important figures for the terminal."""
    titles = [tables.SUMMARY[index].title for index in _SHOWN]
    table = Table(title=_title_of(results), title_justify="left")
    table.add_column("engine, design")
    for title in titles:
        table.add_column(title, justify="right")
    for grid in tables.summary_grids(ours(results)):
        table.add_section()
        table.add_row(Text(grid.title, "bold"), *("" for _ in titles))
        for row in grid.rows:
            entries = [row.entries[index] for index in _SHOWN]
            table.add_row(Text(f"  {row.name}"), *map(_for_a_terminal, entries))
    return table


def _for_a_terminal(entry: tables.Entry) -> Text:
    detail = f" ({entry.details[-1]})" if entry.details else ""
    return Text(entry.text + detail, "dim" if entry.is_muted else "")


def _title_of(results: Results) -> str:
    title = "Designs of serving an agent run; medians, and ratios to the cached baseline"
    return title if results.is_complete else f"{title} (partial)"
