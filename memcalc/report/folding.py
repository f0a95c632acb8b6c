"""Text that breaks words longer than the line after an operator or a dot: formulas, settings, names of modules."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.measure import Measurement
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderResult

_PIECE: Final = re.compile(r"[^·+=:/,(.]*[·+=:/,(.]?")
_WORD: Final = re.compile(r"\S+")


class Folded:
    """A text for rich that breaks its long words at the width it is printed with."""

    def __init__(self, text: Text | str) -> None:
        self.text = Text(text) if isinstance(text, str) else text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text.split("\n", allow_blank=True)
        yield Text("\n").join(with_breaks(line, options.max_width) for line in lines)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.text)


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
    for piece in _PIECE.findall(word):
        length = cell_len(piece)
        if taken and taken + length > room:
            yield place
            taken = 0
        taken += length
        place += len(piece)
