"""The bytes that a GPU sends in a step: by axis, and by kind of collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.pictures.html.bars import percent
from memcalc.pictures.html.markup import (
    Cell,
    Markup,
    drawing,
    element,
    joined,
    lines,
    of_bytes,
    of_count,
    section,
    size,
    table,
)
from memcalc.report.communication import layer_line, textbook_lines, time_lines
from memcalc.report.communication_summary import Sent, sent
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

AXES: Final = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
}
_HEIGHT: Final = 12
_KINDS: Final = ("payload", "wire")


class _Sums(NamedTuple):
    """The bytes of all collectives of an axis."""

    axis: str
    payload: int
    wire: int


def communication(report: Report) -> Markup:
    found = sent(report)
    if not found:
        words = "One GPU sends nothing." if report.setup.gpus == 1 else "No collective is known without a model."
        if report.setup.gpus > 1 and not report.states_only:
            words = "This rank sends nothing."
        return section("communication", "Communication", element("p", words, class_="lead"))
    told = [layer_line(report), *time_lines(report, bracketed=False), *textbook_lines(report)]
    return section(
        "communication",
        "Communication",
        element("p", _WORDS, class_="lead"),
        _by_axis(found),
        _table(report, found),
        lines(line.plain for line in told),
    )


_WORDS: Final = (
    "Bytes per step and GPU. Payload is the full tensor that a collective is called on; wire is what one GPU sends for "
    "it."
)


def _by_axis(found: list[Sent]) -> Markup:
    axes = list(dict.fromkeys(one.axis for one in found))
    sums = [
        _Sums(axis, *(sum(getattr(one, name) for one in found if one.axis == axis) for name in _KINDS)) for axis in axes
    ]
    scale = max(max(own.payload, own.wire) for own in sums) or 1
    return element("div", *(_row(own, scale) for own in sums), class_="bars axes")


def _row(own: _Sums, scale: int) -> Markup:
    axis, payload, wire = own
    shapes = [
        element("rect", x=0, y=y, width=percent(nbytes, scale), height=_HEIGHT, class_=name, data_bytes=nbytes)
        for name, nbytes, y in (("payload", payload, 0), ("wire", wire, _HEIGHT + 2))
    ]
    words = f"payload {show_bytes(payload)}, wire {show_bytes(wire)}"
    picture = drawing(
        f"{AXES.get(axis, axis)}: {words}", words, *shapes,
        identifier=f"axis-{axis}", width="100%", height=2 * _HEIGHT + 2,
    )  # fmt: skip
    name = element("span", axis, element("span", AXES.get(axis, ""), class_="remark"), class_="bar-name")
    sizes = [
        element("span", size(nbytes), " ", element("span", kind, class_="remark"))
        for kind, nbytes in (("payload", payload), ("wire", wire))
    ]
    return element("div", name, picture, element("span", joined(sizes), class_="bar-total two"), class_="bar")


def _table(report: Report, found: list[Sent]) -> Markup:
    timed = report.gpu is not None
    rows = [
        [
            Cell(one.axis),
            Cell(one.collective, code=True),
            of_count(one.ranks),
            of_count(one.calls),
            of_bytes(one.payload),
            of_bytes(one.wire),
            *([_seconds(one.seconds)] if timed else []),
        ]
        for one in found
    ]
    empty = Cell("", numeric=True)
    sums = [of_count(sum(one.calls for one in found))]
    sums += [of_bytes(sum(getattr(one, name) for one in found)) for name in _KINDS]
    known = [one.seconds for one in found if one.seconds is not None]
    total = _seconds(sum(known) if len(known) == len(found) else None)
    rows.append([Cell("all"), Cell(""), empty, *sums, *([total] if timed else [])])
    header = ["axis", "collective", "ranks", "calls", "payload", "wire", *(["time"] if timed else [])]
    return table("By axis and kind of collective", header, rows, last_is_total=True, data_sortable="")


def _seconds(seconds: float | None) -> Cell:
    return Cell("?" if seconds is None else show_seconds(seconds), seconds, numeric=True)
