"""DualPipe: the micro-batches in flight."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.dualpipe import IN_FLIGHT, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import OF_32_LAYERS, Draw, Setup
from memcalc.quiz.of_cases import by_rule

_ASKS: Final = Words(
    "of how many micro-batches does a rank keep the activations at once under DualPipe, both directions together? There are "
    "many more micro-batches than stages.",
    "使用 DualPipe，一个 rank 同时保存多少个微批次的激活值（两个方向合计）？微批次数远多于阶段数。",
)


def many(draw: Draw) -> Setup:
    """Return a model over some stages, with four times as many micro-batches."""
    pp = draw.one_of((4, 8, 16))
    return Setup(model=draw.one_of(OF_32_LAYERS), options={"gpus": pp, "pp": pp, "global_batch_size": 4 * pp})


KINDS: Final = (by_rule(TOPIC, IN_FLIGHT, _ASKS, many, "micro-batches"),)
