"""DualPipe: the micro-batches in flight."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.bubble import DUALPIPE, PER_IDEAL
from memcalc.explanation.topics.dualpipe import IN_FLIGHT, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import OF_32_LAYERS, Draw, Setup
from memcalc.quiz.of_cases import by_rule
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_ASKS: Final = Words(
    "of how many micro-batches does a rank keep the activations at once under DualPipe, both directions together? There are "
    "many more micro-batches than stages.",
    "使用 DualPipe，一个 rank 同时保存多少个微批次的激活值（两个方向合计）？微批次数远多于阶段数。",
)


def many(draw: Draw) -> Setup:
    """Return a model over some stages, with four times as many micro-batches."""
    pp = draw.one_of((4, 8, 16))
    return Setup(model=draw.one_of(OF_32_LAYERS), options={"gpus": pp, "pp": pp, "global_batch_size": 4 * pp})


def _bubbles(draw: Draw) -> Two:
    setup = many(draw)
    numbers = letters_of((PER_IDEAL, DUALPIPE), str(setup.model), **setup.options)
    return Two(Put(PER_IDEAL, numbers), Put(DUALPIPE, numbers))


KINDS: Final = (
    by_rule(TOPIC, IN_FLIGHT, _ASKS, many, "micro-batches"),
    times(
        TOPIC,
        "1F1B's bubble over DualPipe's",
        Words(
            "how many times as large as DualPipe's is 1F1B's bubble, each over the ideal time of a step?",
            "以理想步时间为分母，1F1B 的气泡是 DualPipe 的多少倍？",
        ),
        _bubbles,
    ),
)
