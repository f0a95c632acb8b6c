"""Chimera: the weights of a GPU that has stages of both pipelines."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.bubble import CHIMERA, OF_THE_STEP
from memcalc.explanation.topics.chimera import TOPIC, TWICE
from memcalc.explanation.words import Words
from memcalc.quiz.kinds.pipedream import stages
from memcalc.quiz.numbers import OF_32_LAYERS, Draw
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_ASKS: Final = Words(
    "how many parameters does the first GPU of Chimera's two pipelines have? Every rank is one GPU.",
    "使用 Chimera 的两条流水线，第一张 GPU 上有多少参数？每个 rank 一张 GPU。",
)


def _bubbles(draw: Draw) -> Two:
    pp = draw.one_of((4, 8, 16))
    options = {"gpus": pp, "pp": pp, "global_batch_size": pp}
    numbers = letters_of((OF_THE_STEP, CHIMERA), draw.one_of(OF_32_LAYERS), **options)
    return Two(Put(OF_THE_STEP, numbers), Put(CHIMERA, numbers), {"p": pp})


KINDS: Final = (
    by_rule(TOPIC, TWICE, _ASKS, stages),
    times(
        TOPIC,
        "1F1B's bubble over Chimera's",
        Words(
            "how many times as large a part of a step is 1F1B's bubble as Chimera's, with {p} stages and {p} micro-batches? A "
            "backward takes two forwards.",
            "{p} 个阶段、{p} 个微批次时，1F1B 的气泡占整步的比例是 Chimera 的多少倍？反向时间为前向的两倍。",
        ),
        _bubbles,
    ),
    exactly(TOPIC, TWICE, _ASKS, stages),
)
