"""DAPPLE's early backward with its warm-up policy B (Fan et al. 2021, arXiv 2007.01045, section 3).

Stage i of S runs K = min(2(S - i) - 1, D) forwards before its first backward: more than policy A, which hides slow
communication between stages.
"""

from __future__ import annotations

from typing import Final

from memcalc.pipelining.actions import Action
from memcalc.pipelining.schedules import Schedule
from memcalc.pipelining.schedules.early_backward import one_forward_one_backward


def _order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    return one_forward_one_backward(2 * (ranks - rank) - 1, micro_batches)


def _enough(rank: int, ranks: int, micro_batches: int) -> int:
    return min(micro_batches, 2 * (ranks - rank) - 1 + 3)


SCHEDULE: Final = Schedule(
    "dapple-b", _order, "DAPPLE, policy B (Fan et al. 2021, arXiv 2007.01045, section 3)", enough=_enough
)
