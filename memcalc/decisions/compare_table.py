"""A comparison in a terminal: a column for each setup, or below each other where the columns do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import IO, TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memcalc.decisions.compare_bars import bar_lines
from memcalc.decisions.compare_rows import (
    BEST,
    NOTHING,
    PEAK,
    Line,
    head_lines,
    heading,
    refusals,
    shared_settings,
    unknown_times,
    value_lines,
)
from memcalc.report.consoles import console_for
from memcalc.report.fitting import Column as Cells
from memcalc.report.fitting import needed
from memcalc.report.folding import Folded

if TYPE_CHECKING:
    from memcalc.decisions.compare import Compared

_WIDTH: Final = 120


def print_compared(
    compared: Compared,
    file: IO[str],
    *,
    bars: bool = False,
    waiting: Callable[[str], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Print a comparison. A terminal gets its own width; any other file 120 columns, or as COLUMNS says.

    `waiting` returns the context for slow work, given words for that work.
    """
    console = console_for(file, _WIDTH)
    with waiting("the steps, played through the allocator"):
        head, lines = head_lines(compared), value_lines(compared)
    parts: list[RenderableType] = [Folded(" · ".join(shared_settings(compared))), ""]
    parts += _side_by_side(head, lines) if _room(head, lines) <= console.width else _below(compared, head, lines)
    parts += ["", *(Folded(line) for line in [*_legend(lines), *refusals(compared), *unknown_times(compared)])]
    if bars:
        parts += bar_lines(compared, console.width)
    console.print(Group(*parts))


def _legend(lines: list[Line]) -> list[str]:
    marked = any(line.best for line in lines)
    spare = [cell for line in lines if line.label == "to spare" for cell in line.cells]
    lacking = any(re.match(r"-\d", cell) for cell in spare)
    return [
        *([f"{BEST} the best of its line; times and costs: of the setups that fit"] if marked else []),
        "components: their bytes at the peak, each setup's own moment; allocated, device: as torch and nvidia-smi show them",
        *(["to spare below zero: at least so much is missing, even if all cached memory is freed"] if lacking else []),
    ]


def _marked(line: Line) -> list[str]:
    """Return the cells of a line. Each has room for the mark if one of them is the best."""
    if not line.best:
        return [f"{cell}  " for cell in line.cells]
    return [f"{cell} {BEST if i in line.best else ' '}" for i, cell in enumerate(line.cells)]


def _room(head: list[Line], lines: list[Line]) -> int:
    """Return how many terminal columns the table needs."""
    every = [[line.label, *_marked(line)] for line in (*head, *lines)]
    return needed([Cells("", cells) for cells in zip(*every, strict=True)])


def _side_by_side(head: list[Line], lines: list[Line]) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    for _ in head[0].cells:
        table.add_column(justify="right", no_wrap=True)
    for line in (*head, *lines):
        if line is lines[0]:
            table.add_row()
        cells = [Text(cell, "bold" if i in line.best else "") for i, cell in enumerate(_marked(line))]
        table.add_row(line.label, *cells, style="bold" if line in head or line.label == PEAK else "")
    return [table]


def _below(compared: Compared, head: list[Line], lines: list[Line]) -> list[RenderableType]:
    """Return a block for each setup, with a line for each number."""
    resolved = head[len(compared.varied) :]
    widest = max(len(line.label) for line in (*resolved, *lines))
    out: list[RenderableType] = []
    for number, column in enumerate(compared.columns):
        out += [*([""] if number else []), Folded(Text(heading(column), "bold"))]
        for line in (*resolved, *lines):
            mark = f" {BEST}" if number in line.best else ""
            if line.cells[number] != NOTHING:
                out.append(Text(f"  {line.label:<{widest}}  {line.cells[number]}{mark}", "bold" if mark else ""))
    return out
