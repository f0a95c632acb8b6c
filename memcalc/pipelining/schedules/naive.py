"""Model parallelism without a pipeline: a micro-batch goes through all ranks and back before the next one begins.

This is what layers on several GPUs do on their own (transformers' and accelerate's `device_map`): at any time one GPU
works.
"""

from __future__ import annotations

from typing import Final

from memcalc.pipelining.actions import Action
from memcalc.pipelining.schedules import Schedule


def _order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    return [Action(kind, 0, i) for i in range(micro_batches) for kind in ("forward", "backward")]


def _enough(rank: int, ranks: int, micro_batches: int) -> int:
    return min(micro_batches, 3)


SCHEDULE: Final = Schedule(
    "naive",
    _order,
    "model parallelism without micro-batches in flight (Huang et al. 2019, arXiv 1811.06965, figure 2b)",
    enough=_enough,
)
