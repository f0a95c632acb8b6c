"""The derivation of a report, made from its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.rows import COMPONENTS
from memcalc.explanation.step import Section, Step

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def derive(report: Report, language: str = "en") -> tuple[Section, ...]:
    """Return the sections of a report's derivation, in the order in which they are read. `language` is "en" or "zh"."""
    sections: list[Section] = []
    for component in COMPONENTS[:-1]:
        items = [item for item in report.items if item.component == component and item.nbytes]
        steps = (Step(i.name, *i.formula.split(" = ", 1), i.nbytes, "bytes", "", i.source) for i in items)
        sections.append(Section(component, tuple(steps)))
    return tuple(sections)
