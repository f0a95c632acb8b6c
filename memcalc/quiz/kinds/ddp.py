"""DDP: bytes of a replica and its buckets, bytes sent."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.ddp import ALL_REDUCE, FP32_BUCKETS, MIXED_BUCKETS, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import SMALL_LLAMAS, Draw, Setup, parameters, sharded_models, sizes
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, less

_FP32: Final = Words(
    "how many bytes do weights, gradients, Adam's states and DDP's buckets take on each GPU, all of them in fp32? "
    "Gradients are not views of the buckets. Activations do not count.",
    "全部采用 fp32，每张 GPU 上权重、梯度、Adam 的状态和 DDP 的桶共占多少字节？梯度不是桶的视图。不计激活值。",
)
_MIXED: Final = Words(
    "how many bytes do weights, gradients, Adam's states and DDP's buckets take on each GPU? There are fp32 weights "
    "with a 16-bit copy, 16-bit gradients and 16-bit buckets. Activations do not count.",
    "每张 GPU 上权重、梯度、Adam 的状态和 DDP 的桶共占多少字节？fp32 权重及其 16 位副本，16 位梯度，16 位的桶。不计"
    "激活值。",
)
_SENT: Final = Words(
    "how many bytes does each GPU send in a step to reduce 16-bit gradients with a ring all-reduce?",
    "用环形 all-reduce 规约 16 位梯度，每张 GPU 每步发送多少字节？",
)


def _fp32_and_mixed(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw)}
    return Two(Put(FP32_BUCKETS, numbers), Put(MIXED_BUCKETS, numbers))


def _small(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options={"gpus": draw.one_of((4, 8, 16, 32))})


KINDS: Final = (
    by_rule(TOPIC, FP32_BUCKETS, _FP32, sizes),
    by_rule(TOPIC, MIXED_BUCKETS, _MIXED, sizes),
    by_rule(TOPIC, ALL_REDUCE, _SENT, sharded_models),
    less(
        TOPIC,
        "fp32 less mixed",
        Words(
            "with DDP and Adam, how many bytes of weights, gradients, states and buckets does a GPU save by a "
            "change from fp32 to 16 bits (fp32 weights with a 16-bit copy, 16-bit gradients and buckets)? Gradients "
            "are not views of the buckets.",
            "使用 DDP 和 Adam，从 fp32 改为 16 位（fp32 权重及其 16 位副本，16 位梯度和桶），每张 GPU 的权重、梯度、"
            "状态和桶共节省多少字节？梯度不是桶的视图。",
        ),
        _fp32_and_mixed,
    ),
    exactly(
        TOPIC,
        FP32_BUCKETS,
        Words(
            "how many bytes do weights, gradients, optimizer states and DDP's buckets take on each GPU? Activations "
            "do not count.",
            "每张 GPU 上权重、梯度、优化器状态和 DDP 的桶共占多少字节？不计激活值。",
        ),
        _small,
    ),
    exactly(
        TOPIC,
        ALL_REDUCE,
        Words(
            "how many bytes does each GPU send in a step? Gradients are 16 bits, and all-reduces are rings.",
            "每张 GPU 每步发送多少字节？梯度为 16 位，all-reduce 用环形算法。",
        ),
        _small,
    ),
)
