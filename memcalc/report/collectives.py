"""Tables of collectives at any width: words always stay; columns of numbers without room are left out and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rich.console import RenderableType
from rich.table import Table

from memcalc.report.fitting import left_out
from memcalc.report.folding import Folded

_WIDTHS: Final = {"ranks": 5, "calls": 5, "payload": 10, "wire": 10, "time": 9}
_BETWEEN: Final = 2
_WORDS: Final = 24  # columns of "backward reduce_scatter"


class Numbers(NamedTuple):
    """The columns of numbers, the least important last."""

    names: tuple[str, ...]

    def that_fit(self, width: int) -> tuple[Numbers, str]:
        """Return the columns that leave room for the words of a row, and a line that names the columns left out. `payload` and
        the columns before it always stay."""
        names = self.names
        while names[-1] != "payload" and sum(_WIDTHS[name] + _BETWEEN for name in names) > width - _WORDS:
            names = names[:-1]
        gone = self.names[len(names) :]
        return Numbers(names), left_out(gone)


def add_words(
    table: Table, names: Sequence[str], *, on_one_line: bool
) -> Callable[[Sequence[str]], Sequence[RenderableType]]:
    """Add the columns for a row's words; the last word is long. Return the function that turns words into cells.

    With `on_one_line` each word has a column. Otherwise all words share one column, the last on a line of its own.
    """
    if on_one_line:
        for name in names:
            table.add_column(name, no_wrap=name != "what", overflow="fold")
        return lambda words: words
    table.add_column(" ".join(names), overflow="fold")

    def joined(words: Sequence[str]) -> Sequence[RenderableType]:
        first = " ".join(word for word in words[:-1] if word)
        return [Folded("\n".join(line for line in (first, words[-1]) if line))]

    return joined
