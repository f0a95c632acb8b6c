"""PipeDream-2BW: asynchronous 1F1B that adds up the gradients of m micro-batches (Narayanan et al. 2021, arXiv
2006.09503, section 3.1).

The weights are updated after every m micro-batches without emptying the pipeline. All stages use for batch t the
version of the batch before it: W(t+1) = W(t) - ν·∇f(W(t-1)). So two versions are enough, the one in use and the newest.
"""

from __future__ import annotations

from typing import Final

from memcalc.pipelining.actions import Action
from memcalc.pipelining.schedules import Schedule
from memcalc.pipelining.schedules.early_backward import one_forward_one_backward


def _order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    return one_forward_one_backward(ranks - rank, micro_batches)


def _version(i: int, rank: int, ranks: int, micro_batches: int) -> int:
    return max(0, i // micro_batches - 1)


def _after_all(micro_batches: int) -> int:
    return micro_batches


def _unfit(ranks: int, micro_batches: int) -> str | None:
    if micro_batches >= ranks:
        return None
    return f"two versions are enough for {ranks} or more micro-batches (one for each stage), not {micro_batches}"


def _enough(rank: int, ranks: int, micro_batches: int) -> int:
    return 2 * min(micro_batches, ranks - rank + 3)  # two steps: an update, and the versions on both sides of it


SCHEDULE: Final = Schedule(
    "pipedream-2bw",
    _order,
    "PipeDream-2BW (Narayanan et al. 2021, arXiv 2006.09503, section 3.1)",
    unfit=_unfit,
    update_every=_after_all,
    version=_version,
    enough=_enough,
)
