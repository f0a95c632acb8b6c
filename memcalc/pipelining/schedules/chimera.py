"""Chimera's two pipelines in opposite directions (Li and Hoefler 2021, arXiv 2107.06925, section 3.1).

Each rank has two stages' weights: stage r of the pipeline down and stage D - 1 - r of the pipeline up. Half of the
micro-batches go each way, D/2 at a time, and each fills the other's idle places. More of them follow as the places of
the first ones become free (direct concatenation, section 3.5).

The paper's figure 3 has a grid of places, in which forwards and backwards take one place each. Micro-batch j of a
group goes into stage s at place 2j + s, and comes back through it at 2j + 2D - 1 - s. The next group of its direction
begins 2D places later.
"""

from __future__ import annotations

from typing import Final

from memcalc.pipelining.actions import Action
from memcalc.pipelining.placement import place
from memcalc.pipelining.schedules import Schedule


def _order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    found: list[tuple[int, Action]] = []
    for chunk in range(2):
        stage = place("both ways", rank, ranks, chunk).stage
        for i in range(micro_batches // 2):
            group, j = divmod(i, ranks // 2)
            begin = 2 * ranks * group + 2 * j
            found.append((begin + stage, Action("forward", chunk, i)))
            found.append((begin + 2 * ranks - 1 - stage, Action("backward", chunk, i)))
    return [action for _, action in sorted(found)]


def _unfit(ranks: int, micro_batches: int) -> str | None:
    if ranks % 2:
        return f"two pipelines in opposite directions need an even number of ranks, not {ranks}"
    if micro_batches % 2:
        return f"half of the micro-batches go each way, and {micro_batches} are odd"
    return None


def _enough(rank: int, ranks: int, micro_batches: int) -> int:
    groups, rest = divmod(micro_batches, ranks)
    return min(groups, 3) * ranks + rest


SCHEDULE: Final = Schedule(
    "chimera",
    _order,
    "Chimera (Li and Hoefler 2021, arXiv 2107.06925, figure 3)",
    placement="both ways",
    chunks=2,
    unfit=_unfit,
    enough=_enough,
)
