"""The bytes that a run reserves on the measuring GPU: its cache is emptied before the first step, and its memory ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.device.allocator import CachingAllocator, OutOfMemory
from memcalc.device.observer import Observer
from memcalc.hardware.figures import figures

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def reserved_when_emptied(report: Report, room: int) -> int:
    """Return the reserved bytes of a report's run whose cache is emptied before the first step, where the allocator may
    reserve `room` bytes. A run that is not played, or whose fragmentation is a recorded share, has those of its report."""
    if report.played is None or figures().fragmentation_of(report.setup.engine) is not None:
        return report.reserved
    return report.reserved - report.played.reserved + _reserved(report, room)


def _reserved(report: Report, room: int) -> int:
    """Return the highest reserved bytes of a late step, as the measured one is. If the device was full before, the allocator has
    given cached segments back, and has reserved less since."""
    for limit in (room, None):
        allocator = CachingAllocator(limit)
        try:
            replay = report.record(allocator, _Emptying(allocator))
            return replay.reserved if replay.retried else allocator.reserved
        except OutOfMemory:
            continue
    raise AssertionError("without a limit nothing runs out of memory")


class _Emptying(Observer):
    """A listener that gives cached segments back before the first step, as the measurement does."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.begun = False

    def step_begins(self) -> None:
        if not self.begun:
            self.allocator.empty_cache()
            self.allocator.most_reserved = self.allocator.reserved
        self.begun = True
