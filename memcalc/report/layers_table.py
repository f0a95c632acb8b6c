"""The table of a network's layers: shapes, parameters, FLOPs and what each leaves for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from memcalc.estimation.layers import layer_rows
from memcalc.report.folding import Folded
from memcalc.units import show_bytes, show_flops

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memcalc.estimation.layers import LayerRow
    from memcalc.estimation.report import Report

_WIDE: Final = 140
"""The columns from which the derivations have room."""


def layers_table(report: Report, width: int, *, verbose: bool) -> list[RenderableType]:
    """Return the table, and the derivations below it with `verbose` or beside it where there is room; [] for other models."""
    rows = layer_rows(report)
    if not rows:
        return []
    size = report.setup.micro_batch_size
    table = Table(
        title=f"Layers, for a micro-batch of {size}", title_justify="left", title_style="bold", header_style="bold", box=None,
        pad_edge=False,
    )  # fmt: skip
    wide = width >= _WIDE
    table.add_column("layer", no_wrap=True)
    table.add_column("output", no_wrap=True)
    for name in ("parameters", "forward", "backward", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("derivation", overflow="fold")
    for row in rows:
        words = [
            f"{row.name} {row.kind}{f' ×{row.copies}' if row.copies > 1 else ''}",
            " × ".join(map(str, row.output)),
        ]
        numbers = [
            f"{row.parameters:,}" if row.parameters else "",
            show_flops(row.forward) if row.forward else "",
            show_flops(row.backward) if row.backward else "",
            show_bytes(row.saved) if row.saved else "",
        ]
        table.add_row(*words, *numbers, *([Folded(_derived(row))] if wide else []))
    table.add_row("all", "", *_sums(rows), *([""] if wide else []), style="bold")
    below = (
        [Text(f"{row.name} {row.kind}: {_derived(row)}") for row in rows if _derived(row)]
        if verbose and not wide
        else []
    )
    return [table, *below, ""]


def _sums(rows: list[LayerRow]) -> list[str]:
    parameters, forward, backward, saved = (
        sum(getattr(row, name) * row.copies for row in rows) for name in ("parameters", "forward", "backward", "saved")
    )
    return [f"{parameters:,}", show_flops(forward), show_flops(backward), show_bytes(saved)]


def _derived(row: LayerRow) -> str:
    """Return how the output's size and the number of parameters come about."""
    return "; ".join(part for part in (row.output_formula, row.parameters_formula) if part)
