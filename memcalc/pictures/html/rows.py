"""Every row of memory and every collective, as tables that can be searched and sorted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.pictures.html.components import LABELS, labelled
from memcalc.pictures.html.markup import Cell, Markup, element, of_count, of_exact_bytes, section, table

if TYPE_CHECKING:
    from memcalc.core.rows import Item
    from memcalc.estimation.report import Report
    from memcalc.layout.collectives import Collective


def rows(report: Report) -> Markup:
    """Return the table of memory rows. Its rows add up to every total of the page."""
    items = [*report.items, *report.overheads]
    header = ["name", "component", "bytes", "at the peak", "shape", "dtype", "formula", "basis", "life", "source"]
    own = table("Every row of memory", header, map(_item, items), data_sortable="", data_searched="", id="memory-rows")
    words = f"{len(items)} rows. Bytes count in the component's total, bytes at the peak in the peak."
    return section("rows", "Every row", element("p", words, class_="lead"), _search("memory-rows", "Search rows"), own)


def collectives(report: Report) -> Markup | None:
    """Return the table of collectives; None if nothing is sent."""
    if not report.collectives:
        return None
    header = [
        "name", "axis", "collective", "phase", "layer", "ranks", "calls", "payload", "wire", "dtype", "formula", "basis",
        "source",
    ]  # fmt: skip
    own = table(
        "Every collective of a step", header, map(_collective, report.collectives),
        data_sortable="", data_searched="", id="collective-rows",
    )  # fmt: skip
    return section("collectives", "Every collective", _search("collective-rows", "Search collectives"), own)


def _search(searched: str, words: str) -> Markup:
    """Return a field that a script shows: without one it would do nothing."""
    field = element("input", type="search", id=f"{searched}-search", aria_controls=searched, autocomplete="off")
    label = element("label", words, for_=f"{searched}-search")
    found = element("output", "", for_=f"{searched}-search", aria_live="polite")
    return element("p", label, " ", field, " ", found, class_="search", data_for=searched, hidden="")


def _item(item: Item) -> list[Cell]:
    component = labelled(item.component) if item.component in LABELS else item.component
    return [
        Cell(item.name, code=True),
        Cell(component),
        of_exact_bytes(item.nbytes),
        of_exact_bytes(item.at_peak),
        Cell(" × ".join(f"{name} {length}" for name, length in item.shape), code=True),
        Cell(item.dtype),
        Cell(item.formula, code=True),
        Cell(item.basis),
        Cell(item.life),
        Cell(item.source, code=True),
    ]


def _collective(c: Collective) -> list[Cell]:
    return [
        Cell(c.name, code=True),
        Cell(c.axis),
        Cell(c.collective, code=True),
        Cell(c.phase),
        Cell(c.layer or "", code=True),
        of_count(c.group_size),
        of_count(c.calls),
        of_exact_bytes(c.payload),
        of_exact_bytes(c.wire),
        Cell(c.dtype),
        Cell(c.formula, code=True),
        Cell(c.basis),
        Cell(c.source, code=True),
    ]
