"""Offload: bytes of a node's host memory."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.offload import ALL, FILES, TOPIC, WEIGHTS
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, SMALL_LLAMAS, Draw, Setup, parameters
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, less

_ALL: Final = Words(
    "how much host memory, in bytes, does DeepSpeed's estimator ask for one node if ZeRO-3 offloads weights and Adam's "
    "states? There are 16-bit and fp32 weights, fp32 gradients and moments, and a factor of 1.5 for buffers.",
    "ZeRO-3 把权重和 Adam 的状态都卸载时，DeepSpeed 的估算器认为单节点需要多少字节主机内存？计 16 位和 fp32 权重、fp32 "
    "梯度和动量，再乘以 1.5 作为缓冲区余量。",
)
_WEIGHTS: Final = Words(
    "how many bytes of one node's host memory do the 16-bit weights take if ZeRO-3 offloads them alone?",
    "ZeRO-3 只卸载 16 位权重时，它们占单个节点多少字节的主机内存？",
)
_FILES: Final = Words(
    "how many bytes does ZeRO-Infinity keep on NVMe for one node if Adam's states are there? There are weights, gradients and "
    "two moments, all in fp32.",
    "Adam 的状态放在 NVMe 上时，ZeRO-Infinity 为一个节点存多少字节？计 fp32 的权重、梯度和两个动量。",
)


def _one_node(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS), options={"gpus": draw.one_of((2, 4, 8))})


def _small(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options={"gpus": draw.one_of((2, 4, 8))})


def _all_and_weights(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw), "g": 8, "N": 8}
    return Two(Put(ALL, numbers), Put(WEIGHTS, numbers))


KINDS: Final = (
    by_rule(TOPIC, ALL, _ALL, _one_node),
    by_rule(TOPIC, WEIGHTS, _WEIGHTS, _one_node),
    by_rule(TOPIC, FILES, _FILES, _one_node),
    less(
        TOPIC,
        "all less the weights",
        Words(
            "how many bytes more of one node's host memory does ZeRO-3 need if it offloads Adam's states, too, and not the "
            "16-bit weights alone? All of it has 18 bytes a parameter with a factor of 1.5 for buffers, weights alone have no "
            "such factor.",
            "与只卸载 16 位权重相比，ZeRO-3 连同 Adam 的状态一起卸载时，单节点多需要多少字节主机内存？全部卸载按每参数 18 "
            "字节再乘以 1.5 的缓冲区余量计，只卸载权重时不乘余量。",
        ),
        _all_and_weights,
    ),
    exactly(
        TOPIC,
        WEIGHTS,
        Words(
            "how many bytes of the node's host memory do the weights take if they alone are offloaded? Each rank pins one "
            "block for its part.",
            "只卸载权重时，它们占该节点多少字节的主机内存？每个 rank 为自己的分片锁定一个内存块。",
        ),
        _small,
    ),
)
