"""PipeDream's asynchronous 1F1B with weight stashing (Narayanan et al. 2019, SOSP, section 3.3).

The weights are updated after every backward, and the pipeline is never emptied. A micro-batch uses the same version of
a stage's weights in forward and in backward, so stage i of p keeps the p - i versions of the micro-batches in flight.
Its runtime (msr-fiddle/pipedream, runtime/optimizer.py) has a queue of p - i clones besides the module's own weights.
"""

from __future__ import annotations

from typing import Final

from memcalc.pipelining.actions import Action
from memcalc.pipelining.schedules import Schedule
from memcalc.pipelining.schedules.early_backward import one_forward_one_backward


def _order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    return one_forward_one_backward(ranks - rank, micro_batches)


def _version(i: int, rank: int, ranks: int, micro_batches: int) -> int:
    """Return the number of backwards that came before the forward of micro-batch `i`."""
    return max(0, i - (ranks - rank) + 1)


def _after_each(micro_batches: int) -> int:
    return 1


def _enough(rank: int, ranks: int, micro_batches: int) -> int:
    return ranks - rank + 3  # more than a step has, if others are in flight meanwhile


SCHEDULE: Final = Schedule(
    "pipedream",
    _order,
    "PipeDream (Narayanan et al. 2019, section 3.3)",
    update_every=_after_each,
    version=_version,
    enough=_enough,
)
