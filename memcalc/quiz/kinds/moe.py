"""Mixtures of experts: memory of all, FLOPs of some, elements sent."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.mfu import SIX
from memcalc.explanation.topics.moe import ACTIVE, ALL_TO_ALL, RESIDENT, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import EXPERTS, Draw, Setup, batch_of
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_reports import total_of
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_SPLIT: Final = ("mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b")
"""Models whose number of experts 2, 4 and 8 GPUs divide."""
_MIXTRALS: Final = ("mixtral-8x7b", "mixtral-8x22b")
_STATES: Final = Words(
    "how many bytes do weights, gradients and Adam's states of a mixture of experts take on one GPU with mixed "
    "precision (16-bit weights and gradients, fp32 master weights)? Activations and buffers do not count.",
    "混合专家模型在单张 GPU 上以混合精度（16 位权重和梯度，fp32 主权重）训练，权重、梯度和 Adam 的状态共占多少字节？"
    "不计激活值和缓冲区。",
)
_FLOPS: Final = Words(
    "how many FLOP do the matrix products of one step take on one GPU, forward and backward? A multiplication and "
    "an addition are 2 FLOP, and the attention scores do not count.",
    "单张 GPU 上一步的矩阵乘法（前向加反向）需要多少 FLOP？一次乘法加一次加法计 2 FLOP，不计注意力分数。",
)
_SENT: Final = Words(
    "how many elements of hidden states does a GPU send over the expert-parallel axis for one layer and one "
    "micro-batch, forward and backward? Routing is uniform, and a token's rows for experts on its own GPU are not "
    "sent.",
    "每张 GPU 每层每个微批次（前向加反向）在专家并行轴上发送多少个隐藏状态的元素？路由均匀，发往本 GPU 专家的行不计。",
)


def _one_gpu(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(EXPERTS), options=batch_of(draw))


def _experts(draw: Draw) -> Setup:
    ep = draw.one_of((2, 4, 8))
    return Setup(model=draw.one_of(_SPLIT), options={"gpus": ep, "ep": ep, **batch_of(draw)})


def _megatron_experts(draw: Draw) -> Setup:
    ep = draw.one_of((2, 4, 8))
    return Setup(model=draw.one_of(_MIXTRALS), options={"gpus": ep, "ep": ep, "engine": "megatron"})


def _dense_and_sparse(draw: Draw) -> Two:
    numbers = letters_of((SIX, ACTIVE), draw.one_of(EXPERTS), **batch_of(draw))
    return Two(Put(SIX, numbers), Put(ACTIVE, numbers))


KINDS: Final = (
    by_rule(TOPIC, RESIDENT, _STATES, _one_gpu),
    by_rule(TOPIC, ACTIVE, _FLOPS, _one_gpu),
    by_rule(TOPIC, ALL_TO_ALL, _SENT, _experts),
    times(
        TOPIC,
        "a dense model over a mixture",
        Words(
            "how many times as many FLOP does a step of a dense model take as that of a mixture of experts with the "
            "same number of parameters? The attention scores do not count.",
            "参数量相同时，稠密模型一步的 FLOP 是混合专家模型的多少倍？不计注意力分数。",
        ),
        _dense_and_sparse,
    ),
    total_of(
        TOPIC,
        "parameters",
        Words(
            "how many bytes of weights does each GPU hold in 16 bits? Experts are split over the expert-parallel "
            "GPUs, and every GPU has all other weights. Attention has no biases.",
            "每张 GPU 上的 16 位权重占多少字节？专家分布在专家并行的各 GPU 上，其他权重每张 GPU 都有完整一份。注意力"
            "没有偏置。",
        ),
        _megatron_experts,
    ),
    exactly(
        TOPIC,
        ACTIVE,
        Words(
            "how many FLOP do all matrix products of one step take, forward and backward, attention included?",
            "一步的所有矩阵乘法（前向加反向，含注意力）需要多少 FLOP？",
        ),
        _one_gpu,
    ),
    exactly(
        TOPIC,
        ALL_TO_ALL,
        Words(
            "how many elements does a GPU send over the expert-parallel axis for one layer and one micro-batch, "
            "forward and backward? Routing is uniform.",
            "每张 GPU 每层每个微批次（前向加反向）在专家并行轴上发送多少个元素？路由均匀。",
        ),
        _experts,
    ),
)
