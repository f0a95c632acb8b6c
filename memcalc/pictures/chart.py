"""A timeline drawn in the terminal: bytes alive by component, stacked, over the moments of a step."""

from __future__ import annotations

import re
from collections import Counter
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from rich.text import Text

from memcalc.pictures.columns import Columns, columns_of
from memcalc.pictures.labels import ALLOCATOR
from memcalc.report.consoles import console_for
from memcalc.units import GIB, MIB, show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from memcalc.pictures.timeline import Span, Timeline

_HEIGHT: Final = 16
_MARGIN: Final = 9
"""The columns left of the axis."""
_LEAST_WIDTH: Final = 60
_MOST_WIDTH: Final = 200
_ROWS: Final = 8
"""How many kinds of blocks are listed at the peak."""
_ABOVE: Final = 1.5
"""A GPU with more memory than so many peaks is not drawn: the step would be a thin line."""
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


class _Paint(NamedTuple):
    """The looks of a component."""

    letter: str
    colour: str


_STACK: Final = {
    "parameters": _Paint("P", "blue"),
    "optimizer_states": _Paint("O", "cyan"),
    "gradients": _Paint("G", "magenta"),
    "buffers": _Paint("B", "yellow"),
    "saved_activations": _Paint("A", "green"),
    "temporaries": _Paint("T", "red"),
    ALLOCATOR: _Paint("w", "bright_black"),
}
"""The components, the lowest first."""


class _Lines(NamedTuple):
    """The characters that a drawing's frame is made of."""

    upright: str
    corner: str
    level: str
    peak: str


_DRAWN: Final = _Lines("│", "└", "─", "▼")
_ASCII: Final = _Lines("|", "+", "-", "v")


def print_timeline(timeline: Timeline, file: IO[str]) -> None:
    """Print a timeline: the drawing, the components, and the largest blocks at the peak. Without colour a component is a letter;
    lines are ASCII if the file's encoding has no others."""
    console = console_for(file, 100)
    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, console.width))
    drawn = _can_print(console)
    lines = _DRAWN if drawn else _ASCII
    coloured = console.color_system is not None and not console.no_color
    columns = columns_of(timeline, width - _MARGIN - 1)
    picture = _Picture(timeline, columns, lines, blocks=coloured and drawn, coloured=coloured)
    for text in (*picture.drawing(), *picture.legend(width), *picture.at_peak(width)):
        console.print(text, soft_wrap=True, end="\n")


def _can_print(console: Console) -> bool:
    try:
        f"{_EIGHTHS}{''.join(_DRAWN)}".encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class _Picture:
    """A timeline and the looks of its drawing."""

    def __init__(self, timeline: Timeline, columns: Columns, lines: _Lines, *, blocks: bool, coloured: bool) -> None:
        self.timeline, self.columns, self.lines = timeline, columns, lines
        self.blocks, self.coloured = blocks, coloured
        capacity = timeline.capacity
        self.shown_capacity = capacity if capacity is not None and capacity <= _ABOVE * timeline.peak else None
        self.top = max(timeline.peak, self.shown_capacity or 0)
        self.unit = (GIB, "GiB") if self.top >= GIB else (MIB, "MiB")
        self.live = timeline.live()

    # --- the drawing

    def drawing(self) -> Iterator[Text]:
        yield Text("")
        yield Text(self._title(), style="bold")
        yield Text(self._peak_line().rstrip())
        stacks = [self._stack(moments) for moments in self.columns.moments]
        for row in reversed(range(_HEIGHT)):
            yield self._row(row, stacks)
        yield Text(
            f"{0:>{_MARGIN - 5}} {self.unit[1]} {self.lines.corner}{self.lines.level * len(self.columns.moments)}"
        )
        yield from self._axis()

    def _title(self) -> str:
        rank = f", pipeline rank {self.timeline.rank}" if self.timeline.rank else ""
        return f"Timeline of a step{rank}: {self.timeline.events:,} allocations and frees"

    def _peak_line(self) -> str:
        words = f"peak {show_bytes(self.timeline.peak)}"
        place = _MARGIN + 1 + self.columns.of(self.timeline.peak_event)
        if place + 2 + len(words) <= _MARGIN + 1 + len(self.columns.moments):
            return " " * place + f"{self.lines.peak} {words}"
        return " " * (place - len(words) - 1) + f"{words} {self.lines.peak}"

    def _stack(self, moments: range) -> list[int]:
        """Return the upper edges of the components at the moment of a column with the most bytes."""
        most = max(moments, key=lambda moment: sum(live[moment] for live in self.live.values()))
        edges: list[int] = []
        for component in _STACK:
            edges.append((edges[-1] if edges else 0) + self.live[component][most])
        return edges

    def _row(self, row: int, stacks: Sequence[list[int]]) -> Text:
        low, high = self.top * row // _HEIGHT, self.top * (row + 1) // _HEIGHT
        text = Text(f"{self._tick(row)} {self.lines.upright}")
        at_capacity = self.shown_capacity is not None and low < self.shown_capacity <= high
        for edges in stacks:
            self._cell(text, edges, low, high, at_capacity=at_capacity)
        text.rstrip()
        return text

    def _tick(self, row: int) -> str:
        """Return the label left of a row: the bytes at its upper edge, for every fourth row."""
        if (row + 1) % 4:
            return " " * (_MARGIN - 1)
        unit, name = self.unit
        value = self.top * (row + 1) / _HEIGHT / unit
        return f"{value:>{_MARGIN - 5}.{2 if value < 9.99 else 1 if value < 99.9 else 0}f} {name}"

    def _cell(self, text: Text, edges: list[int], low: int, high: int, *, at_capacity: bool) -> None:
        """Append one character, which shows the bytes from `low` to `high`."""
        shares = _shares(edges, low, high)
        empty = (high - low) - sum(shares)
        lowest = next((i for i, share in enumerate(shares) if share), None)
        paints = list(_STACK.values())
        if lowest is None or (not self.blocks and 2 * empty > high - low):
            text.append(self.lines.level if at_capacity else " ", "red" if at_capacity else "")
        elif not self.blocks:
            paint = paints[max(range(len(shares)), key=lambda i: shares[i])]
            text.append(paint.letter, paint.colour if self.coloured else "")
        else:
            rest = [share if i != lowest else 0 for i, share in enumerate(shares)]
            upper = max(range(len(rest)), key=lambda i: rest[i]) if any(rest) else None
            if upper is not None and max(rest) < empty:
                upper, filled = None, (high - low) - empty
            else:
                filled = shares[lowest] if upper is not None else (high - low) - empty
            eighths = max(1, round(8 * filled / (high - low)))
            style = paints[lowest].colour + (f" on {paints[upper].colour}" if upper is not None else "")
            text.append(_EIGHTHS[eighths], style)

    # --- below the drawing

    def _axis(self) -> Iterator[Text]:
        """Yield the lines below the axis: phases with their micro-batches, and the layers that they go through."""
        count = len(self.columns.moments)
        phases, layers = [" "] * count, [" "] * count
        several = len({span.micro_batch for span in self.timeline.spans if span.micro_batch is not None}) > 1
        for span, first, end in self.columns.spans:
            _write(phases, first, end, [f"{self.lines.upright}{words}" for words in _words(span, several=several)])
            _write(layers, first, end, self._layers(span))
        indent = " " * (_MARGIN + 1)
        yield Text(indent + "".join(phases).rstrip())
        if any(mark != " " for mark in layers):
            yield Text(indent + "".join(layers).rstrip(), style="dim")

    def _layers(self, span: Span) -> list[str]:
        own = [part.layer for part in self.timeline.layers if span.first <= part.first and part.last <= span.last]
        if len(own) < 2 or len(set(own)) < len(own):  # several passes
            return []
        upright = self.lines.upright
        return [f"{upright}layers {own[0]} to {own[-1]}", f"{upright}{own[0]}..{own[-1]}"]

    def legend(self, width: int) -> Iterator[Text]:
        """Yield the components with their looks and their bytes at the peak."""
        yield Text("")
        line = Text("at the peak  ")
        for component, paint in _STACK.items():
            nbytes = self.live[component][self.timeline.peak_event]
            if not any(self.live[component]):
                continue
            words = f" {component.replace('_', ' ')} {show_bytes(nbytes)}  "
            if len(line) + 1 + len(words.rstrip()) > width:
                line.rstrip()
                yield line
                line = Text(" " * 13)
            line.append("█" if self.blocks else paint.letter, paint.colour if self.coloured else "")
            line.append(words)
        line.rstrip()
        yield line

    def at_peak(self, width: int) -> Iterator[Text]:
        """Yield the largest kinds of blocks that are alive at the peak, and the notes."""
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for block in self.timeline.alive_at(self.timeline.peak_event):
            kind = re.sub(r"\.\d+(?=[.:]|$)", ".*", block.name)
            sizes[kind] += block.nbytes
            counts[kind] += 1
        for kind, nbytes in sizes.most_common(_ROWS):
            line = f"{show_bytes(nbytes):>13}  {counts[kind]:>5} x  {kind}"
            yield Text(line if len(line) <= width else line[: width - 3] + "...")
        yield from (Text(line) for line in self._notes(width))

    def _notes(self, width: int) -> Iterator[str]:
        capacity = self.timeline.capacity
        notes = [*self.timeline.notes, "the x axis counts allocations and frees, it is not time"]
        if capacity is not None:
            where = "the level line" if self.shown_capacity is not None else "above the drawing"
            notes.append(f"the GPU has {show_bytes(capacity)}, {where}")
        from textwrap import wrap

        for note in notes:
            yield from wrap(note, width)


def _shares(edges: list[int], low: int, high: int) -> list[int]:
    """Return the bytes of each component between `low` and `high`; `edges` are the components' upper edges."""
    starts = [0, *edges]
    return [max(0, min(end, high) - max(start, low)) for start, end in zip(starts, edges, strict=False)]


def _words(span: Span, *, several: bool) -> list[str]:
    """Return the names of a span, the longest first."""
    if span.phase == "step":
        return ["optimizer step", "step", "st"]
    number = "" if not several or span.micro_batch is None else str(span.micro_batch + 1)
    if not several:
        return [span.phase, span.phase[:4], span.phase[0]]
    return [f"{span.phase} {number}".rstrip(), f"{span.phase[0]}{number}"]


def _write(cells: list[str], first: int, end: int, choices: Sequence[str]) -> None:
    """Write the first of the choices that has room into cells."""
    for words in choices:
        if len(words) <= end - first:
            cells[first : first + len(words)] = words
            return
