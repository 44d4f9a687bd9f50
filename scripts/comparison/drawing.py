"""How plots look: one colour and marker for a design in all of them, and no page around.

They are drawn without pyplot, which keeps state of its own, and become SVG elements for the inside
of an HTML page: text stays text, lines and text take the colour of the page, and ids are prefixed
by the plot's name, so that several of them can stand on one page.
"""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from scripts.comparison.results import Design
from scripts.comparison.statistics import Estimate
from scripts.comparison.wording import count


@dataclass(frozen=True)
class Style:
    """How a design is drawn."""

    color: str
    marker: str
    dashes: Literal["-", "--"] = "-"


STYLES = {
    Design.STATELESS_CACHE: Style("#0072b2", "o"),
    Design.STATELESS_CACHE_RECONNECT: Style("#56b4e9", "h", "--"),
    Design.CHAINED: Style("#009e73", "^"),
    Design.SUSPENDED: Style("#d55e00", "s"),
    Design.SUSPENDED_INJECT: Style("#e69f00", "D", "--"),
    Design.STATELESS: Style("#b565a7", "v"),
    Design.STATELESS_RECONNECT: Style("#8a8a8a", "p", "--"),
}
"""Of Okabe and Ito's palette, which colour-blind people can tell apart, with a darker purple. What
is measured twice is drawn once."""


INK = "#010203"
"""Stands for the colour of the page's text."""
_PANEL_INCHES = (4.1, 2.9)
_LOGARITHMIC_FROM = 4.0
"""The ratio of the largest to the smallest value from which an axis is logarithmic."""

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.18,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    **dict.fromkeys(
        (
            *("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor"),
            *("xtick.color", "ytick.color", "grid.color"),
        ),
        INK,
    ),
}


@dataclass(frozen=True)
class Plot:
    """A plot with its title and a caption of one sentence."""

    name: str
    title: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        """Return it as an element for the inside of a page."""
        drawn = io.StringIO()
        with mpl.rc_context({**SETTINGS, "svg.hashsalt": self.name}):
            self.figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        return _for_a_page(drawn.getvalue(), self.name)


@dataclass(frozen=True)
class Point:
    """One value of a series."""

    x: float
    value: Estimate


@dataclass(frozen=True)
class Series:
    """What one design has over what is varied."""

    design: Design
    points: tuple[Point, ...]


def panels(
    titles: Sequence[str],
    *,
    columns: int = 2,
    width: float = _PANEL_INCHES[0],
    height: float = _PANEL_INCHES[1],
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each title, row by row."""
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    size = (width * columns, height * rows + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(len(titles))]
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.set_axisbelow(True)
    return figure, axes


def draw_floor(axis: Axes, xs: Sequence[float], floors: Sequence[float | None]) -> None:
    """Draw 1, and around it the band in which a ratio may be that of equals."""
    axis.axhline(1, color=INK, linewidth=0.8)
    axis.fill_between(
        xs,
        [1 / (1 + (floor or 0)) for floor in floors],
        [1 + (floor or 0) for floor in floors],
        color=INK,
        alpha=0.12,
        linewidth=0,
    )


def draw_lines(axis: Axes, lines: Sequence[Series], name: str, *, is_layered: bool = False) -> None:
    """Draw lines with their intervals.

    Args:
        axis: what they are drawn on.
        lines: of the designs.
        name: begins their ids.
        is_layered: whether they may lie on each other: then there are no markers, and the later
            ones are thinner.
    """
    for index, line in enumerate(lines):
        style = STYLES[line.design]
        xs = [point.x for point in line.points]
        axis.plot(
            xs,
            [point.value.value for point in line.points],
            color=style.color,
            linestyle=style.dashes,
            marker="" if is_layered else style.marker,
            markersize=4.5,
            linewidth=1.2 + 1.1 * (len(lines) - 1 - index) if is_layered else 1.6,
            zorder=3 if line.design == Design.SUSPENDED and not is_layered else 2,
            gid=slug(f"{name}-{line.design}"),
        )
        axis.fill_between(
            xs,
            [point.value.low for point in line.points],
            [point.value.high for point in line.points],
            color=style.color,
            alpha=0.18,
            linewidth=0,
        )


def legend(figure: Figure, designs: Iterable[Design]) -> None:
    """Name the designs that were drawn, above all panels."""
    drawn = set(designs)
    handles = [
        Line2D([], [], color=style.color, linestyle=style.dashes, marker=style.marker, label=design)
        for design, style in STYLES.items()
        if design in drawn
    ]
    columns = 3 if figure.get_figwidth() < 7 else 4
    figure.legend(handles=handles, loc="outside upper left", ncols=columns)


def scale_x(axis: Axes, xs: Iterable[float]) -> None:
    """Mark what was measured, and nothing between."""
    found = sorted(set(xs))
    if found[0] > 0 and found[-1] / found[0] > _LOGARITHMIC_FROM:
        axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(found))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))


def scale_seconds(axis: Axes, values: Iterable[Estimate]) -> None:
    """Write times on the y axis, which is logarithmic where they differ a lot, else from zero."""
    found = [value.value for value in values]
    low, high = min(found, default=0), max(found, default=0)
    if low > 0 and high / low > _LOGARITHMIC_FROM:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FuncFormatter(tick_seconds))


def tick_seconds(value: float, _: object) -> str:
    """Return a time as it stands at an axis."""
    if value == 0:
        return "0"
    return f"{value:.3g} s" if abs(value) >= 1 else f"{1000 * value:.3g} ms"


def draw_points(
    axis: Axes, points: Sequence[tuple[float, Estimate]], design: Design, name: str
) -> None:
    """Draw values with their intervals, not joined by a line."""
    style = STYLES[design]
    values = [value for _, value in points]
    drawn = axis.errorbar(
        [x for x, _ in points],
        [value.value for value in values],
        yerr=[
            [value.value - value.low for value in values],
            [value.high - value.value for value in values],
        ],
        color=style.color,
        marker=style.marker,
        markersize=5,
        linestyle="none",
    )
    drawn.lines[0].set_gid(slug(name))


def scale_ratios(axis: Axes) -> None:
    """Write ratios on the y axis, which is logarithmic where they differ a lot."""
    low, high = axis.get_ylim()
    if low > 0 and high / low > _LOGARITHMIC_FROM:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(0, max(high, 1.1))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}×"))


def slug(name: str) -> str:
    """Return an id made of ``name``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _for_a_page(svg: str, name: str) -> str:
    """Return the element alone, with ids of its own and the colours of the page."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", element, flags=re.DOTALL)
    element = re.sub(r' xmlns(:xlink)?="[^"]*"', "", element)
    element = re.sub(r"font-family: [^\";]*", "font-family: inherit", element)
    element = element.replace("xlink:href", "href").replace(INK, "currentColor")
    element = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}.", element)
    return element.replace("<svg ", f'<svg role="img" aria-labelledby="{name}-title" ', 1)
