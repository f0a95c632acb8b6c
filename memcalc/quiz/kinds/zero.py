"""ZeRO: bytes of a GPU's shard, bytes sent, GPUs that are enough."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.zero import SENDS_THREE, SENDS_TWO, STAGE_1, STAGE_2, STAGE_3, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, Draw, Setup, parameters, sharded_models, sharded_sizes
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Least, Put, Two, fewest, times


def _states(stage: int) -> Words:
    return Words(
        f"how many bytes of weights, gradients and optimizer states does each GPU hold with ZeRO stage {stage}, Adam and "
        "mixed precision (16-bit weights and gradients, fp32 master weights)? Activations and buffers do not count.",
        f"使用 ZeRO 第 {stage} 阶段、Adam 和混合精度（16 位权重和梯度，fp32 主权重），每张 GPU 上权重、梯度和优化器状态"
        "共占多少字节？不计激活值和缓冲区。",
    )


def _sent(stage: int) -> Words:
    return Words(
        f"how many bytes does each GPU send over the data-parallel axis in a step with ZeRO stage {stage}? Weights and "
        "gradients are 16 bits, collectives are rings, and there is one micro-batch a step.",
        f"使用 ZeRO 第 {stage} 阶段，每张 GPU 每步在数据并行轴上发送多少字节？权重和梯度为 16 位，集合通信用环形算法，"
        "每步一个微批次。",
    )


def _three_and_two(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw), "n": draw.one_of((8, 16, 32, 64, 128, 256))}
    return Two(Put(SENDS_THREE, numbers), Put(SENDS_TWO, numbers), {"n": numbers["n"]})


def _two_stages(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw), "n": draw.one_of((8, 16, 32, 64, 128))}
    high, low = draw.one_of(((1, 3), (1, 2), (2, 3)))
    rules = {1: STAGE_1, 2: STAGE_2, 3: STAGE_3}
    return Two(Put(rules[high], numbers), Put(rules[low], numbers), {"first": high, "second": low})


def _shards_that_fit(draw: Draw) -> Least:
    phi = parameters(draw)
    room = draw.one_of([each for each in (24, 40, 80) if 16 * phi > 8 * each * 10**9] or [16])
    return Least(STAGE_3, "n", range(8, 4096, 8), {"Φ": phi}, room * 10**9, {"room": room})


def _deepspeed(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS), options={"gpus": draw.one_of((8, 16, 32, 64))})


KINDS: Final = (
    by_rule(TOPIC, STAGE_1, _states(1), sharded_sizes),
    by_rule(TOPIC, STAGE_2, _states(2), sharded_sizes),
    by_rule(TOPIC, STAGE_3, _states(3), sharded_sizes),
    by_rule(TOPIC, SENDS_TWO, _sent(2), sharded_models),
    by_rule(TOPIC, SENDS_THREE, _sent(3), sharded_models),
    times(
        TOPIC,
        "stage 3 sends over stage 2",
        Words(
            "how many times as many bytes does a GPU send in a step with ZeRO stage 3 as with stage 2, over {n} "
            "GPUs and with one micro-batch a step?",
            "在 {n} 张 GPU 上、每步一个微批次，ZeRO 第 3 阶段每张 GPU 每步的发送量是第 2 阶段的多少倍？",
        ),
        _three_and_two,
    ),
    times(
        TOPIC,
        "states of two stages",
        Words(
            "how many times as many bytes of weights, gradients and optimizer states does a GPU hold with ZeRO "
            "stage {first} as with stage {second}? Adam, mixed precision (16-bit weights and gradients, fp32 master "
            "weights).",
            "ZeRO 第 {first} 阶段每张 GPU 的权重、梯度和优化器状态是第 {second} 阶段的多少倍？Adam，混合精度（16 位"
            "权重和梯度，fp32 主权重）。",
        ),
        _two_stages,
    ),
    fewest(
        TOPIC,
        "fewest GPUs of stage 3",
        Words(
            "on how many GPUs, at least and in multiples of 8, does ZeRO stage 3 bring weights, gradients and "
            "Adam's states down to {room} GB (10^9 bytes each) per GPU or less? Mixed precision: 16-bit weights and "
            "gradients, fp32 master weights.",
            "使用 ZeRO 第 3 阶段，至少需要多少张 GPU（取 8 的倍数），才能使每张 GPU 的权重、梯度和 Adam 状态不超过 "
            "{room} GB（1 GB = 10^9 字节）？混合精度：16 位权重和梯度，fp32 主权重。",
        ),
        _shards_that_fit,
        "gpus",
    ),
    exactly(TOPIC, STAGE_2, _states(2), _deepspeed),
    exactly(TOPIC, STAGE_3, _states(3), _deepspeed),
    exactly(TOPIC, SENDS_TWO, _sent(2), _deepspeed),
    exactly(TOPIC, SENDS_THREE, _sent(3), _deepspeed),
)
