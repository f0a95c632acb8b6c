"""Prediction and measurement side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from rich.table import Table

from memcalc.report.models import plain_console
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.validate.comparison import Compared, Comparison


def print_comparison(comparison: Comparison, file: IO[str]) -> None:
    """A table of bytes, one of collectives, and what ran."""
    console = plain_console(file)
    setup, measured = comparison.report.setup, comparison.measured
    degrees = "" if setup.gpus == 1 else f", rank 0 of {setup.gpus} GPUs"
    console.print(
        f"{comparison.report.model.name} · {setup.engine} · {setup.precision} · backend {comparison.backend}{degrees}"
    )
    console.print(_table("memory of a steady-state step", comparison.memory))
    if comparison.communication:
        console.print(_table("communication of a step", comparison.communication))
    worst = comparison.worst
    if worst.difference:
        console.print(f"largest error of memory: {worst.name}, {worst.error:+.2%}")
    else:
        console.print("every row of memory is exact")
    if any(row.difference for row in comparison.communication):
        console.print("communication differs")
    seconds = "" if measured.seconds is None else f" · {measured.seconds:.3f} s a step"
    console.print(" · ".join(f"{key} {value}" for key, value in measured.environment.items() if value) + seconds)


def _table(title: str, rows: Sequence[Compared]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    table.add_column("row", min_width=12)
    for column in ("predicted", "measured", "difference", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        show = str if row.name.endswith(": calls") else show_bytes
        table.add_row(row.name, show(row.predicted), show(row.measured), show(row.difference), f"{row.error:+.2%}")
    return table
