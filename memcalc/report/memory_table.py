"""The table of memory: each component, then peak, allocated, reserved and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memcalc.core.rows import COMPONENTS, Item
from memcalc.report.bars import bar, full_bar
from memcalc.report.fitting import left_out
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_LABELS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "saved_activations": "saved activations",
    "buffers": "buffers",
    "temporaries": "temporaries",
}
_NARROW: Final = 70  # columns; in fewer, the table has names and sizes only


def memory_table(report: Report, width: int, *, verbose: bool) -> list[RenderableType]:
    """Return the table, and a line that names the columns left out for the width. Beside each total is the tool that shows it,
    or with `verbose` what it adds to the total above."""
    table, narrow = titled("Memory per GPU"), width < _NARROW
    lines: list[tuple[list[str], str]] = []

    def add(name: str, most: int | None, at_peak: int, note: str, style: str = "", bar: str = "") -> None:
        sizes = ["" if most is None else show_bytes(most), show_bytes(at_peak)]
        lines.append(([name, *sizes, *([] if narrow else [bar, note])], style))

    for component in COMPONENTS:
        items = [i for i in report.items if i.component == component]
        at_peak = sum(i.at_peak for i in items)
        most = report.total(component) if component != "temporaries" else None
        if at_peak or most:
            shown = bar(at_peak, report.peak, full_bar(width))
            add(_LABELS[component], most, at_peak, _largest(items), "" if at_peak else "dim", shown)
    add("peak", None, report.peak, f"in {report.peak_phase}", "bold")
    notes = _what_is_added(report) if verbose else _tools(report)
    for name, note in zip(("allocated", "reserved", "device"), notes, strict=True):
        add(name, None, getattr(report, name), note)
    table.add_column("component", no_wrap=not narrow)
    table.add_column("most", justify="right", no_wrap=True)
    table.add_column("at the peak", justify="right", no_wrap=True)
    if not narrow:
        others = [max(len(cells[i]) for cells, _ in lines) for i in (0, 1, 3)]
        room = width - sum(others) - len("at the peak") - 4 * 2  # two spaces between columns
        table.add_column("", no_wrap=True)
        table.add_column("largest row", overflow="ellipsis", no_wrap=True, max_width=room)
    for cells, style in lines:
        table.add_row(*cells, style=style)
    return [table, *([Text(left_out(["bars", "the largest row of each component"]))] if narrow else [])]


def _tools(report: Report) -> tuple[str, str, str]:
    """Return the tools that show `allocated`, `reserved` and `device`, and the basis of parts that are not computed."""
    reserved = _basis(report, "reserved") - {"exact", "modelled"}
    note = f" ({' and '.join(sorted(reserved))})" if reserved else ""
    return (
        "torch.cuda.max_memory_allocated",
        f"torch.cuda.max_memory_reserved{note}",
        f"nvidia-smi, with {_outside(report)}",
    )


def _what_is_added(report: Report) -> tuple[str, str, str]:
    """Return what `allocated` adds to the peak, `reserved` to `allocated`, and `device` to `reserved`."""
    blocks = "rounding to 512 B" if report.played is None else "rounding of blocks"
    return f"+ {blocks}, cuBLAS workspaces", _reserved_note(report), f"+ {_outside(report)}"


def _outside(report: Report) -> str:
    nccl = ", NCCL" if report.setup.gpus > 1 else ""
    return f"CUDA context{nccl} ({' and '.join(sorted(_basis(report, 'device')))})"


def _basis(report: Report, component: str) -> set[str]:
    return {item.basis for item in report.overheads if item.component == component}


def _reserved_note(report: Report) -> str:
    if any(item.basis == "measured" for item in report.overheads if item.component == "reserved"):
        return "+ fragmentation (measured)"
    if report.played is None:
        return "+ fragmentation (assumed)"
    return f"+ fragmentation, {report.played.steps} steps replayed"


def _largest(items: list[Item]) -> str:
    largest = max(items, key=lambda i: (i.at_peak, i.nbytes))
    return f"{show_bytes(largest.at_peak or largest.nbytes)}  {largest.name}"  # a narrow table cuts the name


def titled(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
