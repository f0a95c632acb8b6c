"""LoRA: thin matrices that train beside a frozen base."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step, states
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_HU: Final = "Hu et al. 2021, arXiv 2106.09685"

PARAMETERS: Final = Rule(
    title=Words("2·h·r parameters for each adapted matrix", "每个被适配的矩阵 2·h·r 个参数"),
    formula="2·M·h·r",
    unit="parameters",
    counts=Words(
        "for each adapted matrix of h × h the two matrices r × h and h × r.",
        "每个 h × h 的被适配矩阵对应 r × h 和 h × r 两个矩阵。",
    ),
    leaves_out=Words(
        "that many matrices are not square: keys and values of fewer heads, and the MLP. A matrix has r·(in + out) then.",
        "很多矩阵不是方阵：头数较少的 K、V，以及 MLP。这时一个矩阵对应 r·(in + out) 个参数。",
    ),
    quoted=Quoted({"M": 192, "h": 12288, "r": 4}, 18_874_368, 0, f"{_HU}, section 7.1 (formula)"),
)
STATES: Final = Rule(
    title=Words("2 bytes for a frozen parameter, 16 for a trained one", "冻结的参数 2 字节，训练的参数 16 字节"),
    formula="2·B + 16·2·M·h·r",
    unit="bytes",
    counts=Words(
        "the base in 16 bits, and the adapters with gradient and Adam's two moments in fp32.",
        "16 位的底座，以及 fp32 的适配器及其梯度和 Adam 的两个矩。",
    ),
    leaves_out=Words(
        "activations. They are most of what is left: the frozen layers still run, and backward goes through them.",
        "激活值。它们是剩余显存的主要部分：冻结的层仍要运行，反向也要经过它们。",
    ),
    quoted=Quoted(
        {"B": 175 * 10**9, "M": 192, "h": 12288, "r": 4}, 350_301_989_888, 0, f"{_HU}, section 4.2 (formula)"
    ),
)
_TRAINED: Final = Words("parameters that train", "参与训练的参数")


def trained(asked: Asked) -> Step:
    """Return the number of parameters that train."""
    return exact_step(asked, _TRAINED, {"adapters": asked.report.model.trainable_parameters}, "parameters")


TOPIC: Final = Topic(
    name="lora",
    title=Words("LoRA (adapters of low rank)", "LoRA（低秩适配器）"),
    summary=Words("train thin matrices beside a frozen base", "在冻结的底座旁训练低秩矩阵"),
    text=(
        Words(
            "Beside a frozen matrix W an adapter adds B·A, of rank r. Only A and B have gradients and optimizer states, so the "
            "states of the model go from 16 bytes per parameter to little more than the 2 bytes of its weights.",
            "在冻结的矩阵 W 旁，适配器加上秩为 r 的 B·A。只有 A 和 B 有梯度和优化器状态，因此模型状态从每个参数 16 字节"
            "降到略多于权重本身的 2 字节。",
        ),
        Words(
            "Activations hardly shrink. peft makes adapters in fp32: over a 16-bit base every adapted layer keeps an fp32 copy "
            "of its input, and with all linear layers adapted that is more than full fine-tuning keeps. `--adapter-dtype bf16` "
            "avoids it; recomputation helps as much as ever. A base in 8 bits (`--quantize int8`) keeps the inputs of its "
            "layers as attributes of their nodes, which no checkpoint frees unless it re-enters; one in 4 bits keeps none.",
            "激活值几乎不减少。peft 默认使用 fp32 适配器：底座为 16 位时，每个被适配的层都要保留一份 fp32 输入；"
            "若适配所有线性层，这比全量微调保留的还多。`--adapter-dtype bf16` 可以避免；重计算的效果则与平时相同。"
            "8 位底座（`--quantize int8`）把各层的输入作为计算图节点的属性保留，非重入的检查点不会释放它们；4 位底座则不保留。",
        ),
    ),
    cases=(
        Case(
            PARAMETERS,
            trained,
            Words(
                "An adapted matrix that is not h × h has r·(in + out) parameters. DoRA adds one for each output.",
                "不是 h × h 的被适配矩阵有 r·(in + out) 个参数。DoRA 为每个输出再加一个参数。",
            ),
        ),
        Case(
            STATES,
            states,
            Words(
                "Another precision has other bytes for a parameter; shards divide the trained ones, and ZeRO-3 and FSDP2 the "
                "frozen ones too.",
                "其他精度下每个参数的字节数不同；分片会均分训练的参数，ZeRO-3 和 FSDP2 还会均分冻结的参数。",
            ),
        ),
    ),
    options={"lora_rank": 8},
)
