"""Muon: bytes that it keeps, alone and over ranks."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.adam import FP32
from memcalc.explanation.topics.muon import SHARED, STATES, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import SMALL_LLAMAS, Draw, Setup, parameters
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, times

_STATES: Final = Words(
    "how many bytes do weights, gradients and optimizer states take with Muon for the matrices and AdamW for the rest, if "
    "everything is fp32? Activations do not count.",
    "矩阵使用 Muon、其余使用 AdamW，全部为 fp32，权重、梯度和优化器状态共占多少字节？不计激活值。",
)
_SHARED: Final = Words(
    "how many bytes of optimizer states (fp32 main weights and momenta) does a data-parallel rank have with Megatron's "
    "dist_muon, which gives whole weights to ranks?",
    "Megatron 的 dist_muon 把整个权重分给各数据并行 rank，一个 rank 的优化器状态（fp32 主权重和动量）占多少字节？",
)


def _model(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS))


def _adam_and_muon(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw)}
    return Two(Put(FP32, numbers), Put(STATES, numbers))


KINDS: Final = (
    by_rule(TOPIC, STATES, _STATES, _model),
    by_rule(TOPIC, SHARED, _SHARED, _model),
    times(
        TOPIC,
        "Adam over Muon",
        Words(
            "how many times as many bytes do weights, gradients and optimizer states take with Adam as with Muon, if all "
            "parameters were matrices and everything is fp32?",
            "假设所有参数都是矩阵且全部为 fp32，使用 Adam 时权重、梯度和优化器状态的总字节数是 Muon 的多少倍？",
        ),
        _adam_and_muon,
    ),
    exactly(TOPIC, STATES, _STATES, _model),
    exactly(TOPIC, SHARED, _SHARED, _model),
)
