"""ZB-V: stages in a V, and backwards in two halves."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.topics.dualpipe import most
from memcalc.explanation.words import Words

AS_1F1B: Final = Rule(
    title=Words(
        "As many activations as 1F1B's first rank, on every rank: p", "每个 rank 的激活值都与 1F1B 第一个 rank 相同：p"
    ),
    formula="p",
    unit="ratio",
    counts=Words(
        "micro-batches in flight, in units of a rank's part of the model: 2p chunks, each half of it.",
        "在途微批次数，以一个 rank 的模型份额为单位：2p 个模型块，每个为其一半。",
    ),
    leaves_out=Words(
        "what a backward for the input leaves behind until the one for the weights has run.",
        "输入部分的反向完成后、权重部分的反向运行之前仍需保留的内容。",
    ),
    quoted=Quoted({"p": 4}, 4, 0, "Qi et al. 2023, Zero Bubble, arXiv 2401.10241, section 6 (formula)"),
)

TOPIC: Final = Topic(
    name="zbv",
    title=Words("ZB-V: zero bubble in a V", "ZB-V：V 形的零气泡调度"),
    summary=Words(
        "backwards in two halves fill the bubble, with 1F1B's memory", "用反向的两半填补等待，显存与 1F1B 相同"
    ),
    text=(
        Words(
            "A backward has two parts: the gradient of the input, which the stage before waits for, and those of the weights, "
            "which nobody waits for until the update. Zero-bubble schedules run the second part where a rank would wait.",
            "反向分两部分：输入的梯度（前一阶段在等它）和权重的梯度（直到更新之前没人等它）。零气泡调度把第二部分放到原本空闲的时间里。",
        ),
        Words(
            "Rank r has stages r and 2p-1-r, so a micro-batch turns at the last rank without a message and comes back to the "
            "first, which has the embedding and the head. Every rank keeps as much as 1F1B's first rank does. The head's rank "
            "is also the first to begin a backward. A synchronous step still waits p-1 chunks at its ends.",
            "rank r 拥有阶段 r 和 2p-1-r，因此微批次在最后一个 rank 处折返（无需通信）并回到第一个 rank，"
            "后者同时拥有词嵌入和输出层。"
            "每个 rank 保存的激活值都与 1F1B 的第一个 rank 相同。同步的一步在首尾仍要等待 p-1 个模型块。",
        ),
        Words(
            "torch keeps the graph of a backward for the input until the weights' part has run, so its memory is above the "
            "formula's. --zero 3 and recomputation are refused with it.",
            "torch 在权重部分运行之前会保留输入部分反向的计算图，因此其显存高于公式。--zero 3 和重计算不能与之同用。",
        ),
    ),
    cases=(
        Case(
            AS_1F1B,
            most,
            Words(
                "With fewer micro-batches than stages there are fewer in flight.", "微批次少于阶段数时，在途的也更少。"
            ),
        ),
    ),
    options={"gpus": 4, "pp": 4, "engine": "fsdp2", "zero": 2, "schedule": "zbv", "pp_rank": 0},
    micro_batches=16,
)
