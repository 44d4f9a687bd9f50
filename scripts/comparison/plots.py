"""The plots of the report: what is drawn of which experiment, and its caption."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from scripts.comparison import measures
from scripts.comparison.claims import DOMINATING_SHARE, overhead_shares
from scripts.comparison.drawing import (
    INK,
    SETTINGS,
    STYLES,
    Plot,
    Point,
    Series,
    draw_floor,
    draw_lines,
    draw_points,
    legend,
    panels,
    scale_ratios,
    scale_seconds,
    scale_x,
    slug,
    tick_seconds,
)
from scripts.comparison.findings import dominates_from, headline, is_simulated, parts_of
from scripts.comparison.measures import Measure
from scripts.comparison.results import Design, Trial
from scripts.comparison.statistics import BASELINE, Cell, Estimate, Measured, median
from scripts.comparison.wording import count, listed, ratio, seconds, share

PART_COLORS = {
    "prefill": "#7f7f7f",
    "decode": "#b8b8b8",
    "network": "#77aadd",
    "pre_inference": "#ee8866",
    "queue": "#eedd88",
    "post_inference": "#ffaabb",
    "upstream": "#99ddff",
}
"""Inference is grey. Of Tol's light palette."""

_MAIN = (Design.STATELESS_CACHE, Design.CHAINED, Design.SUSPENDED, Design.STATELESS)
"""What captions speak of."""
_WITHOUT_CACHE = (Design.STATELESS, Design.STATELESS_RECONNECT)
"""So far off the others that these could not be told apart beside them."""


def plots(measured: Measured) -> list[Plot]:
    """Return the plots for which there is something to draw, in the order of the report."""
    drawers: tuple[Callable[[Measured], Plot | None], ...] = (
        *(_over(varied) for varied in VARIED[:2]),
        split_plot,
        pace_plot,
        forwarded_plot,
        *(_over(varied) for varied in VARIED[2:]),
        tools_plot,
        connections_plot,
    )
    with mpl.rc_context(SETTINGS):
        drawn = [draw(measured) for draw in drawers]
    return [plot for plot in drawn if plot is not None]


def series(
    measured: Measured, cells: Sequence[Cell], value_of: Callable[[Cell, Design], Estimate | None]
) -> list[Series]:
    """Return what each design that is drawn has in ``cells``; without those that have nothing."""
    found = []
    for design in STYLES:
        points = tuple(
            Point(measured.x(cell), value)
            for cell in cells
            if (value := value_of(cell, design)) is not None
        )
        if points:
            found.append(Series(design, points))
    return found


def _ratio_of(measured: Measured, cell: Cell, design: Design, measure: Measure) -> Estimate | None:
    comparison = measured.compare(cell, design, measure)
    return None if comparison is None else comparison.ratio


# --- Lines over what an experiment varies ---------------------------------------------------------


@dataclass(frozen=True)
class Varied:
    """An experiment that varies a number, and what is drawn of it."""

    experiment: str
    title: str
    x_label: str
    y_label: str
    measure: Measure


VARIED = (
    Varied(
        "calls",
        "End to end against the number of tool calls",
        "tool calls of the run",
        "end to end without tools",
        measures.end_to_end,
    ),
    Varied(
        "context",
        "A turn against the context it begins with",
        "tokens of context at the start",
        "median turn",
        measures.turn,
    ),
    Varied(
        "results",
        "End to end against the size of the tools' results",
        "tokens of each tool result",
        "end to end without tools",
        measures.end_to_end,
    ),
    Varied(
        "concurrency",
        "End to end against the number of agent runs at once",
        "agent runs at once",
        "end to end without tools",
        measures.end_to_end,
    ),
    Varied(
        "endpoint",
        "Over an endpoint: end to end against the number of tool calls",
        "tool calls of the run",
        "end to end without tools",
        measures.end_to_end,
    ),
)


def _over(varied: Varied) -> Callable[[Measured], Plot | None]:
    return lambda measured: varied_plot(measured, varied)


def varied_plot(measured: Measured, varied: Varied) -> Plot | None:
    """Return lines with their intervals, a panel for each engine; below, where it was measured,
    their ratios to the baseline, in which designs that are close to it can be told apart."""
    engines = measured.engines(varied.experiment)
    if not engines:
        return None
    figure, axes = panels([*engines, *("" for _ in engines)], columns=len(engines))
    drawn: set[Design] = set()
    for index, engine in enumerate(engines):
        above, below = axes[index], axes[index + len(engines)]
        drawn |= _draw_values(above, measured, varied, engine)
        drawn |= _draw_ratio_lines(below, measured, varied, engine)
        below.set_xlabel(varied.x_label)
        if index == 0:
            above.set_ylabel(varied.y_label)
            below.set_ylabel(f"ratio to {BASELINE}")
    if not drawn:
        return None
    legend(figure, drawn)
    caption = _caption_of_last(measured, varied, engines)
    return Plot(varied.experiment, varied.title, caption, figure)


def _draw_values(axis: Axes, measured: Measured, varied: Varied, engine: str) -> set[Design]:
    cells = measured.cells(varied.experiment, engine)
    lines = series(
        measured, cells, lambda cell, each: measured.estimate(cell, each, varied.measure)
    )
    draw_lines(axis, lines, f"{varied.experiment}-{engine}")
    scale_x(axis, map(measured.x, cells))
    scale_seconds(axis, [point.value for line in lines for point in line.points])
    return {line.design for line in lines}


def _draw_ratio_lines(axis: Axes, measured: Measured, varied: Varied, engine: str) -> set[Design]:
    cells = measured.cells(varied.experiment, engine)
    lines = [
        line
        for line in series(
            measured, cells, lambda cell, each: _ratio_of(measured, cell, each, varied.measure)
        )
        if line.design not in (BASELINE, *_WITHOUT_CACHE)
    ]
    draw_lines(axis, lines, f"{varied.experiment}-{engine}-ratio")
    draw_floor(
        axis,
        [measured.x(cell) for cell in cells],
        [measured.noise(cell, varied.measure) for cell in cells],
    )
    scale_x(axis, map(measured.x, cells))
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.9), max(high, 1.05))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}×"))
    return {line.design for line in lines}


def _caption_of_last(measured: Measured, varied: Varied, engines: Sequence[str]) -> str:
    said = []
    for engine in engines:
        cell = measured.cells(varied.experiment, engine)[-1]
        said.append(f"on {engine}, {_side_by_side(measured, cell, varied.measure)}")
    return f"At the largest value measured: {'; '.join(said)}."


def _side_by_side(measured: Measured, cell: Cell, measure: Measure) -> str:
    values = [
        f"{design} {seconds(value.value)}"
        for design in _MAIN
        if (value := measured.estimate(cell, design, measure)) is not None
    ]
    comparison = measured.compare(cell, Design.SUSPENDED, measure)
    beside = ""
    if comparison is not None:
        called = "" if comparison.is_difference else ", not called a difference"
        beside = f" ({Design.SUSPENDED} / {BASELINE} {ratio(comparison.ratio)}{called})"
    return f"{cell.workload}: {listed(values)}{beside}"


# --- Where the time of a turn goes ----------------------------------------------------------------


def split_plot(measured: Measured) -> Plot | None:
    """Return the parts of a turn, stacked, for each design, a panel for each engine."""
    cells = {
        engine: cell
        for engine in measured.engines()
        if (cell := headline(measured, engine)) is not None and _split_designs(measured, cell)
    }
    if not cells:
        return None
    titles = [f"{engine}: {cell.workload}" for engine, cell in cells.items()]
    figure, axes = panels(titles, height=2.2)
    for cell, axis in zip(cells.values(), axes, strict=True):
        _draw_split(axis, measured, cell)
    has_endpoint = any(map(measured.is_at_endpoint, cells.values()))
    handles = [
        Patch(color=PART_COLORS[part.name], label=part.title)
        for part in measures.PARTS
        if has_endpoint or part.name != "upstream"
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return Plot(
        "split", "Where the time of a turn goes", _caption_of_split(measured, cells), figure
    )


def _split_designs(measured: Measured, cell: Cell) -> list[Design]:
    return [design for design in STYLES if parts_of(measured, cell, design)]


def _draw_split(axis: Axes, measured: Measured, cell: Cell) -> None:
    designs = _split_designs(measured, cell)[::-1]
    left = [0.0] * len(designs)
    for part in measures.PARTS:
        widths = [max(0.0, parts_of(measured, cell, each)[part.name]) for each in designs]
        bars = axis.barh([str(d) for d in designs], widths, left=left, height=0.7)
        for bar in bars:
            bar.set_facecolor(PART_COLORS[part.name])
        bars[0].set_gid(slug(f"split-{cell.engine}-{part.name}"))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    end = _end_of_bars(dict(zip(designs, left, strict=True)))
    for row, total in enumerate(left):
        label = seconds(total) if total <= end else f"→ {seconds(total)}"
        place = (min(total, end), row)
        axis.annotate(label, place, (4, 0), textcoords="offset points", va="center")
    axis.set_xlim(0, end)
    axis.xaxis.set_major_formatter(FuncFormatter(tick_seconds))
    axis.locator_params(axis="x", nbins=5)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("mean turn without its tools")


def _end_of_bars(totals: dict[Design, float]) -> float:
    """Return where the axis ends: a design without cache is cut, where it dwarfs the others."""
    longest = max(totals.values())
    with_cache = [total for design, total in totals.items() if design not in _WITHOUT_CACHE]
    longest_with_cache = max(with_cache, default=longest)
    return min(1.2 * longest, 1.6 * longest_with_cache)


def _caption_of_split(measured: Measured, cells: dict[str, Cell]) -> str:
    said = []
    is_negative = False
    for engine, cell in cells.items():
        shares = []
        for design in (BASELINE, Design.SUSPENDED):
            parts = parts_of(measured, cell, design)
            is_negative |= any(value < 0 for value in parts.values())
            overhead = measured.estimate(cell, design, measures.overhead_share)
            if overhead is not None:
                shares.append(f"{share(overhead.value)} {design}")
        if shares:
            said.append(f"{listed(shares)} on {engine}")
    note = " (a part below zero, within the error of two clocks, is drawn as none)"
    return (
        "Grey is inference and all that is coloured is overhead, which is "
        f"{'; '.join(said) or 'not known for the main designs'}{note if is_negative else ''}; "
        "an arrow marks a bar that is cut."
    )


# --- Overhead by pace -----------------------------------------------------------------------------


def pace_plot(measured: Measured) -> Plot | None:
    """Return the share of overhead against the pace of the model."""
    cells = sorted(measured.cells("pace"), key=measured.x)
    lines = series(
        measured, cells, lambda cell, each: measured.estimate(cell, each, measures.overhead_share)
    )
    if not lines:
        return None
    figure, (axis,) = panels([""], width=6.0)
    draw_lines(axis, lines, "pace")
    scale_x(axis, [point.x for line in lines for point in line.points])
    axis.axhline(DOMINATING_SHARE, color=INK, linewidth=0.8, linestyle=":", gid="pace-half")
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: share(value)))
    axis.set_xlabel("pace of the model, tokens/s")
    axis.set_ylabel("overhead of a turn")
    legend(figure, [line.design for line in lines])
    return Plot(
        "pace", "Overhead against the pace of the model", _caption_of_pace(measured), figure
    )


def _caption_of_pace(measured: Measured) -> str:
    said = []
    for design in (BASELINE, Design.SUSPENDED, Design.STATELESS):
        shares = overhead_shares(measured, [design])
        if shares:
            paces = [
                f"{share(each.share.value)} at {count(each.tokens_per_second)}"
                for each in (shares[0], shares[-1])
            ]
            said.append(f"in {design} {listed(paces)} ({dominates_from(measured, design)})")
    return f"All of a turn but prefill and decode is, by tokens/s, {'; '.join(said)}."


# --- Tokens forwarded -----------------------------------------------------------------------------


def forwarded_plot(measured: Measured) -> Plot | None:
    """Return the tokens forwarded up to each turn of the coding trace."""
    cells = [cell for cell in measured.cells("traces") if "coding" in cell.workload]
    for cell in sorted(cells, key=lambda each: is_simulated(each.engine)):
        lines = [line for design in STYLES if (line := _forwarded(measured, cell, design))]
        if lines:
            return _draw_forwarded(cell, lines)
    return None


def _draw_forwarded(cell: Cell, lines: Sequence[Series]) -> Plot:
    figure, (axis,) = panels([""], width=6.0)
    draw_lines(axis, lines, "forwarded", is_layered=True)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("turn")
    axis.set_ylabel("tokens forwarded so far")
    legend(figure, [line.design for line in lines])
    said = [
        f"{count(line.points[-1].value.value)} in {line.design}"
        for line in lines
        if line.design in _MAIN
    ]
    caption = (
        f"By the last of {len(lines[0].points)} turns of {cell.workload} on {cell.engine}, tokens "
        f"forwarded are {listed(said) or 'not known for the main designs'}."
    )
    return Plot("forwarded", "Tokens forwarded over a coding run", caption, figure)


def _forwarded(measured: Measured, cell: Cell, design: Design) -> Series | None:
    rounds = [
        totals
        for trial in measured.trials(cell, design)
        if (totals := cumulative_tokens_forwarded(trial))
    ]
    if not rounds:
        return None
    length = min(map(len, rounds))
    points = tuple(
        Point(turn + 1, median([totals[turn] for totals in rounds])) for turn in range(length)
    )
    return Series(design, points)


def cumulative_tokens_forwarded(trial: Trial) -> list[float]:
    """Return the tokens forwarded up to each turn of a run, the median of several; empty where a
    turn does not tell."""
    totals = []
    for run in trial.runs:
        forwarded = [turn.tokens_forwarded for turn in run.turns]
        known = [tokens for tokens in forwarded if tokens is not None]
        if not known or len(known) < len(forwarded):
            return []
        totals.append(list(accumulate(known)))
    return [statistics.median(values) for values in zip(*totals, strict=False)]


# --- Ratios side by side --------------------------------------------------------------------------


def tools_plot(measured: Measured) -> Plot | None:
    """Return the ratio to the baseline, the tools' time included, by how long tools take."""
    return _ratio_plot(
        measured,
        "tools",
        "What is left of it once tools take time",
        (Design.CHAINED, Design.SUSPENDED),
        measures.wall,
        f"end to end with tools / {BASELINE}",
    )


def connections_plot(measured: Measured) -> Plot | None:
    """Return the ratio to the baseline of designs that keep their connection and that do not."""
    return _ratio_plot(
        measured,
        "connections",
        "Keep-alive against a new connection for each request",
        (Design.STATELESS_CACHE_RECONNECT, Design.CHAINED, Design.SUSPENDED),
        measures.end_to_end,
        f"end to end without tools / {BASELINE}",
    )


def _ratio_plot(
    measured: Measured,
    experiment: str,
    title: str,
    spoken_of: Sequence[Design],
    measure: Measure,
    label: str,
) -> Plot | None:
    designs = [design for design in STYLES if design != BASELINE]
    cells_of = {
        engine: cells
        for engine in measured.engines(experiment)
        if (cells := _cells_with_ratio(measured, experiment, engine, designs, measure))
    }
    if not cells_of:
        return None
    figure, axes = panels(list(cells_of))
    drawn: list[Design] = []
    for (engine, cells), axis in zip(cells_of.items(), axes, strict=True):
        drawn += _draw_ratios(axis, measured, cells, designs, measure, f"{experiment}-{engine}")
        axis.set_ylabel(label)
    legend(figure, drawn)
    caption = _caption_of_ratios(measured, cells_of, spoken_of, measure)
    return Plot(experiment, title, caption, figure)


def _cells_with_ratio(
    measured: Measured,
    experiment: str,
    engine: str,
    designs: Sequence[Design],
    measure: Measure,
) -> list[Cell]:
    return [
        cell
        for cell in measured.cells(experiment, engine)
        if any(measured.compare(cell, design, measure) for design in designs)
    ]


def _draw_ratios(
    axis: Axes,
    measured: Measured,
    cells: Sequence[Cell],
    designs: Sequence[Design],
    measure: Measure,
    name: str,
) -> list[Design]:
    drawn = []
    for index, design in enumerate(designs):
        offset = (index - (len(designs) - 1) / 2) * 0.11
        points = [
            (position + offset, comparison.ratio)
            for position, cell in enumerate(cells)
            if (comparison := measured.compare(cell, design, measure)) is not None
        ]
        if points:
            drawn.append(design)
            draw_points(axis, points, design, f"{name}-{design}")
    for position, cell in enumerate(cells):
        floor = measured.noise(cell, measure)
        draw_floor(axis, [position - 0.45, position + 0.45], [floor, floor])
    axis.set_xticks(range(len(cells)), [cell.workload for cell in cells])
    axis.set_xlim(-0.5, len(cells) - 0.5)
    axis.grid(visible=False, axis="x")
    scale_ratios(axis)
    return drawn


def _caption_of_ratios(
    measured: Measured,
    cells_of: dict[str, list[Cell]],
    designs: Sequence[Design],
    measure: Measure,
) -> str:
    said = []
    for engine, cells in cells_of.items():
        compared = [
            f"{design} {ratio(comparison.ratio)}"
            for design in designs
            if (comparison := measured.compare(cells[-1], design, measure)) is not None
        ]
        if compared:
            said.append(f"at {cells[-1].workload} on {engine}, {'; '.join(compared)}")
    found = " – ".join(said) or "nothing for the main designs"
    return f"Beside {BASELINE}, with the noise floor as a grey band: {found}."
