"""Notes on the report, and the changes that would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.pictures.html.markup import Markup, element, section
from memcalc.report.advice_lines import advised
from memcalc.report.defaults import default_lines
from memcalc.report.notes import notes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def remarks(report: Report) -> Markup | None:
    """Return the notes; None if there is none."""
    traced = [f"no program of this type: {report.traced}"] if report.traced else []
    said = [*default_lines(report), *traced, *notes(report)]
    if not said:
        return None
    return section("notes", "Notes", element("ul", *(element("li", line) for line in said), class_="notes"))


def suggestions(report: Report) -> Markup | None:
    """Return the advice; None if there is none."""
    told = advised(report)
    if told is None:
        return None
    entries = [
        element("div", element("dt", element("code", one.flags)), *(element("dd", line) for line in one.under))
        for one in told.changes
    ]
    words = told.heading[:1].upper() + told.heading[1:]
    return section(
        "advice",
        "Advice",
        element("p", words, class_="lead"),
        element("dl", *entries, class_="advice") if entries else None,
    )
