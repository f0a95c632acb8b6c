"""Tables that never cut a column: columns without room at the console's width are left out and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from rich.cells import cell_len
from rich.table import Table

_BETWEEN: Final = 2


class Column(NamedTuple):
    """A column's name and its cells, one for each line."""

    name: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """Return how many terminal columns the widest cell needs."""
        return max(map(cell_len, (self.name, *self.cells)))


def needed(columns: Sequence[Column]) -> int:
    """Return how many terminal columns all these columns need."""
    return sum(column.width + _BETWEEN for column in columns) - _BETWEEN


def fitting(columns: Sequence[Column], width: int, first_to_go: Sequence[str]) -> tuple[list[Column], str]:
    """Return the columns that fit into `width`, and a line that names the columns left out ('' if none). Columns in
    `first_to_go` are left out in that order; all others always stay."""
    kept = list(columns)
    for name in first_to_go:
        if needed(kept) <= width:
            break
        kept = [column for column in kept if column.name != name]
    return kept, left_out([column.name for column in columns if column not in kept])


def left_out(names: Sequence[str]) -> str:
    """Return the line that names what a table leaves out; '' if nothing."""
    return f"no room for: {', '.join(names)}; --json has all" if names else ""


def table_of(columns: Sequence[Column], *, title: str = "", bold: int | None = None) -> Table:
    """Return a table of the columns; the line with the number `bold` is bold."""
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
