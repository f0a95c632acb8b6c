"""Tensor parallelism: a layer's weights in t parts, its activations all-reduced."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import elements_of_a_layer, saved_in_layers, weights_of_a_layer
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.topics.activations import TABLE_2
from memcalc.explanation.words import Words

_NARAYANAN: Final = "Narayanan et al. 2021, arXiv 2104.04473, section 3.2 (formula)"
_SHOEYBI: Final = "Shoeybi et al., Megatron-LM, arXiv 1909.08053, figure 4 (formula)"

ALL_REDUCES: Final = Rule(
    title=Words("8·b·s·h elements per layer and micro-batch", "每层每个微批次 8·b·s·h 个元素"),
    formula="8·b·s·h",
    unit="elements",
    counts=Words(
        "four all-reduces of b·s·h: two in forward, two in backward, each counted twice as reduce-scatter and all-gather.",
        "四次 b·s·h 的 all-reduce：前向两次，反向两次；每次按 reduce-scatter 加 all-gather 计两倍。",
    ),
    leaves_out=Words(
        "the factor (t-1)/t of a ring, the embedding, the logits and the loss.",
        "环形算法的系数 (t-1)/t、词嵌入、logits 和损失。",
    ),
    quoted=Quoted({"b": 1, "s": 2048, "h": 4096}, 67_108_864, 0, _NARAYANAN),
)
DTENSOR: Final = Rule(
    title=Words("The same with transformers' tp_plan and FSDP2", "同样的切分，用 transformers 的 tp_plan 与 FSDP2"),
    formula="8·b·s·h",
    unit="elements",
    counts=Words("four all-reduces, as above.", "同上，四次 all-reduce。"),
    leaves_out=Words(
        "that column-parallel layers beside each other each reduce the gradient of their common input.",
        "并列的列并行层会各自规约同一输入的梯度。",
    ),
    quoted=Quoted({"b": 1, "s": 2048, "h": 4096}, 67_108_864, 0, _SHOEYBI),
)
WEIGHTS: Final = Rule(
    title=Words("To compare with: 16·h² parameters per layer", "与之比较的权重：每层 16·h² 个参数"),
    formula="16·h²",
    unit="parameters",
    counts=Words(
        "attention's four matrices (4h²) and a gated MLP of width 4h (12h²). Data parallelism reduces as many gradients a "
        "step.",
        "注意力的四个矩阵 (4h²) 和宽度 4h 的门控 MLP (12h²)。数据并行每步要规约同样多的梯度。",
    ),
    leaves_out=Words(
        "that a GPT layer has 12h², grouped key-value heads fewer, and that a ring sends twice the gradients. 8bsh has that "
        "factor of two in it, 16h² has not.",
        "GPT 层是 12h²，分组 KV 头更少；环形 all-reduce 会发送两倍梯度。8bsh 已含这个两倍，16h² 没有。",
    ),
    quoted=Quoted({"h": 4096}, 268_435_456, 0, "4·h² + 3·h·4h (formula)"),
)
SAVED: Final = Rule(
    title=Words("Activations: s·b·h·(10 + 24/t) per layer", "激活值：每层 s·b·h·(10 + 24/t)"),
    formula="s·b·h·(10 + 24/t)·L",
    unit="bytes",
    counts=Words(
        "what is split by heads and MLP columns (24) over t; inputs of norms, of attention and MLP, and dropout masks (10) "
        "whole.",
        "按头和 MLP 列切分的部分 (24) 除以 t；归一化、注意力和 MLP 的输入以及 dropout 掩码 (10) 保持完整。",
    ),
    leaves_out=Words(
        "scores (5as/(ht) without a fused kernel), statistics, a gated MLP.",
        "注意力分数（无融合核时为 5as/(ht)）、统计量、门控 MLP。",
    ),
    quoted=Quoted({"s": 2048, "b": 4, "h": 6144, "L": 48, "t": 8}, 31_406_948_352, 0, TABLE_2),
)
_ENGINE: Final = {"engine": "megatron", "sequence_parallel": False}

TOPIC: Final = Topic(
    name="tensor-parallel",
    title=Words("Tensor parallelism", "张量并行"),
    summary=Words("a layer's matrices in t parts: 8bsh per layer", "把每层的矩阵切成 t 份：每层通信 8bsh"),
    text=(
        Words(
            "The first matrix of a pair is cut by columns, the second by rows: attention by heads, the MLP by its width. Each "
            "pair ends in one all-reduce of b·s·h in forward, and begins with one in backward. This is on the critical path "
            "of every layer, so tensor parallelism stays within a node.",
            "一对矩阵中第一个按列切，第二个按行切：注意力按头切，MLP 按宽度切。每对在前向末尾有一次 b·s·h 的 all-reduce，"
            "反向开头也有一次。它位于每层的关键路径上，所以张量并行通常限制在节点内。",
        ),
    ),
    cases=(
        Case(
            ALL_REDUCES,
            elements_of_a_layer("tp"),
            Words("A ring of t GPUs sends (t-1)/t of it.", "t 张 GPU 的环只发送其中的 (t-1)/t。"),
            _ENGINE,
        ),
        Case(
            DTENSOR,
            elements_of_a_layer("tp"),
            Words(
                "q, k and v, and gate and up of a gated MLP, each reduce the gradient of their input: five all-reduces in "
                "backward where Megatron's fused matrices have two. A ring sends (t-1)/t of each.",
                "q、k、v 以及门控 MLP 的 gate、up 各自规约输入梯度：反向有五次 all-reduce，而 Megatron 合并矩阵后只有两次。"
                "环形算法发送其中的 (t-1)/t。",
            ),
            {"engine": "fsdp2", "zero": 3, "sequence_parallel": False},
        ),
        Case(
            WEIGHTS,
            weights_of_a_layer,
            Words(
                "Llama's gated MLP is about 8/3·h wide, which makes 12h² of it again; the norms count too, and grouped "
                "key-value "
                "heads have smaller matrices.",
                "Llama 的门控 MLP 宽度约为 8/3·h，结果又回到 12h²；归一化也有参数；分组 KV 头的矩阵更小。",
            ),
            _ENGINE,
        ),
        Case(
            SAVED,
            saved_in_layers,
            Words(
                "The rule is of GPT: a gated MLP saves one tensor more of its width, and without dropout there are no masks.",
                "该公式针对 GPT：门控 MLP 多保存一个其宽度的张量；没有 dropout 就没有掩码。",
            ),
            _ENGINE,
        ),
    ),
    options={"gpus": 8, "tp": 8},
)
