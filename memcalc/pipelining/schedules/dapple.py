"""DAPPLE's early backward with its warm-up policy A (Fan et al. 2021, arXiv 2007.01045, section 3).

Stage i of S runs K = min(S - i, D) forwards before its first backward. D is the number of micro-batches that a device
has the memory for; here it is all of a step. So the order is that of 1F1B, for any number of micro-batches.
"""

from __future__ import annotations

from typing import Final

from memcalc.pipelining.actions import Action
from memcalc.pipelining.schedules import Schedule
from memcalc.pipelining.schedules.early_backward import one_forward_one_backward


def _order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    return one_forward_one_backward(ranks - rank, micro_batches)


def _enough(rank: int, ranks: int, micro_batches: int) -> int:
    return min(micro_batches, ranks - rank + 3)


SCHEDULE: Final = Schedule(
    "dapple", _order, "DAPPLE, policy A (Fan et al. 2021, arXiv 2007.01045, section 3)", enough=_enough
)
