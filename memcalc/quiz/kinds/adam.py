"""Adam: bytes of its states, by the rule, on a GPU, and with each engine."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.adam import FP32, SIXTEEN, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, Draw, Setup, gigabytes, parameters, sizes
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_reports import total_of
from memcalc.quiz.of_rules import Put, Room, fits

_ENGINES: Final = (
    {"engine": "megatron", "gpus": 1},
    {"engine": "megatron", "gpus": 8, "zero": 1},
    {"engine": "megatron", "gpus": 64, "zero": 1},
    {"engine": "fsdp2", "gpus": 8},
    {"engine": "fsdp2", "gpus": 32},
    {"engine": "deepspeed", "gpus": 16, "zero": 1},
    {"engine": "deepspeed", "gpus": 8, "zero": 2},
)


def _in_an_engine(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS), options=draw.one_of(_ENGINES))


def _on_a_gpu(draw: Draw) -> Room:
    numbers = {"Φ": parameters(draw)}
    room = gigabytes(draw, int(SIXTEEN.value(numbers)))
    return Room(Put(SIXTEEN, numbers), room * 10**9, {"room": room})


KINDS: Final = (
    total_of(
        TOPIC,
        "optimizer_states",
        Words(
            "how many bytes of optimizer states, fp32 master weights included if there are any, does each GPU hold?",
            "每张 GPU 上的优化器状态占多少字节？如果有 fp32 主权重，也计入其中。",
        ),
        _in_an_engine,
    ),
    by_rule(
        TOPIC,
        SIXTEEN,
        Words(
            "how many bytes do weights, gradients and optimizer states take with Adam and mixed precision (16-bit "
            "weights and gradients, fp32 master weights)? Activations and buffers do not count.",
            "使用 Adam 和混合精度（16 位权重和梯度，fp32 主权重），权重、梯度和优化器状态共占多少字节？不计激活值和"
            "缓冲区。",
        ),
        sizes,
    ),
    by_rule(
        TOPIC,
        FP32,
        Words(
            "how many bytes do weights, gradients and optimizer states take with Adam, all of them in fp32? "
            "Activations and buffers do not count.",
            "使用 Adam，全部采用 fp32，权重、梯度和优化器状态共占多少字节？不计激活值和缓冲区。",
        ),
        sizes,
    ),
    fits(
        TOPIC,
        "fits a GPU",
        Words(
            "do weights, gradients and Adam's states fit one GPU of {room} GB (10^9 bytes each)? Precision is "
            "mixed: 16-bit weights and gradients, fp32 master weights. Nothing else is on the GPU.",
            "权重、梯度和 Adam 的状态能否放进一张 {room} GB（1 GB = 10^9 字节）的 GPU？混合精度：16 位权重和梯度，"
            "fp32 主权重。GPU 上没有其他内容。",
        ),
        _on_a_gpu,
    ),
    exactly(
        TOPIC,
        SIXTEEN,
        Words(
            "how many bytes do weights, gradients and optimizer states take on each GPU? Activations and buffers do "
            "not count.",
            "每张 GPU 上权重、梯度和优化器状态共占多少字节？不计激活值和缓冲区。",
        ),
        _in_an_engine,
    ),
)
