"""A report as Markdown: the setup, the verdict and the totals, then tables of all rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from memcalc.report.all_ranks import rank_columns
from memcalc.report.defaults import default_lines
from memcalc.report.notes import notes
from memcalc.report.per_layer import calls_of, shares
from memcalc.report.title import setup_line
from memcalc.report.verdict import verdict_lines
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.layout.collectives import Collective


_NUMBERS: Final = frozenset(("bytes", "at the peak", "calls", "payload", "wire"))


def markdown_text(report: Report, *, per_layer: bool = False, all_ranks: bool = False) -> str:
    """Return the report with its memory and communication. `per_layer` adds what a layer sends, `all_ranks` every pipeline
    rank."""
    verdict = verdict_lines(report)
    said = [*default_lines(report), *notes(report)]
    totals = [(name, getattr(report, name)) for name in ("peak", "allocated", "reserved", "device")]
    items = [*report.items, *report.overheads]
    blocks = [
        [f"# {report.model.name or report.setup.precision}"],
        [setup_line(report)],
        ["  \n".join([f"**{verdict[0]}**", *verdict[1:]])] if verdict else [],
        [f"- {line}" for line in said],
        _table(("total", "bytes", "in words"), [(name, size, show_bytes(size)) for name, size in totals]),
        _table(
            ("component", "name", "bytes", "at the peak", "formula", "basis"),
            [(i.component, f"`{i.name}`", i.nbytes, i.at_peak, i.formula, i.basis) for i in items],
        ),
    ]
    if report.collectives:
        sent = [(c.phase, c.collective, c.name, c.calls, c.payload, c.wire, c.basis) for c in report.collectives]
        header = ("phase", "collective", "what", "calls", "payload", "wire", "basis")
        blocks.append(_table(header, sent))
    if per_layer:
        header = ("axis", "phase", "collective", "what", "calls", "payload", "wire", "formula")
        of_layers = [
            (*_words(one.collective), calls_of(one), one.payload, one.wire, one.formula) for one in shares(report)
        ]
        blocks += [["## What one layer sends"], _table(header, of_layers)] if of_layers else []
    if all_ranks:
        columns = rank_columns(report)
        names = [column.name for column in columns]
        lines = zip(*(column.cells for column in columns), strict=True)
        blocks += [["## Pipeline ranks"], _table(names, lines, numbers=names)]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _words(c: Collective) -> tuple[str, str, str, str]:
    return c.axis, c.phase, c.collective, c.name


def _table(header: Sequence[str], lines: Iterable[Sequence[object]], numbers: Collection[str] = _NUMBERS) -> list[str]:
    rule = ["---:" if name in numbers else "---" for name in header]
    return [_line(header), f"|{'|'.join(rule)}|", *(_line(cells) for cells in lines)]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"
