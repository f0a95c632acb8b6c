"""FSDP2: bytes of shards and gathered units, bytes sent."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.fsdp import LARGEST, SENDS, SHARDS, TOPIC
from memcalc.explanation.topics.zero import SENDS_THREE
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, Draw, Setup, parameters, sharded_models, sharded_sizes
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Least, Put, Two, fewest, times

_STATES: Final = Words(
    "how many bytes of weights, gradients and Adam's states does each GPU hold with FSDP2, whose shards are all "
    "fp32? Gathered units and activations do not count.",
    "FSDP2 的分片全部为 fp32。每张 GPU 上权重、梯度和 Adam 状态的分片共占多少字节？不计收集的单元和激活值。",
)
_SENT: Final = Words(
    "how many bytes does each GPU send in a step with FSDP2? It gathers bf16 weights for forward and again for "
    "backward, and reduce-scatters fp32 gradients, by rings and with one micro-batch a step.",
    "使用 FSDP2，每张 GPU 每步发送多少字节？前向和反向各收集一次 bf16 权重，对 fp32 梯度做 reduce-scatter；环形算"
    "法，每步一个微批次。",
)


def _fsdp_and_zero(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw), "n": draw.one_of((8, 16, 32, 64))}
    return Two(Put(SENDS, numbers), Put(SENDS_THREE, numbers))


def _shards_that_fit(draw: Draw) -> Least:
    phi = parameters(draw)
    room = draw.one_of((10, 20, 30, 60))
    return Least(SHARDS, "n", (2**power for power in range(16)), {"Φ": phi}, room * 10**9, {"room": room})


def _fsdp(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS), options={"gpus": draw.one_of((4, 8, 16, 32, 64))})


KINDS: Final = (
    by_rule(TOPIC, SHARDS, _STATES, sharded_sizes),
    by_rule(TOPIC, SENDS, _SENT, sharded_models),
    by_rule(
        TOPIC,
        LARGEST,
        Words(
            "FSDP2 has two layers gathered at once, the one that runs and the next one. How many bytes of bf16 "
            "weights are that, if every layer has 1/L of the parameters?",
            "FSDP2 同时收集两层：正在运行的层和下一层。若每层占参数的 1/L，这两层的 bf16 权重共多少字节？",
        ),
        sharded_models,
    ),
    times(
        TOPIC,
        "FSDP2 sends over ZeRO-3",
        Words(
            "how many times as many bytes does a GPU send in a step with FSDP2 (bf16 weights gathered twice, fp32 "
            "gradients reduce-scattered) as with ZeRO stage 3 of the paper (16-bit weights gathered twice, 16-bit "
            "gradients)?",
            "FSDP2（收集两次 bf16 权重，fp32 梯度做 reduce-scatter）每张 GPU 每步的发送量是论文中 ZeRO 第 3 阶段（收"
            "集两次 16 位权重，16 位梯度）的多少倍？",
        ),
        _fsdp_and_zero,
    ),
    fewest(
        TOPIC,
        "fewest GPUs of FSDP2",
        Words(
            "on how many GPUs, at least and as a power of two, do FSDP2's fp32 shards of weights, gradients and "
            "Adam's states take {room} GB (10^9 bytes each) per GPU or less?",
            "至少需要多少张 GPU（取 2 的幂），才能使 FSDP2 每张 GPU 的 fp32 权重、梯度和 Adam 状态分片不超过 {room} GB"
            "（1 GB = 10^9 字节）？",
        ),
        _shards_that_fit,
        "gpus",
    ),
    exactly(TOPIC, SHARDS, _STATES, _fsdp),
    exactly(
        TOPIC,
        SENDS,
        Words(
            "how many bytes does each GPU send in a step, gathering bf16 weights and reducing fp32 gradients? The "
            "root unit (embeddings and output head) stays gathered from forward to backward.",
            "收集 bf16 权重并规约 fp32 梯度，每张 GPU 每步共发送多少字节？根单元（词嵌入和输出层）从前向到反向一直保"
            "持收集状态。",
        ),
        _fsdp,
    ),
)
