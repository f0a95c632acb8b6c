"""ZB-V: two chunks of a rank in a V, and backwards cut into halves (Qi et al. 2023, arXiv 2401.10241, section 6;
torch/distributed/pipelining/schedules.py, ScheduleZBVZeroBubble).

Its bubble is zero if a forward and both halves of a backward take equally long.
"""

from __future__ import annotations

from typing import Final

from memcalc.pipelining.actions import Action
from memcalc.pipelining.schedules import Schedule, in_their_order

_Steps = list[tuple[str, int]]


def _order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return torch's order: that of 2·ranks - 1 micro-batches without those that a smaller step does not have."""
    full = in_their_order(_steps(rank, ranks, max(2 * ranks - 1, micro_batches)))
    return [action for action in full if action.micro_batch is not None and action.micro_batch < micro_batches]


def _steps(rank: int, ranks: int, micro_batches: int) -> _Steps:
    after = ranks - rank
    warmup: _Steps = [("forward", 0)] * (2 * after - 1)
    warmup += [("forward", 1), ("forward", 0)] * rank
    warmup += [("forward", 1), *_whole(1)] * after
    begun = 2 * ranks - 1 - rank  # forwards of chunk 0 so far; of chunk 1 they are as many as ranks
    steady: _Steps = []
    for i in range(micro_batches - ranks):
        if begun + i < micro_batches:
            steady.append(("forward", 0))
        steady += [*_whole(0), ("forward", 1), *_whole(1)]
    end: _Steps = [("backward of inputs", 0), ("backward of inputs", 1)] * rank
    end += [("backward of inputs", 0), ("backward of weights", 0)] * after
    end += [("backward of weights", 1)] * rank
    end += [("backward of weights", 0)] * rank
    return [*warmup, *steady, *end]


def _whole(chunk: int) -> _Steps:
    return [("backward of inputs", chunk), ("backward of weights", chunk)]


def _enough(rank: int, ranks: int, micro_batches: int) -> int:
    return min(micro_batches, 2 * ranks + 2)


SCHEDULE: Final = Schedule(
    "zbv",
    _order,
    "torch/distributed/pipelining/schedules.py, ScheduleZBVZeroBubble",
    placement="in a V",
    chunks=2,
    halves=True,
    enough=_enough,
)
