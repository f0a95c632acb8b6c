"""The least that an allocator needs for a run.

A GPU that is full gets segments back and is asked again, so a run goes on with less than it reserves where there is room: with a
limit at which no request fails, whatever was given back before. That is no guarantee for all higher ones: with another limit
segments go at other times, and what is left may fit worse. `least` bisects between what is allocated and what is reserved with
room, so a run goes on with what it finds, and fails a little below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.device.allocator import ROUNDING, CachingAllocator, OutOfMemory
from memcalc.device.replay import Prepared, Replay, prepared
from memcalc.tape.unrolled import NotPeriodic

if TYPE_CHECKING:
    from memcalc.device.shown import Workspaces
    from memcalc.engines.ranks import Rank
    from memcalc.setup.setup import Setup

_PARTS: Final = 256


class Least(NamedTuple):
    """The least limit that was found, and the run within it."""

    limit: int
    """Bytes that the allocator may reserve."""
    below: int
    """A limit that is too low; 0 where all that are as high as what is allocated are enough."""
    run: Replay


def least(
    rank: Rank, setup: Setup, workspaces: Workspaces, kind: type[CachingAllocator] = CachingAllocator, above: int = 0
) -> Least | None:
    """How far what may be reserved can come down until the run fails; None where the order of allocations is not known.

    It is found to 2 MiB or 1/256 of what is reserved with room, whichever is more. `kind` is the allocator:
    CachingAllocator, or memcalc.device.expandable.ExpandableAllocator. A limit that is known to be too low may be given:
    `above`.
    """
    try:
        run = prepared(rank, setup)
    except NotPeriodic:
        return None
    if run is None:
        return None
    free = run.play(kind(), workspaces)
    resolution = _up(free.reserved // _PARTS)
    enough, too_low = Least(_up(free.reserved), 0, free), max(_up(free.allocated) - resolution, above)
    while enough.limit - too_low > resolution:
        middle = _up((enough.limit + too_low) // 2)
        within = _within(run, kind(middle), workspaces)
        if within is None:
            too_low = middle
        else:
            enough = Least(middle, 0, within)
    return enough._replace(below=too_low if too_low >= free.allocated else 0)


def _within(run: Prepared, allocator: CachingAllocator, workspaces: Workspaces) -> Replay | None:
    """The run within the allocator's limit; None where it fails."""
    try:
        return run.play(allocator, workspaces)
    except OutOfMemory:
        return None


def _up(nbytes: int) -> int:
    """To a multiple of 2 MiB, as segments are."""
    return -(-nbytes // ROUNDING) * ROUNDING
