"""Every row of a report with its formula, at any width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memcalc.report.fitting import left_out
from memcalc.report.folding import Folded

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_WIDE: Final = 130  # columns that one line for each row needs; in fewer, the formula has lines of its own
_NARROW: Final = 56  # columns that two numbers of bytes and a name need


def rows_table(report: Report, width: int) -> list[RenderableType]:
    """Return the table, and a line that names the columns left out for the width."""
    return [_on_one_line(report)] if width >= _WIDE else _on_several(report, width)


def _on_one_line(report: Report) -> Table:
    table = _table()
    table.add_column("component", no_wrap=True)
    table.add_column("name", overflow="fold", ratio=2)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("at the peak", justify="right", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("formula", overflow="fold", ratio=3)
    table.add_column("basis", no_wrap=True)
    for i in [*report.items, *report.overheads]:
        sizes = (f"{i.nbytes:,}", f"{i.at_peak:,}")
        table.add_row(i.component, Folded(i.name), *sizes, i.dtype, Folded(i.formula), i.basis)
    return table


def _on_several(report: Report, width: int) -> list[RenderableType]:
    """Return the narrow table: a heading for each component, and below each row's name its formula, dtype and basis."""
    both = width >= _NARROW
    table = _table()
    table.add_column("name", overflow="fold")
    for column in ("bytes", *(["at the peak"] if both else [])):
        table.add_column(column, justify="right", no_wrap=True)
    component = ""
    for i in [*report.items, *report.overheads]:
        if i.component != component:
            component = i.component
            table.add_row(component, style="bold")
        words = " · ".join(word for word in (i.formula, i.dtype, i.basis) if word)
        table.add_row(Folded(f"{i.name}\n  {words}"), f"{i.nbytes:,}", *([f"{i.at_peak:,}"] if both else []))
    return [table, *([] if both else [Text(left_out(["at the peak"]))])]


def _table() -> Table:
    return Table(title="Rows", title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
