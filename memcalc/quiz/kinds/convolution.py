"""Convolutions: parameters, sizes of feature maps, receptive fields."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.convolution import BYTES, FIELD, MAP, PARAMETERS, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, one, times

_LARGE: Final = Words("one convolution with the large kernel", "一个大核卷积")
_SMALL: Final = Words("one convolution 3 × 3", "一个 3 × 3 卷积")


def _parameters(draw: Draw) -> Put:
    numbers = {
        "Q": draw.one_of((1, 3, 5, 7, 11)),
        "I": draw.one_of((3, 16, 64, 128, 256)),
        "O": draw.one_of((16, 64, 96, 128, 512)),
    }
    return Put(PARAMETERS, numbers)


def _map(draw: Draw) -> Put:
    kernel, stride = draw.one_of((3, 5, 7, 11)), draw.one_of((1, 2, 4))
    padding, places = draw.one_of((0, 1, kernel // 2)), draw.one_of((14, 28, 55, 56, 112))
    return Put(MAP, {"W": (places - 1) * stride + kernel - 2 * padding, "Z": padding, "Q": kernel, "S": stride})


def _field(draw: Draw) -> Put:
    return Put(FIELD, {"X": draw.one_of((2, 3, 4, 5, 8)), "Q": draw.one_of((3, 5, 7))})


def _batches(draw: Draw) -> Setup:
    return Setup(options={"micro_batch_size": draw.one_of((8, 16, 32, 64, 128))})


def _kernels(draw: Draw) -> Two:
    channels, kernel = draw.one_of((64, 128, 256, 512)), draw.one_of((5, 7, 9))
    large, small = ({"Q": q, "I": channels, "O": channels} for q in (kernel, 3))
    return Two(Put(PARAMETERS, large, _LARGE), Put(PARAMETERS, small, _SMALL), {"kernel": kernel})


KINDS: Final = (
    one(
        TOPIC,
        PARAMETERS,
        Words("how many parameters has a convolution with biases?", "带偏置的卷积层有多少个参数？"),
        _parameters,
    ),
    one(
        TOPIC,
        MAP,
        Words(
            "how many values has one row of the feature map of a convolution? Image and kernel are square.",
            "卷积的特征图一行有多少个值？图像和卷积核都是正方形。",
        ),
        _map,
    ),
    one(
        TOPIC,
        FIELD,
        Words(
            "how many inputs in a row does one value see behind several equal convolutions of stride 1?",
            "经过几个步长为 1 的相同卷积后，一个值在一行上看到多少个输入？",
        ),
        _field,
    ),
    by_rule(
        TOPIC,
        BYTES,
        Words("how many bytes has the feature map of a convolution in 16 bits?", "16 位下卷积的特征图有多少字节？"),
        _batches,
    ),
    exactly(
        TOPIC,
        BYTES,
        Words(
            "how many bytes do the first convolution and its ReLU leave for backward? The images have 3 × 227 × 227 values; the "
            "convolution has 96 filters of 11 × 11, stride 4, no padding.",
            "第一个卷积层和它的 ReLU 为反向保存多少字节？图像为 3 × 227 × 227；卷积有 96 个 11 × 11 的滤波器，步长 4，无填充。",
        ),
        _batches,
    ),
    times(
        TOPIC,
        "a large kernel over 3 × 3",
        Words(
            "how many times as many parameters has a convolution of {kernel} × {kernel} as one of 3 × 3? Channels in and out "
            "are the same, and both have biases.",
            "输入输出通道相同且都带偏置时，{kernel} × {kernel} 卷积的参数量是 3 × 3 卷积的多少倍？",
        ),
        _kernels,
    ),
)
