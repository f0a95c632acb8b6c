"""Chimera: two pipelines in opposite directions over two copies of the model."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step
from memcalc.explanation.folding import ITEMSIZES
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

TWICE: Final = Rule(
    title=Words("A GPU has the weights of two stages: 2Φ/p", "每张 GPU 有两个阶段的权重：2Φ/p"),
    formula="2·Φ/p",
    unit="parameters",
    counts=Words(
        "stage r of one copy of the model, and stage p-1-r of the other.",
        "一份模型的阶段 r，以及另一份模型的阶段 p-1-r。",
    ),
    leaves_out=Words(
        "that gradients and optimizer states are there twice too, and that gradients have to be summed over both copies.",
        "梯度和优化器状态同样有两份；而且梯度要在两份之间求和。",
    ),
    quoted=Quoted({"p": 4, "Φ": 8e9}, 4e9, 0, "Li and Hoefler 2021, arXiv 2107.06925, table 2 (formula)"),
)
_HELD: Final = Words("parameters on this rank", "该 rank 上的参数")


def parameters_of_a_rank(asked: Asked) -> Step:
    """Return the parameters of a rank's stages."""
    own = [item for item in asked.report.items if item.component == "parameters"]
    elements = sum(item.nbytes // ITEMSIZES[item.dtype] for item in own)
    return exact_step(asked, _HELD, {"parameters": elements * asked.report.setup.shards}, "parameters")


TOPIC: Final = Topic(
    name="chimera",
    title=Words("Chimera: a pipeline each way", "Chimera：双向各一条流水线"),
    summary=Words("half of the bubble for twice the weights", "气泡减半，权重翻倍"),
    text=(
        Words(
            "One pipeline runs from the first rank to the last, a second one back, each with half of the micro-batches. Where "
            "the ranks of one wait, those of the other work: p/2-1 stages wait each way instead of p-1.",
            "一条流水线从第一个 rank 走到最后一个，另一条反向，各处理一半微批次。一条在等待时另一条在工作："
            "每个方向只等待 p/2-1 个阶段，而不是 p-1 个。",
        ),
        Words(
            "Both need all stages, so weights, gradients and optimizer states are there twice, and the two copies of a stage "
            "sum their gradients once a step. From p/2+1 to p micro-batches are in flight, which is more even than 1F1B: its "
            "first rank has p of them, its last one. explain bubble has the formula of the bubble.",
            "两条都需要全部阶段，因此权重、梯度和优化器状态各有两份，同一阶段的两份每步要对梯度求和一次。"
            "同时在途的微批次为 p/2+1 到 p 个，比 1F1B 更均匀：后者第一个 rank 有 p 个，最后一个 rank 只有一个。"
            "气泡的公式见 explain bubble。",
        ),
    ),
    cases=(
        Case(
            TWICE,
            parameters_of_a_rank,
            Words(
                "The first and the last stage also have the embedding and the head, which rank 0 has both of.",
                "首末阶段还有词嵌入和输出层，rank 0 两者都有。",
            ),
        ),
    ),
    options={"gpus": 4, "pp": 4, "engine": "fsdp2", "zero": 2, "schedule": "chimera", "pp_rank": 0},
    micro_batches=8,
)
