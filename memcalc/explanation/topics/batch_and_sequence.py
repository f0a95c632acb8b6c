"""Batch and sequence: the memory that doubles with them."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import layers_saved, ratio_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.topics.activations import EQUATION_1
from memcalc.explanation.words import Words

BATCH: Final = Rule(
    title=Words("Twice the batch, twice the activations", "批次加倍，激活值加倍"),
    formula="2·b·s·h/(b·s·h)",
    unit="ratio",
    counts=Words("activations: every one has a dim of the batch.", "激活值：每个都有批次这一维。"),
    leaves_out=Words(
        "weights, gradients and optimizer states, which stay as they are: the step's memory grows by less than two times.",
        "权重、梯度和优化器状态不变：整步的显存增长不到两倍。",
    ),
    quoted=Quoted({"b": 4, "s": 2048, "h": 6144}, 2, 0, EQUATION_1),
)
SEQUENCE: Final = Rule(
    title=Words("Twice the sequence, with scores in memory: up to four times", "序列加倍且保存注意力分数：最多四倍"),
    formula="2·(34 + 2·5·a·s/h)/(34 + 5·a·s/h)",
    unit="ratio",
    counts=Words(
        "the part that is linear in s (34) twice, the scores (5as/h) four times.",
        "与 s 成正比的部分 (34) 变为两倍，注意力分数部分 (5as/h) 变为四倍。",
    ),
    leaves_out=Words("model states, logits and loss.", "模型状态、logits 和损失。"),
    quoted=Quoted({"a": 96, "s": 2048, "h": 12288}, 3.403508772, 1e-9, EQUATION_1),
)
FLASH: Final = Rule(
    title=Words(
        "Twice the sequence with a fused attention kernel: twice the activations",
        "使用融合注意力核时序列加倍：激活值加倍",
    ),
    formula="2·b·s·h/(b·s·h)",
    unit="ratio",
    counts=Words("no tensor of the layer has two dims of s.", "层内没有任何张量同时含两个 s 维。"),
    leaves_out=Words("time: attention's FLOPs still grow four times.", "时间：注意力的运算量仍然变为四倍。"),
    quoted=Quoted(
        {"b": 4, "s": 2048, "h": 6144},
        2,
        0,
        "memory linear in s, Dao et al., FlashAttention, arXiv 2205.14135 (formula)",
    ),
)
_RATIO: Final = Words("saved by the layers, doubled over not", "加倍前后各层保存量之比")


def twice_the_batch(asked: Asked) -> Step:
    """Return the ratio of the bytes that layers save with twice the micro-batch to those with the given one."""
    report = asked.report
    batch = report.setup.micro_batch_size
    return _ratio(asked, {"micro_batch_size": 2 * batch, "global_batch_size": 2 * report.setup.global_batch_size})


def twice_the_sequence(asked: Asked) -> Step:
    """Return the ratio of the bytes that layers save with twice the sequence to those with the given one."""
    return _ratio(asked, {"seq_len": 2 * (asked.report.setup.seq_len or 0)})


def _ratio(asked: Asked, changes: dict[str, int]) -> Step:
    after = layers_saved(asked.again(**changes))
    return ratio_step(asked, _RATIO, "doubled/given", after, layers_saved(asked.report))


_TABLES: Final = Words(
    "Tables of positions and masks that all sequences share do not grow with the batch; op-by-op attention saves masks of s².",
    "所有序列共用的位置表和掩码不随批次增长；逐算子的注意力会保存 s² 大小的掩码。",
)

TOPIC: Final = Topic(
    name="batch-and-sequence",
    title=Words("Batch and sequence", "批次大小与序列长度"),
    summary=Words("what doubles when batch or sequence doubles", "批次或序列加倍时，哪些显存加倍"),
    text=(
        Words(
            "Model states depend on neither. Activations are linear in the batch. In the sequence they are linear with a "
            "fused attention kernel, and have a quadratic part where the scores are written to memory. The logits, b·s·V, "
            "are linear in both, and for a large vocabulary they can exceed a layer's activations many times.",
            "模型状态与两者无关。激活值与批次成正比。对于序列长度，使用融合注意力核时成正比；把注意力分数写入显存时还有平方项。"
            "logits 的大小 b·s·V 与两者都成正比，词表很大时可能是一层激活值的许多倍。",
        ),
        Words(
            "Gradient accumulation makes a batch larger without its activations: one micro-batch is alive at a time.",
            "梯度累积可以增大批次而不增加激活值：同一时刻只有一个微批次存活。",
        ),
    ),
    cases=(
        Case(BATCH, twice_the_batch, _TABLES),
        Case(SEQUENCE, twice_the_sequence, _TABLES, {"attention": "eager", "seq_len": 1024}),
        Case(FLASH, twice_the_sequence, _TABLES, {"attention": "sdpa", "seq_len": 1024}),
    ),
)
