"""The schedule of a pipeline as lanes: for every rank its forwards, backwards and idle times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.pictures.html.markup import Markup, drawing, element, section
from memcalc.pictures.html.step_plot import square
from memcalc.pictures.schedule import drawable, lanes
from memcalc.pipelining.idle import idle_share
from memcalc.pipelining.orders import Placed, waited
from memcalc.pipelining.schedules import flushes, has_halves
from memcalc.report.title import part

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup

_MOST_ACTIONS: Final = 1600
_FEWEST_LANES: Final = 4
_MOST_LANES: Final = 16
_WIDE: Final = 1060
_UNIT: Final = 36
"""The most pixels of a forward."""
_DIGIT: Final = 6
"""The pixels of a digit."""
_ROW: Final = 22
_ROW_OF_SEVERAL: Final = 15
"""The pixels of a chunk's row, if a rank has several chunks."""
_GAP: Final = 6
_NAMES: Final = 56
_PRINTED: Final = 640
"""The pixels that a printed page has room for."""

_KINDS: Final = {
    "forward": "f",
    "backward": "b",
    "backward of inputs": "b",
    "backward of weights": "w",
}


class _Lane(NamedTuple):
    """A rank and its actions."""

    rank: int
    placed: Sequence[Placed]

    def idle(self, length: int) -> float:
        """Return the part of a step of this length in which the rank is idle."""
        return 1 - sum(one.end - one.start for one in self.placed) / length


def schedule(report: Report) -> Markup | None:
    """Return the lanes with a legend; None without stages."""
    setup = report.setup
    if setup.pp == 1 or report.states_only:
        return None
    drawn = drawable(setup, _MOST_ACTIONS)
    every = lanes(setup, drawn)
    shown = [_Lane(rank, every[rank]) for rank in _shown(setup.pp, report.rank.number, _MOST_ACTIONS // len(every[0]))]
    return section(
        "schedule",
        "Schedule",
        element("p", _words(report, drawn, every), class_="lead"),
        element("p", f"Of {setup.pp} ranks, {len(shown)} are drawn.") if len(shown) < setup.pp else None,
        _legend(setup),
        _boxed(shown, _scale(shown, setup.virtual_stages), report.rank.number),
    )


def _words(report: Report, drawn: int, every: Sequence[Sequence[Placed]]) -> str:
    setup = report.setup
    if not flushes(setup.schedule):
        return (
            f"{setup.schedule} with {setup.micro_batches} micro-batches: the pipeline fills once and is not emptied between "
            f"steps, so the bubble is {idle_share(setup):.1%} of the ideal time, if every {part(setup)} takes equally long. "
            "Drawn is the first step."
        )
    short = "" if drawn == setup.micro_batches else (
        f" Drawn are {drawn} of {setup.micro_batches} micro-batches, whose bubble is {waited(every):.1%}: "
        "the middle of the step repeats itself."
    )  # fmt: skip
    return (
        f"{setup.schedule} with {setup.micro_batches} micro-batches: the bubble is {idle_share(setup):.1%} of the ideal time, "
        f"if every {part(setup)} takes equally long and a backward twice as long as a forward.{short}"
    )


def _shown(ranks: int, reported: int, most: int) -> list[int]:
    """Return all ranks; of more than `most`, the first, the last, the reported one, and some at equal distances."""
    most = min(max(most, _FEWEST_LANES), _MOST_LANES)
    if ranks <= most:
        return list(range(ranks))
    apart = (ranks - 1) / (most - 2)
    return sorted({reported, *(round(i * apart) for i in range(most - 1))})


def _legend(setup: Setup) -> Markup:
    halves = has_halves(setup.schedule)
    kinds = [("f", "forward"), ("b", "backward of the inputs" if halves else "backward")]
    kinds += [("w", "backward of the weights")] if halves else []
    entries = [
        element("li", element("span", square(kind), words, class_="labelled"))
        for kind, words in [*kinds, ("idle", "idle")]
    ]
    chunks = (
        [element("li", f"one row for each of the {setup.virtual_stages} chunks")] if setup.virtual_stages > 1 else []
    )
    return element("ul", *entries, element("li", "numbers are micro-batches"), *chunks, class_="legend")


class _Scale(NamedTuple):
    """The sizes of the picture: in pixels, but for the length of the step."""

    length: int
    unit: int
    """The width of a forward."""
    row: int
    """The height of a chunk's row."""
    chunks: int

    @property
    def high(self) -> int:
        """Return the height of a lane."""
        return self.row * self.chunks

    def top(self, place: int) -> int:
        """Return the upper edge of the lane at a place."""
        return place * (self.high + _GAP)


def _scale(shown: Sequence[_Lane], chunks: int) -> _Scale:
    length = max(one.placed[-1].end for one in shown)
    digits = len(str(max(_number(action) for one in shown for action in one.placed)))
    unit = min(max(_WIDE // length, (digits + 1) * _DIGIT), _UNIT)
    return _Scale(length, unit, _ROW if chunks == 1 else _ROW_OF_SEVERAL, chunks)


def _number(one: Placed) -> int:
    """Return the number of an action's micro-batch, from 1 on."""
    return (one.action.micro_batch or 0) + 1


def _boxed(shown: Sequence[_Lane], scale: _Scale, reported: int) -> Markup:
    """Return the picture in a box that scrolls, with the names of the ranks beside it."""
    width, height = scale.length * scale.unit, scale.top(len(shown))
    names = [
        element(
            "text", f"rank {one.rank}",
            x=0, y=f"{scale.top(i) + scale.high / 2 + 4:g}", class_="marked" if one.rank == reported else None,
        )
        for i, one in enumerate(shown)
    ]  # fmt: skip
    idle = "; ".join(f"rank {one.rank} is idle {one.idle(scale.length):.0%} of the step" for one in shown)
    picture = drawing(
        "The order in which pipeline ranks run", idle, *(_lane(one.placed, scale.top(i), scale) for i, one in enumerate(shown)),
        identifier="lanes", width=width, height=height, viewBox=f"0 0 {width} {height}", class_="lanes",
    )  # fmt: skip
    side = element("svg", *names, width=_NAMES, height=height, class_="lane-names", aria_hidden="true")
    box = element(
        "div", picture, class_="scroll", tabindex=0, role="region", aria_label="Schedule of the pipeline ranks"
    )
    return element("div", side, box, class_=f"lane-box{_zoom(width + _NAMES)}")


def _zoom(width: int) -> str:
    """Return the class that makes a picture of this width as narrow as a printed page."""
    tenths = max(1, 10 * _PRINTED // width)
    return f" zoom-{tenths}" if tenths < 10 else ""


def _lane(lane: Sequence[Placed], top: int, scale: _Scale) -> Markup:
    """Return a rank's lane: idle times, cells of each kind as one path, and their numbers."""
    parts = [element("path", d=_boxes(_gaps(lane, scale.length), top, scale.unit, scale.high), class_="idle")]
    for kind in dict.fromkeys(_KINDS.values()):
        own = [(one, top + one.action.chunk * scale.row) for one in lane if _KINDS[one.action.kind] == kind]
        if own:
            cells = "".join(_boxes([(one.start, one.end)], y, scale.unit, scale.row - 1) for one, y in own)
            numbers = [
                element("text", str(_number(one)), x=f"{_middle(one) * scale.unit:g}", y=f"{y + scale.row / 2 + 3:g}")
                for one, y in own
            ]
            parts += [element("path", d=cells, class_=f"cell-{kind}"), element("g", *numbers, class_=f"on-{kind}")]
    return element("g", *parts)


def _middle(one: Placed) -> float:
    return (one.start + one.end) / 2


def _gaps(lane: Sequence[Placed], length: int) -> list[tuple[int, int]]:
    ends = [0, *(one.end for one in lane)]
    starts = [*(one.start for one in lane), length]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def _boxes(spans: Iterable[tuple[int, int]], top: int, unit: int, height: int) -> str:
    """Return the path of boxes from time to time, with a pixel between neighbours."""
    return "".join(f"M{start * unit} {top}h{(end - start) * unit - 1}v{height}H{start * unit}z" for start, end in spans)
