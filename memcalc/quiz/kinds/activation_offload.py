"""Activations on the host: their bytes."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.activation_offload import CORE, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import SMALL_LLAMAS, Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly

_CORE: Final = Words(
    "how many bytes of the host's pinned memory do the queries, keys, values and outputs of attention take in 16 bits, if "
    "Megatron moves them there (--offload-modules core_attn)?",
    "Megatron 把注意力的 Q、K、V 和输出（16 位）移到主机 (--offload-modules core_attn)，它们占主机锁页内存多少字节？",
)


def _model(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS))


KINDS: Final = (by_rule(TOPIC, CORE, _CORE, _model), exactly(TOPIC, CORE, _CORE, _model))
