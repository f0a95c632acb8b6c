"""Tables whose columns are whole or not there: those that have no place at the console's width are left out and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from rich.cells import cell_len
from rich.table import Table

_BETWEEN: Final = 2


class Column(NamedTuple):
    """A column's name and its cells, one a line."""

    name: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """Columns of a terminal that the widest cell needs."""
        return max(map(cell_len, (self.name, *self.cells)))


def needed(columns: Sequence[Column]) -> int:
    """Columns of a terminal that all of them need."""
    return sum(column.width + _BETWEEN for column in columns) - _BETWEEN


def fitting(columns: Sequence[Column], width: int, first_to_go: Sequence[str]) -> tuple[list[Column], str]:
    """The columns that `width` has a place for, and a line of what is left out ('' if nothing is). The names in `first_to_go`
    go in that order; others stay in any case."""
    kept = list(columns)
    for name in first_to_go:
        if needed(kept) <= width:
            break
        kept = [column for column in kept if column.name != name]
    return kept, left_out([column.name for column in columns if column not in kept])


def left_out(names: Sequence[str]) -> str:
    """The line that names what a table lacks."""
    return f"left out for the width: {', '.join(names)}; --json has it" if names else ""


def table_of(columns: Sequence[Column], *, title: str = "", bold: int | None = None) -> Table:
    """The columns side by side; the line with the number `bold` stands out."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=None,
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column.name, justify=column.justify, overflow="fold")
    for number, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        table.add_row(*cells, style="bold" if number == bold else "")
    return table
