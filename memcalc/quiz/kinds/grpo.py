"""GRPO: bytes of the models that are resident, and of a rollout's cache."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.grpo import CACHE, TOPIC, TWO
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import GROUPED, LLAMAS, SMALL_LLAMAS, Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, both, letters_of

_TWO: Final = Words(
    "how many bytes do a policy and its reference take in GRPO? The policy trains with Adam and mixed precision (16-bit "
    "weights and gradients, fp32 master weights), the reference is in 16 bits. Nothing is sharded, caches and activations do "
    "not count.",
    "GRPO 中策略模型和参考模型共占多少字节？策略模型用 Adam 和混合精度训练（16 位权重和梯度，fp32 主权重），参考模型为 16 "
    "位。不做切分，不计缓存和激活值。",
)
_CACHE: Final = Words(
    "how many bytes does the 16-bit cache of keys and values take at the end of a rollout? The tokens of a sequence are those "
    "of prompt and completion.",
    "生成结束时，16 位的 KV 缓存占多少字节？序列长度包括提示和回答。",
)


def _models(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS))


def _rollouts(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(GROUPED), options=_batch(draw))


def _batch(draw: Draw) -> dict[str, int]:
    return {"micro_batch_size": draw.one_of((8, 16, 32)), "seq_len": draw.one_of((1024, 2048, 4096))}


def _sharded(draw: Draw) -> Setup:
    options = {"gpus": draw.one_of((4, 8, 16)), "engine": "deepspeed", "zero": draw.one_of((1, 2))}
    return Setup(model=draw.one_of(SMALL_LLAMAS), options=options)


def _states_and_cache(draw: Draw) -> Two:
    numbers = letters_of((TWO, CACHE), draw.one_of(GROUPED), **_batch(draw))
    return Two(Put(TWO, numbers), Put(CACHE, numbers))


KINDS: Final = (
    by_rule(TOPIC, TWO, _TWO, _models),
    by_rule(TOPIC, CACHE, _CACHE, _rollouts),
    both(
        TOPIC,
        "models and cache",
        Words(
            "how many bytes do GRPO's policy (16 bytes a parameter), its reference in 16 bits, and the 16-bit cache at the "
            "end of a rollout take together, on one GPU?",
            "GRPO 的策略模型（每参数 16 字节）、16 位参考模型和生成结束时的 16 位 KV 缓存，在单张 GPU 上共占多少字节？",
        ),
        _states_and_cache,
    ),
    exactly(
        TOPIC,
        TWO,
        Words(
            "how many bytes do weights, gradients and optimizer states take on each GPU in GRPO, the reference model "
            "(beta 0.04) included? Caches, activations and buffers do not count.",
            "GRPO 中每张 GPU 上的权重、梯度和优化器状态共占多少字节（含参考模型，beta 为 0.04）？不计缓存、激活值和缓冲区。",
        ),
        _sharded,
    ),
)
