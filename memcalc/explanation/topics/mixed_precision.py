"""Mixed precision: which copies of a parameter there are, and in which dtype."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import states
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.topics.adam import SIXTEEN
from memcalc.explanation.words import Words

PURE: Final = Rule(
    title=Words("Everything in bf16: 8 bytes per parameter", "全部用 bf16：每个参数 8 字节"),
    formula="2·Φ + 2·Φ + 2·Φ + 2·Φ",
    unit="bytes",
    counts=Words(
        "weights, gradients and both moments in bf16, without fp32 masters.",
        "bf16 的权重、梯度和两个矩，没有 fp32 主权重。",
    ),
    leaves_out=Words(
        "that small updates are lost: a bf16 weight has 8 bits of precision, so an update below 1/512 of it rounds to nothing.",
        "小更新会丢失：bf16 只有 8 位有效精度，小于权重 1/512 的更新会被舍入掉。",
    ),
    quoted=Quoted({"Φ": 7e9}, 56e9, 0, "torch.optim on model.to(torch.bfloat16) (formula)"),
)
AUTOCAST: Final = Rule(
    title=Words("torch.autocast: 16 bytes, of other parts", "torch.autocast：同样 16 字节，构成不同"),
    formula="4·Φ + 4·Φ + 4·Φ + 4·Φ",
    unit="bytes",
    counts=Words(
        "fp32 weights, gradients and moments; matrix products run in 16 bits.",
        "fp32 的权重、梯度和矩；矩阵乘法以 16 位运行。",
    ),
    leaves_out=Words(
        "the 16-bit copies of the weights that autocast makes in forward and keeps until backward: up to 2 more bytes per "
        "parameter, among the activations.",
        "autocast 在前向中生成、保留到反向的 16 位权重副本：每个参数最多再加 2 字节，计在激活值里。",
    ),
    quoted=Quoted({"Φ": 7e9}, 112e9, 0, "torch.amp (formula)"),
)
MEGATRON: Final = Rule(
    title=Words("Megatron: 18 bytes per parameter", "Megatron：每个参数 18 字节"),
    formula="2·Φ + 4·Φ + 4·Φ + 4·Φ + 4·Φ",
    unit="bytes",
    counts=Words(
        "bf16 weights (2), fp32 main gradients (4) that micro-batches are added up in, fp32 main weights (4) and moments (8).",
        "bf16 权重 (2)、用于累加各微批次的 fp32 主梯度 (4)、fp32 主权重 (4) 和两个矩 (8)。",
    ),
    leaves_out=Words(
        "activations and buffers; with the distributed optimizer over d ranks it is 6 + 12/d.",
        "激活值和缓冲区；使用 d 个 rank 的分布式优化器时为 6 + 12/d。",
    ),
    quoted=Quoted({"Φ": 1}, 18, 0, "Megatron-Core documentation, Distributed Optimizer"),
)
_OTHER: Final = Words(
    "A layout that shards or pads the weights holds another share of them.",
    "切分或填充权重的并行方式会使每卡持有的比例不同。",
)

TOPIC: Final = Topic(
    name="mixed-precision",
    title=Words("Mixed precision", "混合精度"),
    summary=Words(
        "which copies of a parameter exist, and why Adam needs fp32 masters",
        "参数有哪些副本，以及 Adam 为什么需要 fp32 主权重",
    ),
    text=(
        Words(
            "Matrix products run in 16 bits, several times as fast as in fp32. The optimizer still adds small updates to large "
            "weights: lr·m/√v is often less than a thousandth of the weight, and bf16 resolves 1/128 to 1/256 of it. Without "
            "an fp32 "
            "master such updates round to nothing.",
            "矩阵乘法以 16 位运行，速度是 fp32 的数倍。但优化器是把很小的更新加到较大的权重上：lr·m/√v 常常不到权重的千分之一，"
            "而 bf16 的分辨率只有 1/128 到 1/256。没有 fp32 主权重，这样的更新会被舍入为零。",
        ),
        Words(
            "fp16 has a smaller range than bf16, so its loss is scaled to keep small gradients from becoming zero; the bytes "
            "are the same.",
            "fp16 的数值范围比 bf16 小，需要对损失做缩放以免小梯度下溢为零；占用字节相同。",
        ),
    ),
    cases=(
        Case(SIXTEEN, states, _OTHER, {"precision": "bf16-mixed"}),
        Case(PURE, states, _OTHER, {"precision": "bf16"}),
        Case(AUTOCAST, states, _OTHER, {"precision": "bf16-autocast"}),
        Case(MEGATRON, states, _OTHER, {"engine": "megatron", "precision": "bf16-mixed"}),
    ),
)
