"""The derivation of a report, made from its rows, collectives and products: it has no formula of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.rows import COMPONENTS
from memcalc.explanation.communication import communication_sections
from memcalc.explanation.compute import compute_section
from memcalc.explanation.memory import component_section
from memcalc.explanation.peak import device_section, peak_section

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.explanation.step import Section


def derive(report: Report, language: str = "en") -> tuple[Section, ...]:
    """Return the sections of a report's derivation, in the order in which they are read. `language` is "en" or "zh"."""
    sections = [component_section(report, component, language) for component in COMPONENTS]
    sections.append(peak_section(report, language))
    if not report.states_only:
        sections.append(device_section(report, language))
    sections += communication_sections(report, language)
    compute = compute_section(report, language)
    if compute is not None:
        sections.append(compute)
    return tuple(section for section in sections if section.steps)
