"""ZB-V: the micro-batches in flight."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.pipeline import GPIPE
from memcalc.explanation.topics.zbv import AS_1F1B, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.kinds.dualpipe import many
from memcalc.quiz.numbers import Draw
from memcalc.quiz.of_cases import by_rule
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_ASKS: Final = Words(
    "of how many micro-batches does a rank keep the activations at once under ZB-V, in units of its whole part of the model? "
    "There are many more micro-batches than stages.",
    "使用 ZB-V，一个 rank 同时保存多少个微批次的激活值（以它所拥有的全部模型份额为单位）？微批次数远多于阶段数。",
)


def _gpipe_and_zbv(draw: Draw) -> Two:
    setup = many(draw)
    numbers = letters_of((GPIPE, AS_1F1B), str(setup.model), **setup.options)
    return Two(Put(GPIPE, numbers), Put(AS_1F1B, numbers))


KINDS: Final = (
    by_rule(TOPIC, AS_1F1B, _ASKS, many, "micro-batches"),
    times(
        TOPIC,
        "GPipe over ZB-V",
        Words(
            "how many times as many micro-batches does a rank keep the activations of under GPipe as under ZB-V, in units of "
            "its whole part of the model?",
            "以一个 rank 拥有的全部模型份额为单位，GPipe 下它保存激活值的微批次数是 ZB-V 的多少倍？",
        ),
        _gpipe_and_zbv,
    ),
)
