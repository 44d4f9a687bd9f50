"""The tables of the report: titles, cells of text, and remarks; how they look is the template's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks.figures import number
from scripts.comparison import measures
from scripts.comparison.claims import Claim, remark
from scripts.comparison.findings import headline, indifferences
from scripts.comparison.measures import Measure
from scripts.comparison.results import Agreement, Design
from scripts.comparison.statistics import (
    BASELINE,
    ORDER,
    SAME_AGAIN,
    Cell,
    Comparison,
    Measured,
    merged,
    quantile_bounds,
)
from scripts.comparison.wording import NOTHING, count, interval, plural, ratio, seconds, share, size


@dataclass(frozen=True)
class Entry:
    """What stands in one place of a table: a figure, and smaller what belongs to it."""

    text: str
    details: tuple[str, ...] = ()
    is_muted: bool = False
    """Whether it is no difference."""


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    name: str
    entries: tuple[Entry, ...]
    is_emphasised: bool = False
    design: str = ""
    """Whose colour it bears."""


@dataclass(frozen=True)
class Grid:
    """A table."""

    title: str
    columns: tuple[str, ...]
    """The first is that of the rows' names."""
    rows: tuple[Row, ...]
    remark: str = ""
    is_text: bool = field(default=False, kw_only=True)
    """Whether it holds words, which are not aligned as numbers are."""


@dataclass(frozen=True)
class Column:
    """A measure, and how it is written."""

    title: str
    measure: Measure
    write: Callable[[float], str]
    has_interval: bool = False
    again: Measure | None = None
    """What was done more than once of it."""


SUMMARY = (
    Column("end to end, without tools", measures.end_to_end, seconds, has_interval=True),
    Column("time to first token of a turn", measures.first_token, seconds),
    Column("resume: outputs sent to first event", measures.resume, seconds),
    Column(
        "tokens forwarded",
        measures.counted("tokens_forwarded"),
        count,
        again=measures.counted("tokens_reforwarded"),
    ),
    Column("templates rendered", measures.counted("template_renders"), count),
    Column("texts encoded", measures.counted("encodes"), count),
    Column("items classified", measures.items_classified, count),
    Column("bytes sent", measures.bytes_sent, size),
    Column("bytes received", measures.bytes_received, size),
    Column("server's processor time", measures.cpu, seconds),
)


def summary_grids(measured: Measured) -> list[Grid]:
    """Return what a run costs in each design, for each engine, the cached baseline first."""
    cells = [headline(measured, engine) for engine in measured.engines()]
    return [_summary_grid(measured, cell) for cell in cells if cell is not None]


def _summary_grid(measured: Measured, cell: Cell) -> Grid:
    noise = measured.noise(cell, measures.end_to_end)
    floor = "no noise floor" if noise is None else f"noise floor end to end {share(noise)}"
    rounds = plural(measured.num_rounds(cell), "round")
    return Grid(
        f"{cell.engine}: {cell.experiment}, {cell.workload}",
        ("design", *(column.title for column in SUMMARY)),
        tuple(
            Row(
                name,
                tuple(_entry(measured, cell, name, column) for column in SUMMARY),
                is_emphasised=name in (BASELINE, Design.SUSPENDED),
                design=name,
            )
            for name in measured.designs(cell)
        ),
        f"Medians of {rounds}; {floor}.",
    )


def _entry(measured: Measured, cell: Cell, design: str, column: Column) -> Entry:
    value = measured.estimate(cell, design, column.measure)
    if value is None:
        return Entry(NOTHING)
    details = []
    if column.has_interval and value.has_interval:
        details.append(f"{column.write(value.low)} – {column.write(value.high)}")
    # At an endpoint, what is forwarded again is what its cache misses, in all designs alike; but
    # only a run that the server still has can count it.
    measure = None if measured.is_at_endpoint(cell) else column.again
    again = measured.estimate(cell, design, measure) if measure else None
    if again is not None and again.value:
        details.append(f"of them again {column.write(again.value)}")
    comparison = measured.compare(cell, design, column.measure)
    is_other = design != BASELINE and comparison is not None
    if comparison is not None and is_other:
        shown = ratio(comparison.ratio) if column.has_interval else _short_ratio(comparison)
        details.append(shown)
    is_muted = comparison is not None and is_other and not comparison.is_difference
    return Entry(column.write(value.value), tuple(details), is_muted)


def _short_ratio(comparison: Comparison) -> str:
    return f"{number(comparison.ratio.value)}×"


# --- Claims ---------------------------------------------------------------------------------------


def evidence_grid(claim: Claim) -> Grid:
    """Return what a verdict rests on."""
    return Grid(
        "",
        ("cell", "what", "measured", "called"),
        tuple(
            Row(each.cell, (Entry(each.subject), Entry(each.figure), Entry(each.remark)))
            for each in claim.evidence
        ),
        is_text=True,
    )


# --- Stages of the server -------------------------------------------------------------------------

_STAGE = "stage_runs:"


def stage_grids(measured: Measured) -> list[Grid]:
    """Return how often each stage of the server ran, over how much and for how long, by design."""
    cells = [headline(measured, engine) for engine in measured.engines()]
    grids = [_stage_grid(measured, cell) for cell in cells if cell is not None]
    return [grid for grid in grids if grid.rows]


def _stage_grid(measured: Measured, cell: Cell) -> Grid:
    designs = [name for name in measured.designs(cell) if name not in SAME_AGAIN.values()]
    return Grid(
        f"{cell.engine}: {cell.experiment}, {cell.workload}",
        ("stage", *designs),
        tuple(
            Row(stage, tuple(_stage_entry(measured, cell, design, stage) for design in designs))
            for stage in _stages(measured, cell)
        ),
    )


def _stages(measured: Measured, cell: Cell) -> list[str]:
    names = [
        name.removeprefix(_STAGE)
        for design in measured.designs(cell)
        for trial in measured.trials(cell, design)
        for name in trial.counts
        if name.startswith(_STAGE)
    ]
    return list(dict.fromkeys(names))


def _stage_entry(measured: Measured, cell: Cell, design: str, stage: str) -> Entry:
    runs, items, took = (
        measured.estimate(cell, design, measures.counted(f"stage_{what}:{stage}"))
        for what in ("runs", "items", "seconds")
    )
    if runs is None:
        return Entry(NOTHING)
    detail = f"{count(runs.value)} runs"
    if items is not None:
        detail += f", {count(items.value)} items"
    return Entry(NOTHING if took is None else seconds(took.value), (detail,))


def lag_grid(measured: Measured) -> Grid:
    """Return how late the event loop was, by design and engine, over all cells."""
    engines = measured.engines()
    rows = []
    for design in map(str, ORDER):
        entries = tuple(_lag_entry(measured, engine, design) for engine in engines)
        if any(entry.text != NOTHING for entry in entries):
            rows.append(Row(design, entries, design=design))
    return Grid("", ("design", *engines), tuple(rows))


def _lag_entry(measured: Measured, engine: str, design: str) -> Entry:
    histogram = merged(
        trial.loop_lag
        for cell in measured.cells(engine=engine)
        for trial in measured.trials(cell, design)
    )
    middle, late = (quantile_bounds(histogram, quantile) for quantile in (0.5, 0.99))
    if middle is None or late is None:
        return Entry(NOTHING)
    looks = plural(round(max(histogram.values())), "look")
    return Entry(_bound(*middle), (f"99 %: {_bound(*late)}", looks))


def _bound(low: float, high: float) -> str:
    return f"> {seconds(low)}" if high == float("inf") else f"≤ {seconds(high)}"


# --- At an endpoint -------------------------------------------------------------------------------


AT_ENDPOINT = (
    Column("input tokens", measures.input_tokens, count),
    Column("of the input cached", measures.cached_share, share),
    Column("output tokens", measures.output_tokens, count),
    Column("forwarded", measures.forwarded, count),
    Column("read again", measures.read_again, count),
    Column("asked again", measures.asked_again, count),
    Column("sent by the client", measures.bytes_sent, size),
)


def endpoint_grids(measured: Measured) -> list[Grid]:
    """Return, for each cell that an endpoint sampled, what it was given and where the time went."""
    return [
        grid
        for cell in measured.cells()
        if measured.is_at_endpoint(cell)
        for grid in (
            _grid_of(measured, cell, f"{cell}: an agent run", AT_ENDPOINT),
            _grid_of(measured, cell, f"{cell}: a turn, mean seconds", _PARTS),
        )
    ]


_PARTS = tuple(
    Column(part.title, measures.mean_part(part.name), seconds) for part in measures.PARTS
)


def _grid_of(measured: Measured, cell: Cell, title: str, columns: Sequence[Column]) -> Grid:
    return Grid(
        title,
        ("design", *(column.title for column in columns)),
        tuple(
            Row(
                name,
                tuple(_plain_entry(measured, cell, name, column) for column in columns),
                design=name,
            )
            for name in measured.designs(cell)
            if name not in SAME_AGAIN.values()
        ),
    )


# --- Agreement and others -------------------------------------------------------------------------


def agreement_grid(agreements: Sequence[Agreement]) -> Grid:
    """Return whether the designs sample the same tokens."""
    return Grid(
        "",
        (
            *("design", "sampler", "runs", "equal runs", "turns", "turns with other context ids"),
            *("tokens", "differing tokens"),
        ),
        tuple(
            Row(
                each.design,
                (
                    Entry(each.sampler),
                    Entry(count(each.num_runs)),
                    Entry(count(each.equal_runs)),
                    Entry(count(each.num_turns)),
                    Entry(count(each.drifted_turns)),
                    Entry(count(each.num_tokens)),
                    Entry(count(each.differing_tokens)),
                ),
                design=each.design,
            )
            for each in agreements
        ),
    )


OUTSIDE = (
    Column("end to end, without tools", measures.end_to_end, seconds, has_interval=True),
    Column("first event of a turn", measures.first_event, seconds),
    Column("median turn", measures.turn, seconds),
    Column("of the input cached", measures.cached_share, share),
    Column("server's processor time", measures.cpu, seconds),
)


def outside_grids(everything: Measured) -> list[Grid]:
    """Return other servers beside this one, for each workload that was given to one of them."""
    ours = {str(design) for design in Design}
    cells = everything.cells()
    workloads = dict.fromkeys(
        (cell.experiment, cell.workload)
        for cell in cells
        if not ours.issuperset(everything.designs(cell))
    )
    return [
        Grid(
            f"{experiment}: {workload}",
            ("server or design, and format", *(column.title for column in OUTSIDE)),
            tuple(
                Row(
                    f"{name}, {cell.engine}",
                    tuple(_plain_entry(everything, cell, name, column) for column in OUTSIDE),
                    design=name,
                )
                for cell in cells
                if (cell.experiment, cell.workload) == (experiment, workload)
                for name in everything.designs(cell)
                if name not in SAME_AGAIN.values()
            ),
        )
        for experiment, workload in workloads
    ]


def _plain_entry(measured: Measured, cell: Cell, design: str, column: Column) -> Entry:
    value = measured.estimate(cell, design, column.measure)
    if value is None:
        return Entry(NOTHING)
    has_interval = column.has_interval and value.has_interval
    ends = f"{column.write(value.low)} – {column.write(value.high)}"
    return Entry(column.write(value.value), (ends,) if has_interval else ())


# --- Where it does not matter, and all cells ------------------------------------------------------


def indifference_grid(measured: Measured) -> Grid:
    """Return the cells in which a suspended run is not faster by what anybody would notice."""
    return Grid(
        "",
        ("cell", f"{Design.SUSPENDED} / {BASELINE}", "with tools", "why it does not matter"),
        tuple(
            Row(
                str(each.cell),
                (
                    Entry(ratio(each.comparison.ratio)),
                    Entry(NOTHING if each.with_tools is None else ratio(each.with_tools.ratio)),
                    Entry(each.reason, (remark(each.comparison),)),
                ),
            )
            for each in indifferences(measured)
        ),
        is_text=True,
    )


_BESIDE = (Design.CHAINED, Design.SUSPENDED, Design.SUSPENDED_INJECT, Design.STATELESS)


def cells_grid(measured: Measured) -> Grid:
    """Return end to end in every cell."""
    return Grid(
        "",
        ("cell", "rounds", str(BASELINE), *(f"{each} /" for each in _BESIDE), "noise floor"),
        tuple(
            Row(
                str(cell),
                (
                    Entry(count(measured.num_rounds(cell))),
                    _plain_entry(measured, cell, BASELINE, SUMMARY[0]),
                    *(_ratio_entry(measured, cell, design) for design in _BESIDE),
                    _noise_entry(measured, cell),
                ),
            )
            for cell in measured.cells()
        ),
        "End to end without tools; the ratios are to the cached baseline.",
    )


def _ratio_entry(measured: Measured, cell: Cell, design: Design) -> Entry:
    comparison = measured.compare(cell, design, measures.end_to_end)
    if comparison is None:
        return Entry(NOTHING)
    ends = (interval(comparison.ratio),) if comparison.ratio.has_interval else ()
    return Entry(_short_ratio(comparison), ends, not comparison.is_difference)


def _noise_entry(measured: Measured, cell: Cell) -> Entry:
    noise = measured.noise(cell, measures.end_to_end)
    return Entry(NOTHING if noise is None else share(noise))


# --- How it was measured --------------------------------------------------------------------------


def facts_grid(title: str, facts: Mapping[str, Any]) -> Grid:
    """Return what is known by name."""
    return Grid(
        title,
        ("", ""),
        tuple(Row(name.replace("_", " "), (Entry(_fact(value)),)) for name, value in facts.items()),
        is_text=True,
    )


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_fact(each)}" for name, each in value.items()) or NOTHING
    if isinstance(value, list | tuple):
        return ", ".join(map(_fact, value)) or NOTHING
    return str(value)
