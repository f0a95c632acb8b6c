"""Two runs of one step, allocation by allocation: where one has more alive than the other.

Peaks show what is alive where a model of this shape has most. What a frame holds a moment too long, or not long enough, shows
at every allocation in between, and decides the peak of another shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Final, NamedTuple

LASTS: Final = 3
"""Allocations in a row: what is freed and made in another order within one op of torch's is not looked at."""

LONG: Final = 8
"""Allocations of the same sizes in a row: fewer may be alike by chance."""


class Made(NamedTuple):
    """An allocation: its bytes, and all that is alive with it."""

    nbytes: int
    alive: int


def _in_step(ours: Sequence[Made], theirs: Sequence[Made]) -> Iterator[tuple[int, int]]:
    """Places where both have made the same blocks, in whatever order: gradients of a weight and of its input change places."""
    ahead: Counter[int] = Counter()
    for place, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        ahead[our.nbytes] += 1
        ahead[their.nbytes] -= 1
        for nbytes in (our.nbytes, their.nbytes):
            if not ahead[nbytes]:
                del ahead[nbytes]
        if not ahead:
            yield place, place


def _alike(ours: Sequence[Made], theirs: Sequence[Made]) -> Iterator[tuple[int, int]]:
    """The same for runs that do not make the same blocks throughout: what a scan is made of, say."""
    matcher = SequenceMatcher(None, [m.nbytes for m in ours], [m.nbytes for m in theirs], autojunk=False)
    for block in matcher.get_matching_blocks():
        if block.size > LONG:
            yield from ((block.a + i, block.b + i) for i in range(1, block.size))


def differences(ours: Sequence[Made], theirs: Sequence[Made]) -> list[tuple[int, int]]:
    """(place among our allocations, bytes that they have more alive there) wherever that changes and lasts."""
    numbers = [number for number, made in enumerate(ours) if made.nbytes]
    ours, theirs = [ours[number] for number in numbers], [made for made in theirs if made.nbytes]
    places = list(_in_step(ours, theirs))
    if 2 * len(places) < len(ours):  # most of it went by unseen
        places = list(_alike(ours, theirs))
    found: list[tuple[int, int]] = []
    level: int | None = None
    before, since, first = 0, 0, 0
    for our, their in places:
        more = theirs[their].alive - ours[our].alive
        level = more if level is None else level
        since = since + 1 if more == before and since else 1
        first = our if since == 1 else first
        before = more
        if since == LASTS and more != level:
            found.append((numbers[first], more - level))
            level = more
    return found
