"""Bars of a comparison: where the time of each setup's step goes, and its memory at the peak by component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.text import Text

from memcalc.core.rows import COMPONENTS
from memcalc.decisions.compare_rows import REFUSED, at_peak, heading, time_of
from memcalc.report.folding import Folded
from memcalc.timing.kernels import Unknown
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memcalc.decisions.compare import Column, Compared

_MOST: Final = 60
_BESIDE: Final = 14  # columns for the number after a bar


class Look(NamedTuple):
    """The way a part of a bar is drawn: its character tells it apart without colour."""

    word: str
    character: str
    colour: str


_TIME: Final[Mapping[str, Look]] = {
    "compute": Look("compute", "█", "green"),
    "recompute": Look("recomputation", "▓", "yellow"),
    "exposed_communication": Look("exposed communication", "▒", "red"),
    "bubble": Look("waiting for other stages", "░", "magenta"),
    "optimizer": Look("optimizer", "o", "blue"),
}
_MEMORY: Final[Mapping[str, Look]] = {
    name: Look(name.replace("_", " "), character, colour)
    for name, character, colour in zip(
        COMPONENTS, "█▓o▒=░", ("blue", "cyan", "green", "yellow", "magenta", "red"), strict=True
    )
}


def bar_lines(compared: Compared, width: int) -> list[RenderableType]:
    """Return a bar for each setup's time, if one is known, and one for its memory. All bars of a kind have one scale."""
    full = max(1, min(_MOST, width - _BESIDE))
    times = [time_of(column) for column in compared.columns]
    out: list[RenderableType] = []
    if any(times):
        out += _title("where the time of a step goes", _TIME)
        longest = max(time.seconds for time in times if time is not None)
        for column, time in zip(compared.columns, times, strict=True):
            parts = None if time is None else time.breakdown
            out += _one(column, parts, _TIME, longest, full, show_seconds(time.seconds) if time else _no_time(column))
    out += _title("memory at the peak", _MEMORY)
    largest = max(column.report.peak for column in compared.columns if column.report is not None)
    for column in compared.columns:
        report = column.report
        sizes = None if report is None else at_peak(report)
        out += _one(column, sizes, _MEMORY, largest, full, REFUSED if report is None else show_bytes(report.peak))
    return out


def cells_of(parts: Sequence[float], whole: float, full: int) -> list[int]:
    """Return how many cells of a bar each part has, if `whole` has `full`: each end is rounded, so that the cells add up."""
    ends, total = [0], 0.0
    for part in parts:
        total += part
        ends.append(round(full * total / whole))
    return [end - begin for begin, end in pairwise(ends)]


def _title(words: str, looks: Mapping[str, Look]) -> list[RenderableType]:
    key = "  ".join(f"{look.character} {look.word}" for look in looks.values())
    return ["", Text(words, "bold"), Folded(key)]


def _one(
    column: Column,
    parts: Mapping[str, float] | None,
    looks: Mapping[str, Look],
    whole: float,
    full: int,
    number: str,
) -> list[RenderableType]:
    """Return a setup's heading, and its bar with a number after it."""
    bar = Text("  ")
    if parts is not None:
        named = [(looks[name], size) for name, size in parts.items()]
        for (look, _), cells in zip(named, cells_of([size for _, size in named], whole, full), strict=True):
            bar.append(look.character * cells, look.colour)
        bar.append(" ")
    bar.append(number)
    return [Folded(heading(column)), bar]


def _no_time(column: Column) -> str:
    """Return why a column has no time."""
    if column.report is None:
        return REFUSED
    time = column.report.time
    return f"not known: {time.missing}" if isinstance(time, Unknown) else ""
