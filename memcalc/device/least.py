"""The smallest limit of reserved memory with which a run does not go out of memory.

On a full GPU the allocator gives free segments back and asks again. So a run needs less than it reserves on a GPU with room.
A higher limit is not always enough: with another limit segments are given back at other times, and the blocks that stay may
fit worse. `least` bisects between `allocated` and `reserved` of the run without a limit. The run goes on within the limit
that it returns, and fails within a slightly lower one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.device.allocator import ROUNDING, CachingAllocator, OutOfMemory
from memcalc.device.replay import Prepared, Replay, prepared
from memcalc.tape.unrolled import NotPeriodic

if TYPE_CHECKING:
    from memcalc.device.shown import Workspaces
    from memcalc.engines.rank import Rank
    from memcalc.setup.setup import Setup

_PARTS: Final = 256


class Least(NamedTuple):
    """The smallest limit that was found to be enough, and the run within this limit."""

    limit: int
    """The bytes that the allocator may reserve."""
    below: int
    """The highest limit that was found too low, in bytes; 0 if no limit from `allocated` bytes up was too low."""
    run: Replay


def least(
    rank: Rank, setup: Setup, workspaces: Workspaces, kind: type[CachingAllocator] = CachingAllocator, above: int = 0
) -> Least | None:
    """Return the smallest limit within which the run goes on; None if the order of its allocations is not known.

    The limit is exact to 2 MiB, or to 1/256 of what the run reserves without a limit if that is more. `kind` is the
    allocator: CachingAllocator, or memcalc.device.expandable.ExpandableAllocator. `above` is a limit in bytes that is known
    to be too low.
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
    """Return the run within the allocator's limit; None if the run is out of memory."""
    try:
        return run.play(allocator, workspaces)
    except OutOfMemory:
        return None


def _up(nbytes: int) -> int:
    """Round bytes up to a multiple of 2 MiB, the size of segments."""
    return -(-nbytes // ROUNDING) * ROUNDING
