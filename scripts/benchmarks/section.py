"""What a section found out: grids of figures, for people as tables and for programs as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from scripts.benchmarks.figures import Figure


@dataclass(frozen=True)
class Grid:
    """Figures by row and column; not every place has one."""

    title: str
    rows: Mapping[str, Mapping[str, Figure]]

    def columns(self) -> list[str]:
        """Return the names of all columns, in the order in which the rows bring them."""
        return list(dict.fromkeys(column for row in self.rows.values() for column in row))

    def table(self) -> Table:
        """Return it for people: medians, and the lowest and the highest sample."""
        columns = self.columns()
        table = Table("", title=self.title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        for name, row in self.rows.items():
            table.add_row(name, *(str(row[c]) if c in row else "-" for c in columns))
        return table

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            name: {column: figure.as_json() for column, figure in row.items()}
            for name, row in self.rows.items()
        }


@dataclass
class Section:
    """What one section measured."""

    name: str
    title: str
    grids: list[Grid]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """On what the figures depend: sizes, threads, models."""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "title": self.title,
            "settings": dict(self.settings),
            "grids": {grid.title: grid.as_json() for grid in self.grids},
            "notes": self.notes,
        }
