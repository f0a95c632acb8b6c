"""Optimizers: the states that SGD, momentum and others keep beside Adam's."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import states
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.topics.adam import FP32 as ADAM
from memcalc.explanation.words import Words

_SAME: Final = Words("activations, temporaries and buffers.", "激活值、临时张量和缓冲区。")
_OTHER: Final = Words(
    "A layout that shards or pads the weights holds another share of them.",
    "切分或填充权重的并行方式会使每卡持有的比例不同。",
)

SGD: Final = Rule(
    title=Words("SGD: 8 bytes per parameter in fp32", "SGD：fp32 下每个参数 8 字节"),
    formula="4·Φ + 4·Φ",
    unit="bytes",
    counts=Words("weights and gradients; plain SGD keeps nothing.", "权重和梯度；普通 SGD 不保存任何状态。"),
    leaves_out=_SAME,
    quoted=Quoted({"Φ": 7e9}, 56e9, 0, "torch/optim/sgd.py (formula)"),
)
MOMENTUM: Final = Rule(
    title=Words("SGD with momentum: 12 bytes", "带动量的 SGD：12 字节"),
    formula="4·Φ + 4·Φ + 4·Φ",
    unit="bytes",
    counts=Words("one momentum buffer for each parameter on top.", "再加每个参数一个动量缓冲。"),
    leaves_out=_SAME,
    quoted=Quoted({"Φ": 7e9}, 84e9, 0, "torch/optim/sgd.py (formula)"),
)
EIGHT_BIT: Final = Rule(
    title=Words("8-bit Adam: 10 bytes", "8 位 Adam：10 字节"),
    formula="4·Φ + 4·Φ + 1·Φ + 1·Φ",
    unit="bytes",
    counts=Words("both moments in one byte each.", "两个矩各占 1 字节。"),
    leaves_out=Words(
        "a scale for each block of them, and fp32 states of small or excluded tensors.",
        "每个状态块的缩放因子，以及小张量或被排除张量的 fp32 状态。",
    ),
    quoted=Quoted({"Φ": 7e9}, 70e9, 0, "Dettmers et al., arXiv 2110.02861 (formula)"),
)
ADAFACTOR: Final = Rule(
    title=Words("Adafactor: 8 bytes, and almost no states", "Adafactor：8 字节，几乎没有状态"),
    formula="4·Φ + 4·Φ",
    unit="bytes",
    counts=Words("weights and gradients alone.", "只有权重和梯度。"),
    leaves_out=Words(
        "a row and a column of second moments for each matrix, n + m numbers instead of n·m.",
        "每个矩阵一行一列的二阶矩：n + m 个数，而不是 n·m 个。",
    ),
    quoted=Quoted({"Φ": 7e9}, 56e9, 0, "Shazeer and Stern, arXiv 1804.04235 (formula)"),
)

TOPIC: Final = Topic(
    name="optimizers",
    title=Words("Optimizers beside Adam", "Adam 与其他优化器"),
    summary=Words("what SGD, momentum, 8-bit Adam and Adafactor keep", "SGD、动量、8 位 Adam、Adafactor 各保存什么"),
    text=(
        Words(
            "An optimizer's states are what it remembers of earlier gradients. In fp32, weights and gradients are 8 bytes a "
            "parameter; an optimizer adds 0 (SGD), 4 (momentum, Lion) or 8 (Adam). With bf16 weights every one of them wants "
            "the fp32 master too, 4 bytes more.",
            "优化器状态是它对过去梯度的记忆。fp32 下权重和梯度是每个参数 8 字节；优化器再加 0（SGD）、4（动量、Lion）或 "
            "8（Adam）。使用 bf16 权重时，它们都还需要 4 字节的 fp32 主权重。",
        ),
    ),
    cases=(
        Case(SGD, states, _OTHER, {"optimizer": "sgd", "precision": "fp32"}),
        Case(MOMENTUM, states, _OTHER, {"optimizer": "sgd-momentum", "precision": "fp32"}),
        Case(ADAM, states, _OTHER, {"optimizer": "adamw", "precision": "fp32"}),
        Case(
            EIGHT_BIT,
            states,
            Words("The rest is the scales of the blocks.", "多出的部分是各块的缩放因子。"),
            {"optimizer": "adamw-8bit", "precision": "fp32"},
        ),
        Case(
            ADAFACTOR,
            states,
            Words("The rest is the rows and columns of second moments.", "多出的部分是二阶矩的行和列。"),
            {"optimizer": "adafactor", "precision": "fp32"},
        ),
    ),
)
