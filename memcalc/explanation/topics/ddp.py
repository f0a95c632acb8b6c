"""DDP: a whole replica on every GPU, and buckets."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import sent_over, states_and_buckets
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_BUCKETS: Final = "torch/csrc/distributed/c10d/reducer.cpp (formula)"

FP32_BUCKETS: Final = Rule(
    title=Words("fp32 with DDP: 20 bytes per parameter", "DDP + fp32：每个参数 20 字节"),
    formula="4·Φ + 4·Φ + 8·Φ + 4·Φ",
    unit="bytes",
    counts=Words(
        "weights (4), gradients (4), Adam's moments (8), and DDP's buckets, a flat copy of the gradients (4).",
        "权重 (4)、梯度 (4)、Adam 的两个矩 (8)，以及 DDP 的桶，即梯度的一份扁平副本 (4)。",
    ),
    leaves_out=Words(
        "activations; and that gradient_as_bucket_view=True makes gradients views of the buckets, which saves the last 4.",
        "激活值；设置 gradient_as_bucket_view=True 时梯度是桶的视图，可省去最后的 4 字节。",
    ),
    quoted=Quoted({"Φ": 7e9}, 140e9, 0, _BUCKETS),
)
MIXED_BUCKETS: Final = Rule(
    title=Words("16 bits with DDP: 18 bytes per parameter", "DDP + 16 位：每个参数 18 字节"),
    formula="4·Φ + 2·Φ + 2·Φ + 8·Φ + 2·Φ",
    unit="bytes",
    counts=Words(
        "fp32 weights (4), their 16-bit copy (2), 16-bit gradients (2), moments (8) and 16-bit buckets (2).",
        "fp32 权重 (4)、其 16 位副本 (2)、16 位梯度 (2)、两个矩 (8)、16 位的桶 (2)。",
    ),
    leaves_out=Words("activations.", "激活值。"),
    quoted=Quoted({"Φ": 7e9}, 126e9, 0, _BUCKETS),
)
ALL_REDUCE: Final = Rule(
    title=Words("A step sends two times the gradients", "每步发送两倍的梯度"),
    formula="2·(n-1)/n·2·Φ",
    unit="bytes",
    counts=Words(
        "one ring all-reduce of the 16-bit gradients: each GPU sends (n-1)/n of them twice.",
        "对 16 位梯度做一次环形 all-reduce：每张 GPU 把其中 (n-1)/n 发送两遍。",
    ),
    leaves_out=Words(
        "latency, and that buckets let most of it run behind backward.",
        "延迟；另外分桶使大部分通信与反向计算重叠。",
    ),
    quoted=Quoted({"Φ": 7e9, "n": 8}, 24.5e9, 0, "nccl-tests, doc/PERFORMANCE.md (formula)"),
)
_OTHER: Final = Words(
    "Another precision or engine has copies in other dtypes.", "换用其他精度或引擎，副本的数据类型就不同。"
)

TOPIC: Final = Topic(
    name="ddp",
    title=Words("Distributed data parallelism (torch DDP)", "分布式数据并行 (torch DDP)"),
    summary=Words("a whole replica on every GPU, gradients reduced in buckets", "每张 GPU 一份完整副本，梯度分桶规约"),
    text=(
        Words(
            "Every GPU has all weights, gradients and optimizer states: DDP saves no memory, it adds some. Gradients are "
            "copied into buckets of 25 MiB (the first one 1 MiB) and each bucket is all-reduced as soon as it is full.",
            "每张 GPU 都有全部权重、梯度和优化器状态：DDP 不省显存，反而略增。梯度被拷贝到 25 MiB 的桶中（第一个是 1 MiB），"
            "每个桶装满后立即 all-reduce。",
        ),
        Words(
            "Gradient accumulation with no_sync reduces once a step, however many micro-batches it has.",
            "梯度累积配合 no_sync 时，无论有多少微批次，每步只规约一次。",
        ),
    ),
    cases=(
        Case(FP32_BUCKETS, states_and_buckets, _OTHER, {"engine": "ddp", "precision": "fp32"}),
        Case(MIXED_BUCKETS, states_and_buckets, _OTHER, {"engine": "ddp", "precision": "bf16-mixed"}),
        Case(
            ALL_REDUCE,
            sent_over("dp"),
            Words(
                "DDP also broadcasts the buffers of the modules before forward; fp32 gradients are twice as large.",
                "DDP 还会在前向前广播模块的缓冲区；fp32 梯度则是两倍大小。",
            ),
            {"engine": "ddp", "precision": "bf16-mixed"},
        ),
    ),
    options={"gpus": 8},
)
