"""The shapes of the timeline: areas, grid, the mark of the peak, and the band of forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.pictures.html.bars import percent
from memcalc.pictures.html.markup import Markup, element
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.pictures.html.columns import Changes
    from memcalc.pictures.timeline import Span

HEIGHT: Final = 300
BAND: Final = 26
_BOX: Final = 20
_ROOM: Final = 14
"""The pixels below the top in which a line has no words: they would stick out."""
_SCALE: Final = 1000
"""The picture's units from 0 to the top of the axis."""
_MOST_NUMBERS: Final = 200
_MOST_WORDS: Final = 6
_NARROWEST: Final = 0.004
"""The part of the picture that even the shortest optimizer step takes."""
_KINDS: Final = {"forward": "f", "backward": "b", "step": "s"}


def areas(stack: Sequence[tuple[str, Sequence[Changes]]], columns: int, top: float) -> Markup:
    """Return the components' areas. Each covers all that is above 0, and the ones below it are drawn over it."""
    below = [0] * columns
    shapes: list[Markup] = []
    for component, found in stack:
        below = [one + other for one, other in zip(below, _added(found, columns), strict=True)]
        line = _outline([_SCALE - round(_SCALE * nbytes / top) for nbytes in below])
        shapes.append(element("path", d=line, fill=f"url(#t-{component})"))
    tiles = [_tile(component) for component, _ in stack]
    return element(
        "svg", element("defs", *tiles), *reversed(shapes),
        x=0, y=0, width="100%", height=HEIGHT, viewBox=f"0 0 {columns} {_SCALE}", preserveAspectRatio="none",
        class_="areas",
    )  # fmt: skip


def _tile(component: str) -> Markup:
    """Return a component's pattern for the areas. A script undoes in it that the areas are stretched."""
    return element("pattern", id=f"t-{component}", href=f"#c-{component}", patternTransform="scale(1.5 3.5)")


def _added(found: Sequence[Changes], columns: int) -> list[int]:
    """Return the bytes of all these in every column."""
    steps = [0] * columns
    for own in found:
        before = 0
        for column, nbytes in zip(own.columns, own.nbytes, strict=True):
            steps[column] += nbytes - before
            before = nbytes
    return list(accumulate(steps))


def _outline(heights: Sequence[int]) -> str:
    """Return a path along the heights of all columns and back along the bottom."""
    parts = [f"M0 {_SCALE}V{heights[0]}"]
    level, ran = heights[0], 0
    for height in heights:
        if height != level:
            parts.append(f"h{ran}v{height - level}")
            level, ran = height, 0
        ran += 1
    return "".join([*parts, f"h{ran}V{_SCALE}z"])


def grid(top: float, capacity: int | None) -> Markup:
    """Return the lines of the axis with their sizes, and the line of the GPU's capacity."""
    shapes: list[Markup] = []
    for nbytes in _ticks(top):
        y = _y(nbytes, top)
        shapes.append(element("line", x1=0, x2="100%", y1=y, y2=y, class_="grid over"))
        if nbytes and y > _ROOM:
            shapes.append(element("text", show_bytes(nbytes).replace(".00", ""), x=6, y=y - 4))
    if capacity is not None:
        y = _y(capacity, top)
        shapes.append(element("line", x1=0, x2="100%", y1=y, y2=y, class_="limit"))
        shapes.append(element("text", f"GPU: {show_bytes(capacity)}", x="99%", y=y + 14, text_anchor="end"))
    return element("g", *shapes)


def _ticks(top: float) -> list[int]:
    """Return about four round numbers of bytes from 0 to the top."""
    step = 2 ** max(0, int(top).bit_length() - 3)
    step = step if top / step < 6 else step * 2
    return [i * step for i in range(int(top / step) + 1)]


def _y(nbytes: float, top: float) -> float:
    return round(HEIGHT * (1 - nbytes / top), 1)


def peak_mark(column: int, columns: int, peak: int, top: float) -> Markup:
    """Return a line at the peak's column, and its words on the side that has more room."""
    x = percent(column + 0.5, columns)
    left = column < columns / 2
    words = element(
        "text", f"peak {show_bytes(peak)}",
        x=x, y=max(12, _y(peak, top) - 6), dx=6 if left else -6, text_anchor="start" if left else "end",
        class_="peak-words",
    )  # fmt: skip
    return element("g", element("line", x1=x, x2=x, y1=0, y2=HEIGHT, class_="peak-line"), words)


def band(spans: Sequence[Span], moments: int) -> Markup:
    """Return the forwards and backwards of micro-batches and the optimizer's step, below the areas of so many moments."""
    places = [_Place(span, *_from_to(span, moments)) for span in spans]
    shapes = _numbered(places, moments) if len(spans) <= _MOST_NUMBERS else [_unnumbered(places, moments)]
    return element("g", *shapes, class_="band")


class _Place(NamedTuple):
    """A span, and the moments from and to which its box is drawn."""

    span: Span
    start: int
    width: int

    @property
    def kind(self) -> str:
        return _KINDS.get(self.span.phase, "s")


def _from_to(span: Span, moments: int) -> tuple[int, int]:
    least = round(moments * _NARROWEST) if span.phase == "step" else 0
    width = max(span.last - span.first, least)
    return min(span.first, moments - width), width


def _numbered(places: Sequence[_Place], moments: int) -> list[Markup]:
    """Return a box for every span, with its words as far as there is room."""
    boxes: list[Markup] = []
    for place in places:
        title = element("title", span_words(place.span))
        box = element("rect", title, width="100%", height=_BOX, class_=f"cell-{place.kind}")
        text = element("text", _short(place.span, len(places)), x="50%", y=15, class_=f"on-{place.kind}")
        x, width = percent(place.start, moments), percent(place.width, moments)
        boxes.append(element("svg", box, text, x=x, y=HEIGHT + 4, width=width, height=_BOX))
    return boxes


def _unnumbered(places: Sequence[_Place], moments: int) -> Markup:
    """Return one path for each kind of span: there is no room for words."""
    paths = [
        element(
            "path",
            d="".join(f"M{place.start} 0h{place.width}v1h-{place.width}z" for place in places if place.kind == kind),
            class_=f"cell-{kind}",
        )
        for kind in dict.fromkeys(place.kind for place in places)
    ]
    return element(
        "svg", *paths,
        x=0, y=HEIGHT + 4, width="100%", height=_BOX, viewBox=f"0 0 {moments} 1", preserveAspectRatio="none",
    )  # fmt: skip


def band_legend(spans: Sequence[Span]) -> Markup:
    """Return what the band's colours and numbers are."""
    kinds = [(phase, kind) for phase, kind in _KINDS.items() if any(span.phase == phase for span in spans)]
    entries = [
        element("li", element("span", square(kind), "optimizer step" if kind == "s" else phase, class_="labelled"))
        for phase, kind in kinds
    ]
    numbered = any(span.micro_batch is not None for span in spans)
    last = [element("li", "numbers are micro-batches")] if numbered and len(spans) <= _MOST_NUMBERS else []
    return element("ul", *entries, *last, class_="legend")


def square(kind: str) -> Markup:
    """Return a small square of the colour of forwards ("f"), backwards ("b"), the step ("s") or idle times ("idle")."""
    own = "idle" if kind == "idle" else f"cell-{kind}"
    inside = element("rect", width=14, height=14, rx=2, class_=own)
    return element("svg", inside, width=14, height=14, class_="swatch", aria_hidden="true")


def span_words(span: Span) -> str:
    """Return the name of a span: "backward of micro-batch 2"."""
    if span.phase == "step":
        return "optimizer step"
    chunk = f", chunk {span.chunk + 1}" if span.chunk else ""
    return span.phase if span.micro_batch is None else f"{span.phase} of micro-batch {span.micro_batch + 1}{chunk}"


def _short(span: Span, among: int) -> str:
    """Return the words in a span's box: of many, the number of the micro-batch."""
    if span.micro_batch is None:
        return span.phase
    return str(span.micro_batch + 1) if among > _MOST_WORDS else f"{span.phase} {span.micro_batch + 1}"
