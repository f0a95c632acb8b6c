"""ZeRO: what each stage shards, and what it sends."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import sent_over, states
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_PAPER: Final = "Rajbhandari et al., ZeRO, arXiv 1910.02054, table 1"
_VOLUME: Final = "2 bytes and a ring's (n-1)/n, Rajbhandari et al., ZeRO, arXiv 1910.02054, section"
_LEAVES_OUT: Final = Words(
    "activations, the buffers of the reduction, and the weights that stage 3 gathers while it runs.",
    "激活值、规约缓冲区，以及第 3 阶段运行时收集的完整权重。",
)

STAGE_1: Final = Rule(
    title=Words("ZeRO-1: 4Φ + 12Φ/n", "ZeRO-1：4Φ + 12Φ/n"),
    formula="4·Φ + 12·Φ/n",
    unit="bytes",
    counts=Words(
        "16-bit weights and gradients whole (4), optimizer states in n parts (12).",
        "完整的 16 位权重和梯度 (4)，优化器状态切成 n 份 (12)。",
    ),
    leaves_out=_LEAVES_OUT,
    quoted=Quoted({"Φ": 7.5e9, "n": 64}, 31.4e9, 0.05e9, _PAPER),
)
STAGE_2: Final = Rule(
    title=Words("ZeRO-2: 2Φ + 14Φ/n", "ZeRO-2：2Φ + 14Φ/n"),
    formula="2·Φ + 14·Φ/n",
    unit="bytes",
    counts=Words(
        "16-bit weights whole (2), gradients and optimizer states in n parts (2 + 12).",
        "完整的 16 位权重 (2)，梯度和优化器状态切成 n 份 (2 + 12)。",
    ),
    leaves_out=_LEAVES_OUT,
    quoted=Quoted({"Φ": 7.5e9, "n": 64}, 16.6e9, 0.05e9, _PAPER),
)
STAGE_3: Final = Rule(
    title=Words("ZeRO-3: 16Φ/n", "ZeRO-3：16Φ/n"),
    formula="16·Φ/n",
    unit="bytes",
    counts=Words("weights, gradients and optimizer states, all in n parts.", "权重、梯度、优化器状态全部切成 n 份。"),
    leaves_out=_LEAVES_OUT,
    quoted=Quoted({"Φ": 7.5e9, "n": 64}, 1.88e9, 0.006e9, _PAPER),
)
SENDS_TWO: Final = Rule(
    title=Words("ZeRO-1 and 2 send 2Φ elements, as data parallelism does", "ZeRO-1、2 发送 2Φ 个元素，与数据并行相同"),
    formula="2·(n-1)/n·2·Φ",
    unit="bytes",
    counts=Words(
        "a reduce-scatter of the 16-bit gradients and an all-gather of the updated weights.",
        "一次 16 位梯度的 reduce-scatter 和一次更新后权重的 all-gather。",
    ),
    leaves_out=Words("engines that all-reduce whole buckets instead.", "改为对整个桶做 all-reduce 的引擎。"),
    quoted=Quoted({"Φ": 7.5e9, "n": 64}, 29.53125e9, 0, f"{_VOLUME} 7.2.1 (formula)"),
)
SENDS_THREE: Final = Rule(
    title=Words("ZeRO-3 sends 3Φ elements, 1.5 times as much", "ZeRO-3 发送 3Φ 个元素，是前者的 1.5 倍"),
    formula="3·(n-1)/n·2·Φ",
    unit="bytes",
    counts=Words(
        "an all-gather of the weights for forward, one for backward, and a reduce-scatter of the gradients.",
        "前向一次权重 all-gather、反向一次，再加一次梯度 reduce-scatter。",
    ),
    leaves_out=Words(
        "what stays gathered between forward and backward, and further micro-batches, which gather again.",
        "前向与反向之间保留的完整权重，以及会再次收集权重的后续微批次。",
    ),
    quoted=Quoted({"Φ": 7.5e9, "n": 64}, 44.296875e9, 0, f"{_VOLUME} 7.2.2 (formula)"),
)
_PARTS: Final = Words(
    "Parts are padded to equal sizes; Megatron keeps fp32 gradients, and FSDP fp32 weights.",
    "各份会填充到相同大小；Megatron 保留 fp32 梯度，FSDP 保留 fp32 权重。",
)

TOPIC: Final = Topic(
    name="zero",
    title=Words("ZeRO: sharded data parallelism", "ZeRO：切分冗余的数据并行"),
    summary=Words("what each stage of ZeRO shards and sends", "ZeRO 各阶段切分什么、发送什么"),
    text=(
        Words(
            "Data parallelism keeps n equal copies of the model states. ZeRO keeps one, in n parts: stage 1 the optimizer "
            "states, stage 2 the gradients as well, stage 3 the weights as well.",
            "数据并行把模型状态存了 n 份。ZeRO 只存一份并切成 n 块：第 1 阶段切优化器状态，第 2 阶段再切梯度，第 3 "
            "阶段再切权重。",
        ),
        Words(
            "Activations are not sharded: each GPU has those of its own sequences. ZeRO does not help a GPU that is full "
            "of activations.",
            "激活值不被切分：每张 GPU 保存自己那部分序列的激活值。如果显存被激活值占满，ZeRO 帮不上忙。",
        ),
    ),
    cases=(
        Case(STAGE_1, states, _PARTS, {"zero": 1, "engine": "deepspeed"}),
        Case(STAGE_2, states, _PARTS, {"zero": 2, "engine": "deepspeed"}),
        Case(STAGE_3, states, _PARTS, {"zero": 3, "engine": "deepspeed"}),
        Case(
            SENDS_TWO,
            sent_over("dp"),
            Words(
                "By default DeepSpeed all-reduces whole buckets in stages 1 and 2, then gathers the weights: three times "
                "instead of two.",
                "DeepSpeed 在第 1、2 阶段默认对整个桶做 all-reduce，然后再收集权重：是三份而不是两份。",
            ),
            {"zero": 2, "engine": "deepspeed"},
        ),
        Case(
            SENDS_THREE,
            sent_over("dp"),
            Words(
                "DeepSpeed does not release weights that it uses again soon (max_live_parameters, max_reuse_distance), so "
                "backward gathers fewer of them.",
                "DeepSpeed 不释放很快会再用到的权重 (max_live_parameters、max_reuse_distance)，所以反向收集得更少。",
            ),
            {"zero": 3, "engine": "deepspeed"},
        ),
    ),
    options={"gpus": 8},
)
