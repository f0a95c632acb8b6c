"""The verdict: whether a step runs in the memory of a GPU.

On a full GPU torch's allocator gives free segments back and asks again, so it reserves less than on a GPU with room. A run
fits if it goes on within the GPU's memory. Between yes and no there are answers with a condition:

- `fits`: what the run takes on a GPU with room, plus the stated error, is within the GPU's memory.
- `tight`: the run was played to a steady state with all of the GPU's memory and with less. Either the allocator gives
  segments back, which takes time, or the spare memory is less than the stated error.
- `expandable`: the run goes on with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and is out of memory without.
- `uncertain`: the run goes on with all of the GPU's memory, but not with the stated error subtracted, or without a steady
  state. Or its fragmentation is not known and could be too much.
- `no`: more is allocated than the GPU has, or the run is out of memory in every way that was tried.
- `unknown`: what is counted is within the memory, and a part is not: without a model all but the model states, or what a
  program names (`Program.uncounted`).

The first two are a fit. If a run's allocations are not played, its fragmentation is a row with the basis `assumed`
(memcalc.device.fragmentation), so that no answer is better because less is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    """The answer for one rank on a GPU of `capacity` bytes."""

    answer: Answer
    capacity: int
    report: Report
    """The rank that decides."""
    run: Replay | None = None
    """The run within the GPU's memory: with `tight` if the run takes more on a GPU with room, and in a first look with every run
    that was played without going out of memory."""

    @property
    def fits(self) -> bool | None:
        """Return True for `fits` and `tight`; None if it is not known."""
        return None if self.answer == "unknown" else self.answer in ("fits", "tight")

    @property
    def gives_back(self) -> bool:
        """Return True if the allocator gives segments back within the GPU's memory. A `tight` run without that lacks room for
        the stated error only."""
        return self.run is not None and self.run.retries > 0

    @property
    def headroom(self) -> int:
        """Return the bytes to spare; negative if the run does not fit."""
        return self.capacity - self.needs

    @cached_property
    def needs(self) -> int:
        """Return the bytes of the device that the run needs, by answer:

        - `fits`: what the run takes on a GPU with room.
        - `tight`: what the run takes within the GPU's memory; what it takes on a GPU with room, if that is less.
        - `unknown`: the model states, or what is counted.
        - `no`: what is allocated if that is more than the capacity, else the least memory that was found to be enough.
        - `expandable`, `uncertain`: the least memory that was found to be enough, plus the stated error; for a run that is not
          played, `device` plus the stated error.
        """
        rank, besides = self.report, outside(self.report)
        if self.answer == "fits" or (self.answer == "tight" and self.run is None):
            return rank.device
        if self.answer == "unknown":
            return rank.peak if rank.states_only else rank.device
        if self.run is not None:
            return self.run.reserved + besides
        if self.answer == "no":
            allocated = rank.counted + besides
            return allocated if allocated > self.capacity else _least(rank, self.capacity - besides) + besides
        if rank.played is None:
            return rank.device + rank.margin
        safe = sure(self.capacity)
        return _least(rank, safe - besides) + besides + self.capacity - safe


def verdict_of(ranks: list[Report], capacity: int) -> Verdict:
    """Return the verdict of the worst rank on a GPU of `capacity` bytes; of equal answers, the one that needs most."""
    alike = _worst([_open(_of_one(rank, capacity)) for rank in ranks])
    return alike[0] if len(alike) == 1 else max(alike, key=lambda one: one.needs)


def first_look_of(ranks: list[Report], capacity: int) -> Verdict:
    """Return the verdict of the worst rank from one play of each rank, without rows.

    The full verdict can differ: `fits` may be `tight`, `tight` may fail with limits above the played one, and `no` may be
    `expandable` or `uncertain`.
    """
    return max(_worst([_open(_first_look(rank, capacity)) for rank in ranks]), key=lambda one: one.gives_back)


def _open(verdict: Verdict) -> Verdict:
    """Return the verdict without a fit if a step keeps something that is not counted."""
    return replace(verdict, answer="unknown") if verdict.fits and verdict.report.uncounted else verdict


def _worst(verdicts: list[Verdict]) -> list[Verdict]:
    worst = max(WORST_LAST.index(one.answer) for one in verdicts)
    return [one for one in verdicts if WORST_LAST.index(one.answer) == worst]


def is_fit(ranks: list[Report], capacity: int) -> bool:
    """Return True if the verdict of all ranks is a fit. Other answers are not told apart, which takes longer."""
    found = [_decided(rank, capacity) for rank in ranks]
    return all(one is not None and one.fits for one in found)


def _of_one(rank: Report, capacity: int) -> Verdict:
    decided = _decided(rank, capacity)
    if decided is not None:
        return decided
    besides, safe = outside(rank), sure(capacity)
    if rank.counted + besides > capacity:
        return Verdict("no", capacity, rank)
    from memcalc.device.expandable import ExpandableAllocator

    if _within(rank, ExpandableAllocator(safe - besides)) is not None:
        return Verdict("expandable", capacity, rank)
    if _first_look(rank, capacity).run is not None or rank.played_within(capacity - besides) is not None:
        return Verdict("uncertain", capacity, rank)
    return Verdict("no", capacity, rank)


def _decided(rank: Report, capacity: int) -> Verdict | None:
    """Return a rank's verdict if it is a fit, or known without a run; else None: the run does not fit as it is."""
    besides, safe = outside(rank), sure(capacity)
    look = _first_look(rank, capacity)
    if look.run is None and (look.answer != "no" or rank.peak + besides > capacity):
        return look
    if look.answer == "fits" and rank.device + rank.margin <= capacity:
        return Verdict("fits", capacity, rank)
    if look.run is not None and look.run.steady and _goes_on_up_to(rank, safe - besides, capacity - besides):
        return Verdict("tight", capacity, rank, look.run if rank.device > capacity else None)
    return None


def _first_look(rank: Report, capacity: int) -> Verdict:
    """Return a rank's verdict from one play. Its `run` is within the GPU's memory less the stated error; None if the run is out
    of memory or not played."""
    besides = outside(rank)
    if rank.peak + besides > capacity:
        return Verdict("no", capacity, rank)
    if rank.states_only or not rank.is_played:
        return _without_a_run(rank, capacity)
    within = rank.played_within(sure(capacity) - besides)
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
    """Return the bytes that a process holds outside torch."""
    return sum(item.nbytes for item in rank.outside)


def sure(capacity: int) -> int:
    """Return the bytes that a run may take so that these bytes plus LEAST_ERROR are within the capacity."""
    return capacity * 100 // (100 + LEAST_ERROR)


def _goes_on_up_to(rank: Report, low: int, high: int) -> bool:
    """Return True if the run also reaches a steady state with limits above `low`, up to `high`.

    With another limit segments are given back at other times, and the blocks that stay may fit worse. What the context and NCCL
    really leave is between the two limits.
    """
    runs = (rank.played_within(limit) for limit in ((low + high) // 2, high))
    return all(run is not None and run.steady for run in runs)


def _within(rank: Report, allocator: CachingAllocator) -> Replay | None:
    """Return the run with an allocator; None if the run is out of memory or not played."""
    try:
        return rank.play(allocator)
    except OutOfMemory:
        return None


def _least(rank: Report, above: int) -> int:
    """Return the smallest limit of the allocator, in bytes, with which the run goes on. `above` is a limit that is too low."""
    from memcalc.device.least import least

    found = least(rank.rank, rank.setup, rank.workspaces, above=above)
    assert found is not None
    return found.limit
