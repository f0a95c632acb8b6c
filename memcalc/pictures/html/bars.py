"""Bars of stacked components, all of one picture on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from memcalc.pictures.html.components import LABELS, fill
from memcalc.pictures.html.markup import Markup, drawing, element, size
from memcalc.units import show_bytes

_HEIGHT: Final = 26
_FAR: Final = 1.6
"""A limit that is more than this many times the longest bar is named, not drawn: bars would be too short."""


class Bar(NamedTuple):
    """A bar: its name, its components' bytes, a remark and True if it is the one that counts."""

    name: str
    parts: Mapping[str, int]
    remark: str = ""
    marked: bool = False

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def bars(identifier: str, given: Sequence[Bar], limit: int | None = None) -> Markup:
    """Return the bars below each other, each with its name and its total. `limit` is drawn as a line through them."""
    longest = max(bar.total for bar in given)
    line = if_near(limit, longest) or 0
    rows = [_row(f"{identifier}-{i}", bar, max(line, longest) or 1, line) for i, bar in enumerate(given)]
    return element("div", *rows, class_="bars")


def limit_words(given: Sequence[Bar], limit: int | None) -> Markup | None:
    """Return a line that says what the line through the bars is; None if there is none."""
    line = if_near(limit, max(bar.total for bar in given))
    return None if line is None else element("p", f"Dashed line: the GPU has {show_bytes(line)}.", class_="remark")


def if_near(limit: int | None, longest: int) -> int | None:
    """Return a limit that can be drawn beside so many bytes; None if there is none, or if they would be small beside it."""
    return limit if limit is not None and limit <= _FAR * longest else None


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}".rstrip("0").rstrip(".") + "%"


def _row(identifier: str, bar: Bar, scale: int, limit: int) -> Markup:
    shapes: list[Markup] = []
    start = 0
    for component in LABELS:
        part = bar.parts.get(component, 0)
        if part:
            shown = f"{LABELS[component]}: {show_bytes(part)}"
            shapes.append(
                element(
                    "rect",
                    element("title", shown),
                    x=percent(start, scale),
                    width=percent(part, scale),
                    height=_HEIGHT,
                    fill=fill(component),
                    data_component=component,
                    data_bytes=part,
                    class_="part",
                )
            )
            start += part
    if limit:
        at = percent(limit, scale)
        shapes.append(element("line", x1=at, x2=at, y1=0, y2=_HEIGHT, class_="limit"))
    named = ", ".join(f"{LABELS[component]} {show_bytes(part)}" for component, part in bar.parts.items() if part)
    picture = drawing(
        f"{bar.name}: {show_bytes(bar.total)}", named, *shapes, identifier=identifier, width="100%", height=_HEIGHT
    )
    remark = element("span", bar.remark, class_="remark") if bar.remark else None
    name = element("span", bar.name, remark, class_="bar-name")
    total = element("span", size(bar.total), class_="bar-total")
    return element("div", name, picture, total, class_="bar marked" if bar.marked else "bar")
