"""Mixed precision: bytes of the copies of a parameter."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.adam import SIXTEEN
from memcalc.explanation.topics.mixed_precision import AUTOCAST, MEGATRON, PURE, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import SMALL_LLAMAS, Draw, Setup, parameters, sizes
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_reports import total_of
from memcalc.quiz.of_rules import Put, Two, less, times

_ENGINES: Final = (
    {"engine": "fsdp2", "gpus": 8},
    {"engine": "fsdp2", "gpus": 16},
    {"engine": "megatron", "gpus": 8, "zero": 1},
    {"engine": "deepspeed", "gpus": 8, "zero": 2},
    {"engine": "deepspeed", "gpus": 8, "zero": 3},
    {"engine": "none", "gpus": 1, "precision": "fp32"},
    {"engine": "none", "gpus": 1, "precision": "bf16-autocast"},
)
_STATES: Final = Words(
    "how many bytes do weights, gradients and AdamW's states take on each GPU? Activations and buffers do not count.",
    "每张 GPU 上权重、梯度和 AdamW 的状态共占多少字节？不计激活值和缓冲区。",
)


def _megatron_and_sixteen(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw)}
    return Two(Put(MEGATRON, numbers), Put(SIXTEEN, numbers))


def _mixed_and_pure(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw)}
    return Two(Put(SIXTEEN, numbers), Put(PURE, numbers))


def _megatron(draw: Draw) -> Setup:
    tp = draw.one_of((1, 2, 4, 8))
    return Setup(
        model=draw.one_of(("llama-7b", "llama-13b", "llama-2-7b", "llama-2-70b")), options={"gpus": tp, "tp": tp}
    )


def _an_engine(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options=draw.one_of(_ENGINES))


def _model(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS))


KINDS: Final = (
    by_rule(
        TOPIC,
        PURE,
        Words(
            "how many bytes do weights, gradients and Adam's states take if all of them are bf16 and there are no "
            "master weights? Activations do not count.",
            "如果权重、梯度和 Adam 的状态全部是 bf16，且没有主权重，它们共占多少字节？不计激活值。",
        ),
        sizes,
    ),
    by_rule(
        TOPIC,
        AUTOCAST,
        Words(
            "how many bytes do weights, gradients and Adam's states take with torch.autocast? The 16-bit copies "
            "that autocast makes, and activations, do not count.",
            "使用 torch.autocast 时，权重、梯度和 Adam 的状态共占多少字节？不计 autocast 生成的 16 位副本和激活值。",
        ),
        sizes,
    ),
    by_rule(
        TOPIC,
        MEGATRON,
        Words(
            "how many bytes do weights, gradients and Adam's states take on one GPU with Megatron in bf16 (fp32 "
            "main gradients, no distributed optimizer)? Activations and buffers do not count.",
            "在单张 GPU 上用 Megatron 以 bf16 训练（fp32 主梯度，不用分布式优化器），权重、梯度和 Adam 的状态共占多"
            "少字节？不计激活值和缓冲区。",
        ),
        sizes,
    ),
    less(
        TOPIC,
        "Megatron over the ZeRO paper",
        Words(
            "by how many bytes do the model states of Megatron in bf16 (fp32 main gradients, one GPU) exceed those "
            "of the ZeRO paper's mixed precision (16-bit gradients)? Both have Adam and fp32 master weights.",
            "Megatron 的 bf16 训练（fp32 主梯度，单卡）的模型状态比 ZeRO 论文的混合精度（16 位梯度）多多少字节？"
            "两者都用 Adam 和 fp32 主权重。",
        ),
        _megatron_and_sixteen,
    ),
    times(
        TOPIC,
        "mixed over pure bf16",
        Words(
            "how many times as many bytes do the model states take with mixed precision (16-bit weights and "
            "gradients, fp32 master weights and moments) as with everything in bf16 and no master weights? The "
            "optimizer is Adam.",
            "混合精度（16 位权重和梯度，fp32 主权重和矩）的模型状态是全部 bf16（无主权重）的多少倍？优化器为 Adam。",
        ),
        _mixed_and_pure,
    ),
    total_of(
        TOPIC,
        "parameters",
        Words(
            "how many bytes of weights does each GPU hold? Master weights that are states of the optimizer, and "
            "weights that are gathered for a moment, do not count.",
            "每张 GPU 上的权重占多少字节？不计属于优化器状态的主权重，也不计临时收集的权重。",
        ),
        _an_engine,
    ),
    exactly(TOPIC, PURE, _STATES, _model),
    exactly(TOPIC, MEGATRON, _STATES, _megatron),
)
