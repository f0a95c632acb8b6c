"""ZB-V: the micro-batches in flight."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.zbv import AS_1F1B, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.kinds.dualpipe import many
from memcalc.quiz.of_cases import by_rule

_ASKS: Final = Words(
    "of how many micro-batches does a rank keep the activations at once under ZB-V, in units of its whole part of the model? "
    "There are many more micro-batches than stages.",
    "使用 ZB-V，一个 rank 同时保存多少个微批次的激活值（以它所拥有的全部模型份额为单位）？微批次数远多于阶段数。",
)

KINDS: Final = (by_rule(TOPIC, AS_1F1B, _ASKS, many, "micro-batches"),)
