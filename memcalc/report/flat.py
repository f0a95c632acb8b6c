"""The rows as CSV: one line each, with empty cells for numbers that a kind of row does not have."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.core.rows import COMPONENTS
from memcalc.report.per_layer import shares

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.layout.collectives import Collective

HEADER = (
    "table",
    "component",
    "name",
    "nbytes",
    "at_peak",
    "calls",
    "payload",
    "wire",
    "dtype",
    "formula",
    "basis",
    "source",
    "axis",
    "phase",
)
"""The columns. `table` is memory, communication, layer (a layer's part of the communication) or rank (a pipeline rank's
totals)."""

_Line = tuple[object, ...]


def csv_text(report: Report, *, per_layer: bool = False, all_ranks: bool = False) -> str:
    """Return a header line and every memory and communication row, in bytes. `per_layer` and `all_ranks` add their rows."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(_memory(report))
    writer.writerows(
        _sent("communication", c.name, c, c.calls, c.payload, c.wire, c.formula) for c in report.collectives
    )
    if per_layer:
        writer.writerows(
            _sent("layer", one.collective.name, one.collective, f"{one.calls:.10g}", one.payload, one.wire, one.formula)
            for one in shares(report)
        )
    if all_ranks:
        writer.writerows(_ranks(report))
    return out.getvalue()


def _memory(report: Report) -> Iterator[_Line]:
    for i in [*report.items, *report.overheads]:
        sizes = (i.nbytes, i.at_peak, "", "", "")
        yield "memory", i.component, i.name, *sizes, i.dtype, i.formula, i.basis, i.source, "", ""


def _sent(table: str, name: str, c: Collective, calls: object, payload: int, wire: int, formula: str) -> _Line:
    sizes = ("", "", calls, payload, wire)
    return table, c.collective, name, *sizes, c.dtype, formula, c.basis, c.source, c.axis, c.phase


def _ranks(report: Report) -> Iterator[_Line]:
    """Yield for each rank a line for every total, and a line for its communication."""
    after = ("", "", "", "", "", "")
    for one in report.each_rank():
        name = f"pp {one.rank.number}"
        sizes = {component: one.total(component) for component in COMPONENTS[:-1]} | {
            "peak": one.peak,
            "device": one.device,
        }
        for component, size in sizes.items():
            yield "rank", component, name, size, "", "", "", "", *after
        payload, wire = (sum(getattr(c, of) for c in one.collectives) for of in ("payload", "wire"))
        calls = sum(c.calls for c in one.collectives)
        yield "rank", "communication", name, "", "", calls, payload, wire, *after
