"""The tables of prediction and measurement, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Final

from rich.table import Table

from memcalc.report.consoles import console_for
from memcalc.units import show_bytes
from memcalc.validate.comparison import rank_of
from memcalc.validate.gpus import another_gpu
from memcalc.validate.versions import others

if TYPE_CHECKING:
    from memcalc.validate.comparison import Compared, Comparison


_NARROW: Final = 70  # columns that the longest names of memory need beside four numbers


def print_comparison(comparison: Comparison, file: IO[str]) -> None:
    """Print a table of bytes, a table of collectives, and what ran."""
    console = console_for(file, 200)
    measured = comparison.measured
    console.print(_title(comparison))
    narrow = console.width < _NARROW
    console.print(_table("memory of a steady-state step", comparison.memory, narrow))
    if comparison.communication:
        console.print(_table("communication of a step", comparison.communication, narrow))
    if narrow:
        console.print("no room for: the error of each row")
    worst = comparison.worst
    if worst.difference:
        console.print(f"largest error of memory: {worst.name}, {worst.error:+.2%}")
    else:
        console.print("every row of memory is exact")
    if any(row.difference for row in comparison.communication):
        console.print("communication differs")
    if measured.history is not None:
        console.print(_history(measured.history["phases"]))
    seconds = "" if measured.seconds is None else f" · {measured.seconds:.3f} s a step"
    known = {
        key: value for key, value in measured.environment.items() if value and key != "source"
    }  # source repeats the versions
    attention = f" · attention by {', '.join(measured.attention)}" if measured.attention else ""
    console.print(" · ".join(f"{key} {value}" for key, value in known.items()) + attention + seconds)
    for note in (others(measured.environment), another_gpu(comparison.report, measured.environment)):
        if note:
            console.print(f"note: {note}")


def _title(comparison: Comparison) -> str:
    """Return a line on what ran, with the rank and the number of ranks."""
    s, axes = comparison.report.setup, ("tp", "pp", "cp", "ep")
    parts = [comparison.report.model.name, f"{s.engine}, ZeRO {s.zero}" if s.zero else s.engine]
    parts += [f"{axis} {getattr(s, axis)}" for axis in axes if getattr(s, axis) > 1]
    tokens = f" × {s.seq_len} tokens" if comparison.report.model.program.has_sequence else ""
    parts += [s.precision, f"micro-batch {s.micro_batch_size}{tokens}"]
    parts += [f"recompute {s.recompute}"] if s.recompute != "none" else []
    parts.append(f"backend {comparison.backend}")
    if s.engine == "deepspeed" and s.zero in (1, 2):
        parts.append(f"of {s.gpus} GPUs the rank with most")
    elif s.gpus > 1:
        parts.append(f"rank {rank_of(comparison.report)} of {s.gpus} GPUs")
    return " · ".join(parts)


def _history(phases: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of what the allocator did in each phase."""
    table = _empty(
        "the allocator's history of a step", ("peak", "end", "allocations", "frees", "new segments", "taken")
    )
    for phase in phases:
        counts = (str(phase[name]) for name in ("allocations", "frees", "segments"))
        sizes = (show_bytes(phase["peak"]), show_bytes(phase["end"]))
        table.add_row(phase["phase"], *sizes, *counts, show_bytes(phase["segment_bytes"]))
    return table


def _table(title: str, rows: Sequence[Compared], narrow: bool) -> Table:
    columns = ("predicted", "measured", "difference", *(() if narrow else ("error",)))
    table = _empty(title, columns)
    for row in rows:
        show = str if row.name.endswith(": calls") else show_bytes
        error = f"{row.error:+.2%}" if row.measured or not row.predicted else "none there"
        cells = row.name, show(row.predicted), show(row.measured), show(row.difference), error
        table.add_row(*cells[: len(columns) + 1])
    return table


def _empty(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    table.add_column("row", min_width=12, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
