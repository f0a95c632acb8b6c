"""Compressed gradients: the bytes that are sent, and those that error feedback keeps."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.gradient_compression import CAST, ERRORS, LOW_RANK, SIGNS, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import SMALL_LLAMAS, Draw, Setup, parameters, sharded_models
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, times


def _cast_and_signs(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw), "n": draw.one_of((4, 8, 16, 32, 64, 128))}
    return Two(Put(CAST, numbers), Put(SIGNS, numbers))


def _small(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options={"gpus": draw.one_of((2, 4, 8, 16, 64))})


KINDS: Final = (
    by_rule(
        TOPIC,
        CAST,
        Words(
            "how many bytes does each GPU send in a ring all-reduce of fp32 gradients that a hook of DDP casts to 16 bits?",
            "DDP 的钩子把 fp32 梯度转成 16 位后做环形 all-reduce，每张 GPU 发送多少字节？",
        ),
        sharded_models,
    ),
    by_rule(
        TOPIC,
        LOW_RANK,
        Words(
            "how many times fewer numbers does PowerSGD of rank 1 send for the gradient of one matrix of the MLP, h by f?",
            "对 MLP 的一个 h×f 矩阵，秩为 1 的 PowerSGD 发送的数是原来的几分之一（压缩比）？",
        ),
        sharded_models,
    ),
    by_rule(
        TOPIC,
        SIGNS,
        Words(
            "how many bytes does each GPU send in a step of 1-bit Adam after its warm-up, scales and padding left out?",
            "1-bit Adam 预热之后，每张 GPU 每步发送多少字节（不计缩放因子和填充）？",
        ),
        sharded_models,
    ),
    by_rule(
        TOPIC,
        ERRORS,
        Words(
            "how many bytes does PowerSGD's error feedback keep between steps for fp32 gradients?",
            "梯度为 fp32 时，PowerSGD 的误差反馈在各步之间保存多少字节？",
        ),
        sharded_models,
    ),
    times(
        TOPIC,
        "16-bit gradients over signs",
        Words(
            "how many times as many bytes does a GPU send in a ring all-reduce of 16-bit gradients as in 1-bit Adam's two "
            "phases of signs, scales and padding left out?",
            "16 位梯度的环形 all-reduce 的发送量，是 1-bit Adam 两个符号阶段（不计缩放因子和填充）的多少倍？",
        ),
        _cast_and_signs,
    ),
    exactly(
        TOPIC,
        ERRORS,
        Words(
            "how many bytes does PowerSGD of rank 1 keep between steps, its two matrices included? Gradients are fp32.",
            "秩为 1 的 PowerSGD 在各步之间保存多少字节（含两个矩阵）？梯度为 fp32。",
        ),
        _small,
    ),
)
