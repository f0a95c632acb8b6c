"""The ring all-reduce: twice the payload, however many GPUs."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import sent_over
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.topics.ddp import ALL_REDUCE
from memcalc.explanation.words import Words

NAIVE: Final = Rule(
    title=Words("Without a ring: (n-1) times the gradients", "不用环：梯度的 (n-1) 倍"),
    formula="(n-1)·2·Φ",
    unit="bytes",
    counts=Words(
        "each GPU sends its 16-bit gradients to every other one.", "每张 GPU 把自己的 16 位梯度发给其他所有 GPU。"
    ),
    leaves_out=Words(
        "nothing; but nobody does it, since the bytes grow with n.", "没有遗漏；但没有人这样做，因为通信量随 n 增长。"
    ),
    quoted=Quoted({"Φ": 7e9, "n": 8}, 98e9, 0, "n-1 sends of the whole (formula)"),
)

TOPIC: Final = Topic(
    name="ring-allreduce",
    title=Words("The ring all-reduce", "环形 all-reduce"),
    summary=Words("2(n-1)/n of the payload, however many GPUs there are", "无论多少 GPU，发送量都是 2(n-1)/n"),
    text=(
        Words(
            "n GPUs in a ring cut the tensor into n parts. In n-1 steps each part travels around and is added up "
            "(reduce-scatter); in n-1 more the sums travel around (all-gather). Each GPU sends 1/n in each step: 2(n-1)/n in "
            "all, "
            "at most twice the tensor.",
            "n 张 GPU 连成环，把张量切成 n 份。前 n-1 步各份绕环传递并累加 (reduce-scatter)，后 n-1 步把和绕环传递 "
            "(all-gather)。每步每张 GPU 发送 1/n，共 2(n-1)/n，最多是张量的两倍。",
        ),
        Words(
            "Bandwidth is independent of n, latency is not: 2(n-1) steps. NCCL takes trees for small tensors over many GPUs.",
            "带宽开销与 n 无关，延迟则有关：共 2(n-1) 步。GPU 多、张量小时 NCCL 改用树形算法。",
        ),
    ),
    cases=(
        Case(
            ALL_REDUCE,
            sent_over("dp"),
            Words(
                "DDP also broadcasts the buffers of the modules before forward.", "DDP 还会在前向前广播模块的缓冲区。"
            ),
            {"engine": "ddp", "precision": "bf16-mixed"},
        ),
        Case(
            NAIVE,
            sent_over("dp"),
            Words(
                "The ring adds up on the way, so a gradient is not sent n-1 times.",
                "环在传递途中就完成累加，梯度不必发送 n-1 次。",
            ),
            {"engine": "ddp", "precision": "bf16-mixed"},
        ),
    ),
    options={"gpus": 8},
)
