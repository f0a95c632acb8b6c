"""FSDP1: bytes of flat shards and of a layer's gradient, bytes sent."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.fsdp1 import LAYER, SENDS, SHARDS, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, SMALL_LLAMAS, Draw, Setup, sharded_models
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, both, letters_of

_SHARDS: Final = Words(
    "how many bytes of weights, gradients and Adam's states does each GPU hold with FSDP1, whose flat shards are all fp32? "
    "Gathered units and activations do not count.",
    "FSDP1 的扁平分片全部为 fp32。每张 GPU 上权重、梯度和 Adam 状态的分片共占多少字节？不计收集的单元和激活值。",
)
_SENDS: Final = Words(
    "how many bytes does each GPU send in a step with FSDP1? It gathers bf16 flat parameters for forward and again for "
    "backward, and reduce-scatters fp32 gradients, by rings and with one micro-batch a step.",
    "使用 FSDP1，每张 GPU 每步发送多少字节？前向和反向各收集一次 bf16 扁平参数，对 fp32 梯度做 reduce-scatter；环形算法，"
    "每步一个微批次。",
)
_LAYER: Final = Words(
    "how many bytes do a layer's flat bf16 gradient and the fp32 copy that FSDP1 reduces take, if every layer has 1/L of the "
    "parameters?",
    "若每层占参数的 1/L，FSDP1 中一层的扁平 bf16 梯度及其用于规约的 fp32 拷贝共占多少字节？",
)


def _small(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options={"gpus": draw.one_of((4, 8, 16, 32))})


def _shards_and_layer(draw: Draw) -> Two:
    options = {"engine": "fsdp1", "zero": 3, "gpus": draw.one_of((8, 16, 32, 64, 128))}
    numbers = letters_of((SHARDS, LAYER), draw.one_of(LLAMAS), **options)
    return Two(Put(SHARDS, numbers), Put(LAYER, numbers))


KINDS: Final = (
    by_rule(TOPIC, SHARDS, _SHARDS, sharded_models),
    by_rule(TOPIC, SENDS, _SENDS, sharded_models),
    by_rule(TOPIC, LAYER, _LAYER, sharded_models),
    both(
        TOPIC,
        "shards and a layer's gradient",
        Words(
            "how many bytes do FSDP1's fp32 shards (weights, gradients, both moments) and, while it is reduced, one layer's "
            "flat bf16 gradient with its fp32 copy take together on each GPU?",
            "FSDP1 的 fp32 分片（权重、梯度和两个矩），加上规约时一层的扁平 bf16 梯度及其 fp32 拷贝，每张 GPU 共占多少字节？",
        ),
        _shards_and_layer,
    ),
    exactly(TOPIC, SHARDS, _SHARDS, _small),
    exactly(
        TOPIC,
        LAYER,
        Words(
            "how many bytes do the flat bf16 gradient of one layer and the fp32 copy of it that is reduced take?",
            "一层的扁平 bf16 梯度及其用于规约的 fp32 拷贝共占多少字节？",
        ),
        _small,
    ),
)
