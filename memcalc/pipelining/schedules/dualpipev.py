"""DualPipeV: one half of DualPipe's ranks, each with a stage on the way there and one on the way back
(torch/distributed/pipelining/schedules.py, ScheduleDualPipeV; deepseek-ai/DualPipe, dualpipe/dualpipev.py)."""

from __future__ import annotations

from typing import Final

from memcalc.pipelining.actions import Action
from memcalc.pipelining.schedules import Schedule
from memcalc.pipelining.schedules.bidirectional import Overlapped, both_directions


def _order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    return _overlapped(rank, ranks, micro_batches).order


def _joined(rank: int, ranks: int, micro_batches: int) -> frozenset[int]:
    return _overlapped(rank, ranks, micro_batches).joined


def _overlapped(rank: int, ranks: int, micro_batches: int) -> Overlapped:
    return both_directions(rank, ranks, micro_batches, 0, 1)


def _unfit(ranks: int, micro_batches: int) -> str | None:
    if micro_batches >= 2 * ranks:
        return None
    return (
        f"torch's ScheduleDualPipeV needs {2 * ranks} or more micro-batches (one for each stage), not {micro_batches}"
    )


def _enough(rank: int, ranks: int, micro_batches: int) -> int:
    return min(micro_batches, 2 * ranks + 2)


SCHEDULE: Final = Schedule(
    "dualpipev",
    _order,
    "torch/distributed/pipelining/schedules.py, ScheduleDualPipeV",
    placement="in a V",
    chunks=2,
    halves=True,
    joined=_joined,
    unfit=_unfit,
    enough=_enough,
)
