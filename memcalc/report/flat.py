"""The rows as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation import Report

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
)


def _lines(report: Report) -> Iterator[tuple[object, ...]]:
    for i in [*report.items, *report.overheads]:
        yield "memory", i.component, i.name, i.nbytes, i.at_peak, "", "", "", i.dtype, i.formula, i.basis, i.source
    for c in report.collectives:
        yield (
            "communication",
            c.collective,
            c.name,
            "",
            "",
            c.calls,
            c.payload,
            c.wire,
            c.dtype,
            c.formula,
            c.basis,
            c.source,
        )


def csv_text(report: Report) -> str:
    """Every memory and communication row, in bytes, with a header line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(_lines(report))
    return out.getvalue()


def markdown_text(report: Report) -> str:
    """Totals, then memory rows, then communication rows, as Markdown tables."""
    s = report.setup
    out = [f"# {report.model.name or s.precision}", "", "| | bytes | |", "|---|---:|---:|"]
    for name in ("peak", "allocated", "reserved", "device"):
        size = getattr(report, name)
        out.append(f"| {name} | {size} | {show_bytes(size)} |")
    out += ["", "| component | name | bytes | at the peak | formula | basis |", "|---|---|---:|---:|---|---|"]
    for i in [*report.items, *report.overheads]:
        out.append(f"| {i.component} | `{i.name}` | {i.nbytes} | {i.at_peak} | {i.formula} | {i.basis} |")
    if report.collectives:
        out += [
            "",
            "| phase | collective | what | calls | payload | wire | basis |",
            "|---|---|---|---:|---:|---:|---|",
        ]
        for c in report.collectives:
            out.append(f"| {c.phase} | {c.collective} | {c.name} | {c.calls} | {c.payload} | {c.wire} | {c.basis} |")
    return "\n".join(out) + "\n"
