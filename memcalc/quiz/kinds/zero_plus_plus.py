"""ZeRO++: bytes moved between nodes, and the states with a second partition."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.zero_plus_plus import ALL, PLAIN, SECOND, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, SMALL_LLAMAS, Draw, Setup, parameters
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Least, Put, Two, fewest, less

_NODES: Final = (16, 32, 64, 128)
"""GPUs of two nodes and more, 8 in each."""
_QUANTIZED: Final = tuple(name for name in LLAMAS if not name.startswith("qwen"))
"""Models without biases or norms so small that a rank's part of them is no multiple of 8, which DeepSpeed cannot quantise."""
_PLAIN: Final = Words(
    "how many bytes move between nodes in forward and backward with plain ZeRO-3, each tensor counted once? Weights and "
    "gradients are 16 bits, and there is one micro-batch a step.",
    "使用普通的 ZeRO-3，前向和反向在节点间共传输多少字节（每个张量计一次）？权重和梯度为 16 位，每步一个微批次。",
)
_ALL: Final = Words(
    "how many bytes move between nodes in forward and backward with all three parts of ZeRO++, each tensor counted once? "
    "Forward gathers int8 codes, backward gathers inside a node, and gradients are int4 codes. Scales do not count.",
    "使用 ZeRO++ 的全部三个部分，前向和反向在节点间共传输多少字节（每个张量计一次）？前向收集 int8 码，反向在节点内收集，"
    "梯度为 int4 码。不计缩放因子。",
)
_SECOND: Final = Words(
    "how many bytes do ZeRO-3's model states and a second partition of the 16-bit weights take on each GPU? The states are "
    "those of Adam with mixed precision (16-bit weights and gradients, fp32 master weights), and a node of 8 GPUs shares the "
    "second partition.",
    "ZeRO-3 的模型状态加上 16 位权重的第二份分片，每张 GPU 共占多少字节？状态为混合精度下的 Adam（16 位权重和梯度，fp32 "
    "主权重），第二份分片由一个节点的 8 张 GPU 共享。",
)


def _of_nodes(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS), options={"gpus": draw.one_of(_NODES)})


def _quantized(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(_QUANTIZED), options={"gpus": draw.one_of((16, 32, 64))})


def _small(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options={"gpus": draw.one_of((16, 32, 64))})


def _plain_and_all(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw)}
    return Two(Put(PLAIN, numbers), Put(ALL, numbers))


def _both_that_fit(draw: Draw) -> Least:
    """Draw a size whose states do not fit one node, and room for its second partition."""
    billions, room = draw.one_of(((20, 10), (20, 20), (30, 20), (30, 40), (65, 40), (70, 40), (70, 60), (175, 80)))
    numbers = {"Φ": billions * 10**9, "z": 8}
    return Least(SECOND, "n", range(8, 4096, 8), numbers, room * 10**9, {"room": room})


KINDS: Final = (
    by_rule(TOPIC, SECOND, _SECOND, _of_nodes),
    by_rule(TOPIC, PLAIN, _PLAIN, _of_nodes),
    by_rule(TOPIC, ALL, _ALL, _quantized),
    less(
        TOPIC,
        "ZeRO-3 less ZeRO++",
        Words(
            "how many bytes fewer move between nodes in a micro-batch with all three parts of ZeRO++ than with ZeRO-3 and "
            "16-bit weights and gradients? Each tensor is counted once, scales are left out.",
            "与使用 16 位权重和梯度的 ZeRO-3 相比，ZeRO++ 的三个部分全部启用时，每个微批次在节点间少传输多少字节？每个张量"
            "计一次，不计缩放因子。",
        ),
        _plain_and_all,
    ),
    fewest(
        TOPIC,
        "fewest GPUs with a second partition",
        Words(
            "on how many GPUs, at least and in whole nodes of 8, do ZeRO-3's states and a second partition of the 16-bit "
            "weights, shared by a node, take {room} GB (10^9 bytes each) per GPU or less? The states are 16 bytes a parameter.",
            "每个节点 8 张 GPU，至少需要多少张 GPU（取整节点），才能使 ZeRO-3 的状态（每参数 16 字节）加上节点内共享的第二份 "
            "16 位权重分片，每张 GPU 不超过 {room} GB（1 GB = 10^9 字节）？",
        ),
        _both_that_fit,
        "gpus",
    ),
    exactly(
        TOPIC,
        SECOND,
        Words(
            "how many bytes do weights, gradients, optimizer states and the second partition take on each GPU when a step "
            "begins? The option is zero_hpz_partition_size 8. For the gradients, take the most that there are in the step.",
            "一步开始时，每张 GPU 上权重、梯度、优化器状态和第二份分片共占多少字节？选项为 zero_hpz_partition_size 8。梯度按"
            "该步中的最大值计。",
        ),
        _small,
    ),
)
