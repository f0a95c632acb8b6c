"""Memory at the peak of each phase and on the device, stacked by component."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.rows import COMPONENTS
from memcalc.estimation.report import PHASES, ROLLOUT
from memcalc.pictures.html.bars import Bar, bars, limit_words
from memcalc.pictures.html.components import LABELS, labelled, legend
from memcalc.pictures.html.markup import Cell, Markup, element, of_bytes, section, table

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def phases(report: Report) -> Markup:
    """Return the bars of the phases and of the device, and a table with their bytes."""
    own = PHASES if report.rollout is None else (ROLLOUT, *PHASES)
    by_phase = {phase: _at(report, phase) for phase in own}
    at_peak = by_phase[report.peak_phase]
    beside = {item.component: 0 for item in report.overheads}
    for item in report.overheads:
        beside[item.component] += item.nbytes
    drawn = [
        *(Bar(phase, parts, "the peak" if phase == report.peak_phase else "", phase == report.peak_phase)
          for phase, parts in by_phase.items()),
        Bar("device", {**at_peak, **beside}, "as nvidia-smi shows it"),
    ]  # fmt: skip
    used = [component for component in LABELS if any(bar.parts.get(component) for bar in drawn)]
    capacity = report.gpu.capacity if report.gpu is not None else None
    return section(
        "memory",
        "Memory by phase",
        element("p", _WORDS, class_="lead"),
        legend(used),
        bars("memory", drawn, capacity),
        limit_words(drawn, capacity),
        _table(report, by_phase, beside),
    )


_WORDS: Final = "What is alive at the fullest moment of each phase. The device adds what is outside of tensors."


def _at(report: Report, phase: str) -> dict[str, int]:
    """Return the bytes of each component at the peak of a phase. They add up to `Report.phases`."""
    parts: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    batch, seq = report.setup.micro_batch_size, report.setup.tokens_per_part
    for row in report.rows_at(phase):
        parts[row.component] += row.bytes_at(batch, seq)
    return parts


def _table(report: Report, by_phase: dict[str, dict[str, int]], beside: dict[str, int]) -> Markup:
    lines: list[list[Cell]] = []
    for component in COMPONENTS:
        sizes = [parts[component] for parts in by_phase.values()]
        if any(sizes) or report.total(component):
            most = report.total(component) if component != "temporaries" else max(sizes)
            lines.append([Cell(labelled(component)), of_bytes(most), *map(of_bytes, sizes)])
    totals = [sum(parts.values()) for parts in by_phase.values()]
    lines.append([Cell("peak"), Cell("", numeric=True), *map(of_bytes, totals)])
    return table("Bytes by component and phase", ["component", "most", *by_phase], lines, last_is_total=True)
