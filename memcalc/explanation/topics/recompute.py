"""Recomputation: activations for FLOPs."""

from __future__ import annotations

from typing import Final

from memcalc.errors import InputError
from memcalc.explanation.exact import layers_saved, ratio_step, saved_in_layers
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.topics.activations import TABLE_2
from memcalc.explanation.words import Words

FULL: Final = Rule(
    title=Words("Full recomputation keeps 2·s·b·h per layer", "完全重计算：每层只保留 2·s·b·h"),
    formula="2·s·b·h·L",
    unit="bytes",
    counts=Words("the 16-bit input of every layer.", "每层的 16 位输入。"),
    leaves_out=Words(
        "what the one layer that runs again saves, which is there in backward; embeddings, head and loss.",
        "反向时正在重算的那一层保存的全部激活值；词嵌入、输出层和损失。",
    ),
    quoted=Quoted({"s": 2048, "b": 4, "h": 6144, "L": 48}, 4_831_838_208, 0, TABLE_2),
)
FOUR_THIRDS: Final = Rule(
    title=Words("It costs a third more FLOPs", "代价：运算量增加三分之一"),
    formula="(2 + 4 + 2)/(2 + 4)",
    unit="ratio",
    counts=Words(
        "a forward is 2 FLOP per parameter and token, backward 4, and the second forward 2 more.",
        "每个参数每个 token，前向 2 FLOP，反向 4，重算的前向再加 2。",
    ),
    leaves_out=Words(
        "what is not run again: the output head, and the last products of a layer, where non-reentrant checkpoints stop early.",
        "不需要重算的部分：输出层，以及非重入检查点提前停止时每层末尾的乘法。",
    ),
    quoted=Quoted({}, 4 / 3, 0, "Narayanan et al. 2021, arXiv 2104.04473, appendix (formula)"),
)
SAVING: Final = Rule(
    title=Words("Activations shrink to a seventeenth, or less", "激活值降到约十七分之一，甚至更少"),
    formula="2/(34 + 5·a·s/h)",
    unit="ratio",
    counts=Words(
        "2sbh that are kept over sbh(34 + 5as/h) that were saved.", "保留的 2sbh 与原来的 sbh(34 + 5as/h) 之比。"
    ),
    leaves_out=Words(
        "that a fused attention kernel had no 5as/h to begin with.", "融合注意力核本来就没有 5as/h 这一项。"
    ),
    quoted=Quoted({"a": 96, "s": 2048, "h": 12288}, 0.01754386, 1e-8, TABLE_2),
)
_FLOPS: Final = Words("FLOPs of the step with recomputation over those without", "有重计算与无重计算的运算量之比")
_KEPT: Final = Words("saved by the layers with recomputation over without", "有重计算与无重计算时各层保存量之比")


def flops(asked: Asked) -> Step:
    """Return the ratio of a step's FLOPs to those without recomputation."""
    found = asked.report.flops
    if not found["total"]:
        raise InputError("--params: a bare number of parameters has no products of matrices; allowed: --model")
    return ratio_step(asked, _FLOPS, "total/(forward + backward)", found["total"], found["forward"] + found["backward"])


def saved_share(asked: Asked) -> Step:
    """Return the ratio of the bytes that the layers save to those without recomputation."""
    whole = layers_saved(asked.again(recompute="none", reentrant_checkpoints=None))
    return ratio_step(asked, _KEPT, "full/none", layers_saved(asked.report), whole)


TOPIC: Final = Topic(
    name="recompute",
    title=Words("Recomputation (activation checkpointing)", "重计算（激活检查点）"),
    summary=Words("keep a layer's input, compute the rest again", "只保留每层输入，其余重新计算"),
    text=(
        Words(
            "Full recomputation keeps the input of each layer and runs its forward again in backward. Selective recomputation "
            "(Megatron) runs the attention core alone again, which is most of what is quadratic in s and few of the FLOPs.",
            "完全重计算只保留每层的输入，在反向中重新运行其前向。选择性重计算 (Megatron) 只重算注意力核心："
            "它占了与 s 平方成正比的大部分显存，却只占很少的运算量。",
        ),
        Words(
            "torchtitan's per-op policy (--recompute op) keeps the outputs of every second matrix product instead.",
            "torchtitan 的逐算子策略 (--recompute op) 则保留每隔一个矩阵乘法的输出。",
        ),
        Words(
            "A reentrant checkpoint (--reentrant-checkpoints, torch's use_reentrant=True) gives each layer a graph of its own "
            "in backward. It runs the layer to its end, so the peak in a layer has the layer's output, 2·s·b·h bytes, besides. "
            "Masks and positions stay as long as the loss. If nothing that a layer is given wants a gradient, its weights get "
            "none.",
            "重入检查点 (--reentrant-checkpoints，即 torch 的 use_reentrant=True) 在反向中为每一层单独建图，并把该层算到底，"
            "因此层内峰值多出该层的输出 2·s·b·h 字节。掩码和位置与损失同时释放。"
            "若该层的输入都不需要梯度，其权重就得不到梯度。",
        ),
    ),
    cases=(
        Case(
            FULL,
            saved_in_layers,
            Words(
                "The first layer's input is the embedding's output, which is a row outside the layers; in fp32 an element "
                "has 4 bytes.",
                "第一层的输入是词嵌入的输出，不计在各层之内；fp32 时每个元素 4 字节。",
            ),
            {"recompute": "full"},
        ),
        Case(
            FOUR_THIRDS,
            flops,
            Words(
                "The output head and the last products of a layer are not run again, and attention's products are not in 2 "
                "FLOP per parameter.",
                "输出层和每层末尾的乘法不会重算；注意力的乘法也不在每参数 2 FLOP 之内。",
            ),
            {"recompute": "full"},
        ),
        Case(
            SAVING,
            saved_share,
            Words(
                "With a fused attention kernel the layers saved less to begin with, and op-by-op code saves more than the "
                "rule.",
                "使用融合注意力核时原本保存的就更少；而逐算子实现比公式保存得更多。",
            ),
            {"recompute": "full"},
        ),
    ),
)
