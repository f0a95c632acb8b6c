"""A trillion parameters: GPUs, bytes, bytes for each GPU."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.trillion import GPUS, PER_GPU, TERABYTES, TOPIC
from memcalc.explanation.topics.zero import STAGE_3
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Least, Put, Room, fewest, fits, one

_TRILLION: Final = 10**12
_PER_GPU: Final = Words(
    "how many bytes of weights, gradients and Adam's states does each GPU hold with Megatron in bf16 (fp32 main "
    "gradients, no distributed optimizer), if tensor and pipeline parallelism split all parameters evenly?",
    "使用 Megatron 以 bf16 训练（fp32 主梯度，不用分布式优化器），张量并行与流水线并行均匀切分全部参数，每张 GPU 上"
    "权重、梯度和 Adam 的状态共占多少字节？",
)


def _published(_draw: Draw) -> Setup:
    return Setup()


def _layout(draw: Draw) -> Setup:
    pp = draw.one_of((16, 32, 64))
    gpus = 8 * pp * draw.one_of((2, 4, 6))
    return Setup(options={"gpus": gpus, "tp": 8, "pp": pp})


def _size(draw: Draw) -> Put:
    return Put(TERABYTES, {"Φ": draw.one_of((1, 2, 3, 4)) * _TRILLION // 2})


def _shards(draw: Draw) -> Least:
    room = draw.one_of((40, 80, 96, 192))
    return Least(STAGE_3, "n", range(8, 2048, 8), {"Φ": _TRILLION}, room * 10**9, {"room": room})


def _split(draw: Draw) -> Room:
    t, p = 8, draw.one_of((16, 24, 32, 40, 48, 64))
    room = draw.one_of((32, 40, 80))
    return Room(Put(PER_GPU, {"Φ": _TRILLION, "t": t, "p": p}), room * 10**9, {"room": room})


KINDS: Final = (
    by_rule(
        TOPIC,
        GPUS,
        Words(
            "Megatron-LM's model of a trillion parameters was split by tensor parallelism over the 8 GPUs of a node "
            "and by pipeline parallelism into 64 stages, and had 6 data-parallel replicas. How many GPUs is that?",
            "Megatron-LM 的万亿参数模型用张量并行切到一个节点的 8 张 GPU，用流水线并行切成 64 个阶段，并有 6 个数据"
            "并行副本。共用了多少张 GPU？",
        ),
        _published,
    ),
    one(
        TOPIC,
        TERABYTES,
        Words(
            "how many bytes do weights, gradients and Adam's states take with mixed precision (16-bit weights and "
            "gradients, fp32 master weights), over all GPUs together and each kept once?",
            "混合精度（16 位权重和梯度，fp32 主权重），权重、梯度和 Adam 的状态只存一份，分布在所有 GPU 上，共占多少字节？",
        ),
        _size,
    ),
    by_rule(TOPIC, PER_GPU, _PER_GPU, _layout),
    fewest(
        TOPIC,
        "fewest GPUs for a trillion parameters",
        Words(
            "how many GPUs of {room} GB (10^9 bytes each), at least and in multiples of 8, hold the model states of "
            "a trillion parameters, each kept once and nothing else? Adam, mixed precision (16-bit weights and "
            "gradients, fp32 master weights).",
            "至少需要多少张 {room} GB（1 GB = 10^9 字节）的 GPU（取 8 的倍数），才能放下一万亿参数的模型状态（只存一"
            "份，不放其他内容）？Adam，混合精度（16 位权重和梯度，fp32 主权重）。",
        ),
        _shards,
        "gpus",
    ),
    fits(
        TOPIC,
        "a trillion parameters split",
        Words(
            "do the model states on each GPU fit {room} GB (10^9 bytes each), if nothing else is there? Megatron in "
            "bf16 has 18 bytes a parameter (fp32 main gradients), and tensor and pipeline parallelism split all "
            "parameters evenly.",
            "每张 GPU 上的模型状态能否放进 {room} GB（1 GB = 10^9 字节）？不放其他内容。Megatron 的 bf16 训练每个参"
            "数 18 字节（fp32 主梯度），张量并行与流水线并行均匀切分全部参数。",
        ),
        _split,
    ),
    exactly(
        TOPIC,
        PER_GPU,
        Words(
            "how many bytes of weights, gradients and optimizer states does a GPU of the fullest pipeline stage hold?",
            "最满的流水线阶段中，每张 GPU 上权重、梯度和优化器状态共占多少字节？",
        ),
        _layout,
    ),
)
