"""Whether a step runs in the memory of a GPU.

torch's allocator reserves less where it has to: on a GPU that is full it gives back segments that are free as a whole, and asks
again. So a run fits where it goes on with what the GPU has, and between yes and no there are answers with a condition:

- `fits`: what it would take with room, and the stated error, are within the GPU's memory.
- `tight`: the run was played to its steady state within the memory, with all of it and with less. The allocator gives segments
  back, which takes time, or what is to spare is less than the stated error.
- `expandable`: it runs with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and is out of memory without.
- `uncertain`: it runs in all that the GPU has, but not in that less the stated error, or fragmentation is not known and could be
  too much.
- `no`: more is allocated than there is, or no way was found in which the allocator gets along with what there is.
- `unknown`: model states alone are within the memory; what comes on top of them is not known without a model.

The first two are a fit. Where a run's allocations are not played, its fragmentation is a row with the basis `assumed`
(memcalc.device.fragmentation), so that no answer is better because less is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

from memcalc.device.allocator import CachingAllocator, OutOfMemory
from memcalc.device.shown import LEAST_ERROR, margin

if TYPE_CHECKING:
    from memcalc.device.replay import Replay
    from memcalc.estimation.report import Report

Answer = Literal["fits", "tight", "expandable", "uncertain", "no", "unknown"]
WORST_LAST: Final[tuple[Answer, ...]] = ("fits", "tight", "unknown", "expandable", "uncertain", "no")


@dataclass(frozen=True)
class Verdict:
    """The answer for one rank, on a GPU of `capacity` bytes."""

    answer: Answer
    capacity: int
    report: Report
    """The rank that decides."""
    run: Replay | None = None
    """With `tight` the run within the GPU's memory."""

    @property
    def fits(self) -> bool | None:
        """None where it is not known."""
        return None if self.answer == "unknown" else self.answer in ("fits", "tight")

    @property
    def gives_back(self) -> bool:
        """Tell whether segments are given back within the GPU's memory; else the estimate's error is all that is not there."""
        return self.run is not None and self.run.retries > 0

    @property
    def headroom(self) -> int:
        """Bytes to spare; negative where it does not fit."""
        return self.capacity - self.needs

    @cached_property
    def needs(self) -> int:
        """Bytes of the device: with `fits` what the run takes with room, with `tight` what it takes within the GPU, with
        `unknown` the states; else the least that was found to be enough, and with all answers but `no` the error that it is
        asked to have room for."""
        rank, besides = self.report, outside(self.report)
        if self.answer == "fits":
            return rank.device
        if self.answer == "unknown":
            return rank.peak
        if self.run is not None:
            return self.run.reserved + besides
        if self.answer == "no":
            allocated = rank.counted + besides
            return allocated if allocated > self.capacity else _least(rank, self.capacity - besides) + besides
        if rank.played is None:
            return rank.device + rank.margin
        sure = _sure(self.capacity)
        return _least(rank, sure - besides) + besides + self.capacity - sure


def verdict_of(ranks: list[Report], capacity: int) -> Verdict:
    """The worst rank's verdict, on a GPU of so many bytes."""
    alike = _worst([_of_one(rank, capacity) for rank in ranks])
    return alike[0] if len(alike) == 1 else max(alike, key=lambda one: one.needs)


def first_look_of(ranks: list[Report], capacity: int) -> Verdict:
    """The worst rank's verdict as far as one play of it tells, without rows: what fits by it may be `tight`, what is `tight` may
    fail with limits above the one that was played, and `no` may be `expandable` or `uncertain`."""
    return max(_worst([_first_look(rank, capacity) for rank in ranks]), key=lambda one: one.gives_back)


def _worst(verdicts: list[Verdict]) -> list[Verdict]:
    worst = max(WORST_LAST.index(one.answer) for one in verdicts)
    return [one for one in verdicts if WORST_LAST.index(one.answer) == worst]


def _of_one(rank: Report, capacity: int) -> Verdict:
    besides, sure = outside(rank), _sure(capacity)
    look = _first_look(rank, capacity)
    if look.run is None and (look.answer != "no" or rank.peak + besides > capacity):
        return look
    if look.answer == "fits" and rank.device + rank.margin <= capacity:
        return Verdict("fits", capacity, rank)
    if look.run is not None and look.run.steady and _goes_on_up_to(rank, sure - besides, capacity - besides):
        return Verdict("tight", capacity, rank, look.run)
    if rank.counted + besides > capacity:
        return Verdict("no", capacity, rank)
    from memcalc.device.expandable import ExpandableAllocator

    if _within(rank, ExpandableAllocator(sure - besides)) is not None:
        return Verdict("expandable", capacity, rank)
    if look.run is not None or rank.played_within(capacity - besides) is not None:
        return Verdict("uncertain", capacity, rank)
    return Verdict("no", capacity, rank)


def _first_look(rank: Report, capacity: int) -> Verdict:
    """`run` is the run within the GPU's memory less the stated error; None where it is out of memory or not played."""
    besides = outside(rank)
    if rank.peak + besides > capacity:
        return Verdict("no", capacity, rank)
    if rank.states_only or not rank.is_played:
        return _without_a_run(rank, capacity)
    within = rank.played_within(_sure(capacity) - besides)
    if within is None:
        return Verdict("no", capacity, rank)
    device = within.reserved + besides
    if not within.retries and device + margin(device, rank.setup.engine) <= capacity:
        return Verdict("fits", capacity, rank, within)
    return Verdict("tight" if within.steady else "uncertain", capacity, rank, within)


def _without_a_run(rank: Report, capacity: int) -> Verdict:
    if rank.counted + outside(rank) > capacity:
        return Verdict("no", capacity, rank)
    if rank.states_only:
        return Verdict("unknown", capacity, rank)
    return Verdict("fits" if rank.device + rank.margin <= capacity else "uncertain", capacity, rank)


def outside(rank: Report) -> int:
    """Bytes that a process holds outside torch."""
    return sum(item.nbytes for item in rank.outside)


def _sure(capacity: int) -> int:
    """Return what a run may take so that it and the error of the least are within the capacity."""
    return capacity * 100 // (100 + LEAST_ERROR)


def _goes_on_up_to(rank: Report, low: int, high: int) -> bool:
    """Whether the run settles with limits above `low`, too. With another limit segments go back at other times, and what is left
    may fit worse; and what the context and NCCL really leave is between the two."""
    runs = (rank.played_within(limit) for limit in ((low + high) // 2, high))
    return all(run is not None and run.steady for run in runs)


def _within(rank: Report, allocator: CachingAllocator) -> Replay | None:
    """The run with this allocator; None where it is out of memory."""
    try:
        return rank.play(allocator)
    except OutOfMemory:
        return None


def _least(rank: Report, above: int) -> int:
    """The least limit above this one, which is too low, with which the run goes on."""
    from memcalc.device.least import least

    found = least(rank.rank, rank.setup, rank.workspaces, above=above)
    assert found is not None
    return found.limit
