"""Text that folds to a width. Words longer than the line break after an operator or a dot: formulas, settings, names of
modules. Chinese breaks between any two characters, but no line begins with a closing mark or ends with an opening one."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, chop_cells
from rich.measure import Measurement
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderResult

_PIECE: Final = re.compile(r"[^·+=:/,(.]*[·+=:/,(.]?")
_WORD: Final = re.compile(r"\S+")
_CLOSING: Final = frozenset("，。、；：？！）】》」』”’…,.;:?!)]%·")
_OPENING: Final = frozenset("（【《「『“‘([")


class Folded:
    """A text for rich that breaks its long words at the width it is printed with."""

    def __init__(self, text: Text | str) -> None:
        self.text = Text(text) if isinstance(text, str) else text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text.split("\n", allow_blank=True)
        yield Text("\n").join(with_breaks(line, options.max_width) for line in lines)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.text)


def lines_of(line: Text, console: Console, width: int) -> Iterator[Text]:
    """Yield a line in parts of at most `width` columns, without the spaces at their ends and without empty ones."""
    if _has_wide(line.plain):
        parts = line.divide(list(_line_starts(line.plain, width)))
    else:
        parts = with_breaks(line, width).wrap(console, width)
    for part in parts:
        part.rstrip()
        if part:
            yield part


def _line_starts(plain: str, width: int) -> Iterator[int]:
    """Yield the places at which the lines of a text with wide characters begin, except the first."""
    taken = 0
    for start, unit in _units(plain):
        length = cell_len(unit)
        if not unit.isspace() and taken and taken + length > width:
            yield start
            taken = 0
        for cut in _cuts_within(unit, width) if length > width and not unit.isspace() else ():
            yield start + cut
            length = cell_len(unit[cut:])
        taken += length


def _units(plain: str) -> Iterator[tuple[int, str]]:
    """Yield the parts of a text that stay on one line, with their places."""
    start = 0
    for place in range(1, len(plain) + 1):
        if place == len(plain) or _may_break(plain[place - 1], plain[place]):
            yield start, plain[start:place]
            start = place


def _may_break(before: str, after: str) -> bool:
    """Return True if a line may end between two characters."""
    if before.isspace() or after.isspace():
        return not (before.isspace() and after.isspace())
    if after in _CLOSING or before in _OPENING:
        return False
    return _has_wide(before) or _has_wide(after)


def _has_wide(text: str) -> bool:
    """Tell whether a text has characters that take two columns each. Most texts have none that are so high."""
    if not text or max(text) < "\u2e80":
        return False
    return any("\u2e80" <= c <= "\u9fff" or "\uf900" <= c <= "\ufaff" or "\uff00" <= c <= "\uff60" for c in text)


def _cuts_within(unit: str, width: int) -> Iterator[int]:
    """Yield the places at which a unit wider than a line is cut: after an operator, and inside of what has none."""
    places = [0, *_cuts(unit, width), len(unit)]
    for begin, end in pairwise(places):
        if begin:
            yield begin
        place = begin
        for part in chop_cells(unit[begin:end], width)[:-1]:
            place += len(part)
            yield place


def with_breaks(line: Text, width: int) -> Text:
    """Return the line with spaces at which a word wider than `width` is broken.

    The parts of a word are as long as possible. So two neighbouring parts never have room on one line, and every such space is
    a line break.
    """
    plain = line.plain
    room = width - (len(plain) - len(plain.lstrip()))
    wide = [word for word in _WORD.finditer(plain) if cell_len(word[0]) > room]
    cuts = [word.start() + cut for word in wide for cut in _cuts(word[0], room)]
    return Text(" ").join(line.divide(cuts)) if cuts else line


def _cuts(word: str, room: int) -> Iterator[int]:
    """Yield the place at which each part of a word begins, except the first."""
    place = taken = 0
    for piece in (part for whole in _PIECE.findall(word) for part in chop_cells(whole, max(room, 1))):
        length = cell_len(piece)
        if taken and taken + length > room:
            yield place
            taken = 0
        taken += length
        place += len(piece)
