"""The moments of a step as columns of a picture: each column has one moment, and the bytes alive at it by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from memcalc.pictures.timeline import Block, Timeline

MOST_COLUMNS: Final = 1500
ALLOCATOR: Final = "allocator"
ROUNDING: Final = "what the allocator adds to blocks"
OTHERS: Final = "smaller blocks"
_LAYER: Final = re.compile(r"\.\d+(?=\.|$)")


class Key(NamedTuple):
    """The blocks that the picture treats as one."""

    component: str
    name: str


class Changes(NamedTuple):
    """The bytes of a key over the columns: from each column in `columns` on, those in `nbytes`."""

    key: Key
    columns: list[int]
    nbytes: list[int]

    def at(self, column: int) -> int:
        """Return the bytes in a column."""
        before = [nbytes for first, nbytes in zip(self.columns, self.nbytes, strict=True) if first <= column]
        return before[-1] if before else 0


def columns_of(timeline: Timeline, most: int = MOST_COLUMNS) -> list[int]:
    """Return the moment of each column, in order: the first one with most bytes of all moments that fall into the column.
    So the step's peak is one of them."""
    totals = timeline.allocated()
    count = len(totals)
    if count <= most:
        return list(range(count))
    borders = [i * count // most for i in range(most + 1)]
    return [max(range(first, end), key=totals.__getitem__) for first, end in pairwise(borders)]


def changes(
    blocks: Sequence[Block], moments: Sequence[int], key_of: Callable[[Key], Key] = lambda key: key
) -> list[Changes]:
    """Return the bytes of every key over the columns, whose moments these are. A key without bytes in any column is left
    out. `key_of` may give several names one key."""
    now: dict[Key, int] = defaultdict(int)
    out: dict[Key, Changes] = {}
    touched: dict[Key, None] = {}
    turns = iter(sorted(_turns(blocks)))
    waiting = next(turns, None)
    for column, moment in enumerate(moments):
        while waiting is not None and waiting.moment <= moment:
            key = key_of(waiting.key)
            now[key] += waiting.nbytes
            touched[key] = None
            waiting = next(turns, None)
        for key in touched:
            own = out.setdefault(key, Changes(key, [], []))
            if now[key] != (own.nbytes[-1] if own.nbytes else 0):
                own.columns.append(column)
                own.nbytes.append(now[key])
        touched.clear()
    return [own for own in out.values() if own.columns]


class _Turn(NamedTuple):
    """A change of a key's bytes at a moment."""

    moment: int
    key: Key
    nbytes: int


def _turns(blocks: Iterable[Block]) -> Iterator[_Turn]:
    """Yield what every block adds and takes away: its tensor, and what the allocator adds to it."""
    names: dict[str, str] = {}
    for block in blocks:
        if block.name not in names:
            names[block.name] = _LAYER.sub(".*", block.name)
        parts = [(Key(block.component, names[block.name]), block.nbytes)]
        parts += [(Key(ALLOCATOR, ROUNDING), block.size - block.nbytes)] if block.size != block.nbytes else []
        for key, nbytes in parts:
            yield _Turn(block.begin, key, nbytes)
            if block.end is not None:
                yield _Turn(block.end, key, -nbytes)


def with_small_ones_together(found: Iterable[Changes], least: int) -> Callable[[Key], Key]:
    """Return a function that gives all names of a component that never reach `least` bytes one key."""
    large = {own.key for own in found if max(own.nbytes) >= least}
    return lambda key: key if key in large else Key(key.component, OTHERS)
