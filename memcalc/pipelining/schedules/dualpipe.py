"""DualPipe: two pipelines in opposite directions, with backwards cut into halves at both ends of a step (DeepSeek-AI 2024,
arXiv 2412.19437, section 3.2.1; deepseek-ai/DualPipe, dualpipe/dualpipe.py).

A rank has stage r of one pipeline and stage p - 1 - r of the other, so all parameters are there twice. The ranks of the
second half do what those of the first half do, with the directions exchanged.
"""

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
    second = rank >= ranks // 2
    near, far = (1, 0) if second else (0, 1)
    return both_directions(min(rank, ranks - 1 - rank), ranks // 2, micro_batches // 2, near, far)


def _unfit(ranks: int, micro_batches: int) -> str | None:
    if ranks % 2:
        return f"DualPipe needs an even number of ranks, not {ranks}"
    if micro_batches % 2 or micro_batches < 2 * ranks:
        return f"DualPipe needs an even number of micro-batches, {2 * ranks} or more (twice the ranks), not {micro_batches}"
    return None


def _enough(rank: int, ranks: int, micro_batches: int) -> int:
    return min(micro_batches, 2 * ranks + 4)


SCHEDULE: Final = Schedule(
    "dualpipe",
    _order,
    "deepseek-ai/DualPipe, dualpipe/dualpipe.py",
    placement="both ways",
    chunks=2,
    halves=True,
    joined=_joined,
    unfit=_unfit,
    enough=_enough,
)
