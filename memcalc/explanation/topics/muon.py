"""Muon: one momentum for each matrix, and matrices that are not sharded."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step, states
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_SCALABLE: Final = "Liu et al., arXiv 2502.16982"

STATES: Final = Rule(
    title=Words("Muon: 12 bytes per parameter in fp32", "Muon：fp32 下每个参数 12 字节"),
    formula="4·Φ + 4·Φ + 4·Φ",
    unit="bytes",
    counts=Words(
        "weights, gradients and one momentum; Adam keeps two moments, 16 bytes in all.",
        "权重、梯度和一个动量；Adam 保存两个矩，共 16 字节。",
    ),
    leaves_out=Words(
        "that the embedding, the head, norms and biases are no matrices of a layer: these take AdamW, with two moments.",
        "词嵌入、输出头、归一化和偏置不是层内矩阵：它们使用 AdamW，有两个矩。",
    ),
    quoted=Quoted({"Φ": 7e9}, 84e9, 0, f"half of AdamW's moments, {_SCALABLE} (formula)"),
)
SHARED: Final = Rule(
    title=Words("Whole matrices by rank: 8·Φ/n bytes of states", "按 rank 分配整个矩阵：状态 8·Φ/n 字节"),
    formula="8·Φ/n",
    unit="bytes",
    counts=Words(
        "the fp32 main weight and the momentum of the weights that a rank updates, if ranks have equal shares.",
        "每个 rank 所更新权重的 fp32 主权重和动量，假设各 rank 份额相等。",
    ),
    leaves_out=Words(
        "that a weight is not cut: a rank has the whole embedding, with two moments, and another has less.",
        "权重不被切开：某个 rank 持有整个词嵌入及其两个矩，其他 rank 更少。",
    ),
    quoted=Quoted({"Φ": 7e9, "n": 8}, 7e9, 0, "megatron/core/optimizer/layer_wise_optimizer.py (formula)"),
)
_OF_RANK: Final = Words("optimizer states of the rank that has most", "份额最大的 rank 的优化器状态")


def of_busiest_rank(asked: Asked) -> Step:
    """Return the bytes of optimizer states on the rank of dist_muon that has most of them."""
    return exact_step(asked, _OF_RANK, {"optimizer_states": asked.report.total("optimizer_states")})


TOPIC: Final = Topic(
    name="muon",
    title=Words("Muon", "Muon"),
    summary=Words(
        "one momentum for each matrix, and matrices that are not sharded", "每个矩阵一个动量，且矩阵保持完整"
    ),
    text=(
        Words(
            "Muon replaces the momentum of a matrix by the nearest orthogonal matrix before it updates the weight. It needs the "
            "whole matrix for that. So flat shards, as ZeRO's, are not for it: Megatron's dist_muon gives whole weights to "
            "ranks, sorted by size, one to each in turn.",
            "Muon 在更新权重之前，把矩阵的动量换成最接近的正交矩阵，因此需要完整的矩阵。ZeRO 那样的扁平分片不适用："
            "Megatron 的 dist_muon 按大小排序，把整个权重轮流分给各 rank。",
        ),
    ),
    cases=(
        Case(
            STATES,
            states,
            Words(
                "The rest is AdamW's second moment of the embedding, the head and the norms.",
                "多出的部分是词嵌入、输出头和归一化的 AdamW 二阶矩。",
            ),
            {"optimizer": "muon", "precision": "fp32"},
        ),
        Case(
            SHARED,
            of_busiest_rank,
            Words(
                "One rank has the embedding or the head as a whole, with both moments of AdamW.",
                "有一个 rank 持有整个词嵌入或输出头，以及 AdamW 的两个矩。",
            ),
            {"optimizer": "muon", "engine": "megatron", "gpus": 8, "zero": 1},
        ),
    ),
)
