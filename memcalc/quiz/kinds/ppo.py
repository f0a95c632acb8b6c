"""PPO: bytes of its four models."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.grpo import TWO
from memcalc.explanation.topics.ppo import FOUR, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, SMALL_LLAMAS, Draw, Setup, parameters
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, less

_FOUR: Final = Words(
    "how many bytes do the four models of PPO take, all of one size? The policy and the value model train with Adam and "
    "mixed precision (16-bit weights and gradients, fp32 master weights), the reference and the reward model are in 16 bits. "
    "Nothing is sharded, caches and activations do not count.",
    "PPO 的四个模型大小相同，共占多少字节？策略模型和价值模型用 Adam 和混合精度训练（16 位权重和梯度，fp32 主权重），参考"
    "模型和奖励模型为 16 位。不做切分，不计缓存和激活值。",
)


def _models(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS))


def _replicas(draw: Draw) -> Setup:
    options = {"gpus": draw.one_of((1, 2, 8)), "micro_batch_size": draw.one_of((1, 2, 4))}
    return Setup(model=draw.one_of(SMALL_LLAMAS), options=options)


def _four_and_two(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw)}
    return Two(Put(FOUR, numbers), Put(TWO, numbers))


KINDS: Final = (
    by_rule(TOPIC, FOUR, _FOUR, _models),
    less(
        TOPIC,
        "PPO less GRPO",
        Words(
            "how many bytes more do PPO's four models of one size take than GRPO's policy and reference? What trains has 16 "
            "bytes a parameter, what does not has 2.",
            "PPO 的四个同样大小的模型比 GRPO 的策略模型加参考模型多占多少字节？参与训练的每参数 16 字节，其余每参数 2 字节。",
        ),
        _four_and_two,
    ),
    exactly(
        TOPIC,
        FOUR,
        Words(
            "how many bytes do weights, gradients and optimizer states take on each GPU in PPO, those of the reference and of "
            "the reward model included? Caches, activations and buffers do not count.",
            "PPO 中每张 GPU 上的权重、梯度和优化器状态共占多少字节（含参考模型和奖励模型）？不计缓存、激活值和缓冲区。",
        ),
        _replicas,
    ),
)
