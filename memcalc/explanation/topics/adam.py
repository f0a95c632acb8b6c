"""Adam: 16 bytes for each parameter."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import states
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_ZERO: Final = "Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1"

SIXTEEN: Final = Rule(
    title=Words("16 bytes per parameter with mixed precision", "混合精度：每个参数 16 字节"),
    formula="2·Φ + 2·Φ + 4·Φ + 4·Φ + 4·Φ",
    unit="bytes",
    counts=Words(
        "16-bit weights (2) and gradients (2), fp32 master weights (4), Adam's first moment (4) and second moment (4).",
        "16 位权重 (2)、16 位梯度 (2)、fp32 主权重 (4)、Adam 一阶矩 (4)、二阶矩 (4)。",
    ),
    leaves_out=Words(
        "activations, temporaries, communication buffers, fragmentation and the CUDA context.",
        "激活值、临时张量、通信缓冲区、显存碎片和 CUDA 上下文。",
    ),
    quoted=Quoted({"Φ": 1.5e9}, 24e9, 0, _ZERO),
)
FP32: Final = Rule(
    title=Words("16 bytes per parameter in fp32, too", "fp32 训练：同样是每个参数 16 字节"),
    formula="4·Φ + 4·Φ + 4·Φ + 4·Φ",
    unit="bytes",
    counts=Words(
        "fp32 weights, gradients and both moments, 4 bytes each. No master weights: the weights are fp32 themselves.",
        "fp32 的权重、梯度和两个矩，各 4 字节。权重本身就是 fp32，不需要主权重。",
    ),
    leaves_out=Words(
        "activations, which are up to twice as large as in 16 bits, and all that the rule above leaves out.",
        "激活值（最多是 16 位时的两倍），以及上一条未计入的各项。",
    ),
    quoted=Quoted({"Φ": 7e9}, 112e9, 0, "torch/optim/adam.py (formula)"),
)
_PARAMETERS: Final = Words(
    "An engine that holds another copy or another dtype has another number: see mixed-precision, ddp and zero.",
    "引擎如果多存一份副本或使用其他精度，结果就不同：参见 mixed-precision、ddp、zero。",
)

TOPIC: Final = Topic(
    name="adam",
    title=Words("Adam's memory", "Adam 的显存"),
    summary=Words("why training with Adam takes 16 bytes per parameter", "为什么用 Adam 训练每个参数需要 16 字节"),
    text=(
        Words(
            "Adam keeps two numbers for each parameter between steps: a running mean of its gradient (m, exp_avg) and of its "
            "squared gradient (v, exp_avg_sq). Both are fp32 where the weight that it updates is fp32.",
            "Adam 在两步之间为每个参数保存两个数：梯度的滑动平均 (m, exp_avg) 和梯度平方的滑动平均 (v, exp_avg_sq)。"
            "被更新的权重是 fp32 时，两者也是 fp32。",
        ),
        Words(
            "7B parameters: 14 GB of weights, 14 GB of gradients and 84 GB of optimizer states are 112 GB, before the first "
            "activation. A model called 7B rarely has 7,000,000,000 parameters: the exact count is in `memcalc models NAME`.",
            "7B 参数：14 GB 权重 + 14 GB 梯度 + 84 GB 优化器状态 = 112 GB，还没有算任何激活值。名为 7B 的模型很少恰好有 "
            "7,000,000,000 个参数：准确数量见 `memcalc models NAME`。",
        ),
    ),
    cases=(
        Case(SIXTEEN, states, _PARAMETERS, {"optimizer": "adamw"}),
        Case(FP32, states, _PARAMETERS, {"optimizer": "adamw", "precision": "fp32"}),
    ),
)
