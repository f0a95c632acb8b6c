"""Frozen weights and adapters on the parallel axes: what is not sent."""

from __future__ import annotations

from typing import Final

from memcalc.errors import InputError
from memcalc.explanation.exact import elements_between_stages, exact_step
from memcalc.explanation.folding import ITEMSIZES
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words
from memcalc.tuning.lora import UP

FORWARD_ALONE: Final = Rule(
    title=Words("b·s·h elements between stages behind a frozen part", "冻结部分之后的两个阶段之间只传 b·s·h 个元素"),
    formula="b·s·h",
    unit="elements",
    counts=Words(
        "the hidden states over one boundary in forward, if no weight before the boundary trains.",
        "边界之前没有参与训练的权重时，前向跨过一个边界的隐藏状态。",
    ),
    leaves_out=Words(
        "boundaries with a trained weight before them, which also send the gradient back: 2·b·s·h.",
        "之前有参与训练的权重的边界还要把梯度传回去：2·b·s·h。",
    ),
    quoted=Quoted({"b": 1, "s": 2048, "h": 4096}, 8_388_608, 0, "torch/distributed/pipelining/stage.py (formula)"),
)
OF_ADAPTER: Final = Rule(
    title=Words("b·s·r elements are summed for the adapter of a split layer", "切分层的适配器只需对 b·s·r 个元素求和"),
    formula="b·s·r",
    unit="elements",
    counts=Words(
        "the gradient between the two matrices of an adapter beside a column-parallel layer, summed once in a backward.",
        "列并行层的适配器两个矩阵之间的梯度，每次反向求和一次。",
    ),
    leaves_out=Words(
        "what the layer itself sums: the gradient of its input, b·s·h elements, whether its weight trains or not.",
        "层本身的求和：输入的梯度，b·s·h 个元素，与其权重是否训练无关。",
    ),
    quoted=Quoted({"b": 1, "s": 2048, "r": 16}, 32_768, 0, "peft/tuners/lora/model.py (formula)"),
)
_SUMMED: Final = Words("elements that the adapter of a layer sums", "一个层的适配器求和的元素数")


def summed_for_an_adapter(asked: Asked) -> Step:
    """Return the elements of one sum for an adapter of a split layer."""
    sums = [c for c in asked.report.collectives if c.axis == "tp" and c.name.endswith(UP)]
    if not sums:
        raise InputError("--tp 1: nothing is summed for adapters; allowed: 2 or more, with --lora-rank 1 or more")
    one = sums[0]
    return exact_step(asked, _SUMMED, {one.phase: one.payload // one.calls // ITEMSIZES[one.dtype]}, "elements")


TOPIC: Final = Topic(
    name="frozen-axes",
    title=Words("Frozen weights and adapters on the parallel axes", "并行方式下的冻结权重与适配器"),
    summary=Words(
        "a frozen stage sends no gradient; an adapter sums bsr instead of bsh",
        "冻结的阶段不回传梯度；适配器求和 bsr 而非 bsh",
    ),
    text=(
        Words(
            "A backward ends where nothing before needs a gradient. In a pipeline, stages with only frozen weights before and "
            "in them keep no activations, run no backward and get no gradient: torch's stages agree on that in their first "
            "step. LoRA trains in all layers, so its stages send as much as those of full fine-tuning.",
            "反向在之前没有任何东西需要梯度的地方结束。在流水线中，若某阶段及其之前只有冻结的权重，它不保留激活值、"
            "不运行反向、也不接收梯度：torch 的各阶段在第一步就此达成一致。"
            "LoRA 在所有层训练，因此其阶段间的传输与全量微调相同。",
        ),
        Words(
            "Ranks that share layers sum activations and their gradients, not gradients of weights. So freezing weights saves "
            "none of these sums, as long as something before them trains. An adapter beside a column-parallel layer is split "
            "as the layer is, and its own sum has only its rank as width.",
            "共享同一层的 rank 求和的是激活值及其梯度，而不是权重的梯度。因此只要之前还有参与训练的权重，冻结并不减少这些求和。"
            "列并行层旁的适配器与该层一样切分，它自己的求和宽度只有秩 r。",
        ),
    ),
    cases=(
        Case(
            FORWARD_ALONE,
            elements_between_stages,
            Words(
                "It is the mean of all boundaries. Those behind the first trained weight send the gradient back too.",
                "这是所有边界的平均值。第一个参与训练的权重之后的边界还要回传梯度。",
            ),
            {"freeze": "all-but:head"},
        ),
        Case(
            OF_ADAPTER,
            summed_for_an_adapter,
            Words("The sum is of whole sequences on every rank.", "每个 rank 都对完整序列求和。"),
            {"lora_rank": 16},
        ),
    ),
    options={"gpus": 4, "pp": 2, "tp": 2, "engine": "fsdp2", "zero": 2, "precision": "bf16-mixed"},
    micro_batches=8,
)
