"""Memory at the peak of every pipeline rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.rows import COMPONENTS
from memcalc.pictures.html.bars import Bar, bars, limit_words
from memcalc.pictures.html.components import LABELS, legend
from memcalc.pictures.html.markup import Cell, Markup, element, of_bytes, of_count, section, table
from memcalc.report.pipeline_lines import pipeline_lines

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def ranks(report: Report) -> Markup | None:
    """Return the bars and the table of pipeline ranks; None without stages."""
    each = report.each_rank()
    if report.setup.pp == 1 or report.states_only:
        return None
    drawn = [
        Bar(f"rank {one.rank.number}", _parts(one), f"{one.rank.layers} layers, in {one.peak_phase}", one is report)
        for one in each
    ]
    capacity = report.gpu.capacity if report.gpu is not None else None
    return section(
        "ranks",
        "Memory by pipeline rank",
        *(element("p", line.plain, class_="lead") for line in pipeline_lines(report)[2:]),
        legend(component for component in COMPONENTS if any(bar.parts[component] for bar in drawn)),
        bars("ranks", drawn, capacity),
        limit_words(drawn, capacity),
        _table(each),
    )


def _parts(report: Report) -> dict[str, int]:
    parts: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    for item in report.items:
        parts[item.component] += item.at_peak
    return parts


def _table(each: list[Report]) -> Markup:
    header = ["rank", "layers", "in flight", *(LABELS[one] for one in COMPONENTS[:-1]), "peak", "device", "wire"]
    lines = [
        [
            Cell(str(one.rank.number), one.rank.number),
            of_count(one.rank.layers or 0),
            of_count(one.in_flight),
            *(of_bytes(one.total(component)) for component in COMPONENTS[:-1]),
            of_bytes(one.peak),
            of_bytes(one.device),
            of_bytes(sum(c.wire for c in one.collectives)),
        ]
        for one in each
    ]
    return table("The most of each component, the peak, and what a rank sends", header, lines, data_sortable="")
