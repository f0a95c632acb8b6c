"""Chimera: the weights of a GPU that has stages of both pipelines."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.chimera import TOPIC, TWICE
from memcalc.explanation.words import Words
from memcalc.quiz.kinds.pipedream import stages
from memcalc.quiz.of_cases import by_rule, exactly

_ASKS: Final = Words(
    "how many parameters does the first GPU of Chimera's two pipelines have? Every rank is one GPU.",
    "使用 Chimera 的两条流水线，第一张 GPU 上有多少参数？每个 rank 一张 GPU。",
)

KINDS: Final = (by_rule(TOPIC, TWICE, _ASKS, stages), exactly(TOPIC, TWICE, _ASKS, stages))
