"""torch's old DataParallel: its first GPU holds the most."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_TORCH: Final = "torch/nn/parallel/data_parallel.py (formula)"

STATES: Final = Rule(
    title=Words("The first GPU alone has the optimizer's 12·Φ", "只有第一张 GPU 有优化器的 12·Φ"),
    formula="12·Φ",
    unit="bytes",
    counts=Words(
        "fp32 masters and moments: there is one process and one optimizer, on the first GPU.",
        "fp32 主权重和两个矩：只有一个进程、一个优化器，位于第一张 GPU。",
    ),
    leaves_out=Words(
        "that the other GPUs get a fresh replica of the weights in each forward and send its gradients back.",
        "其他 GPU 每次前向都会收到一份新的权重副本，并把梯度送回。",
    ),
    quoted=Quoted({"Φ": 7e9}, 84e9, 0, _TORCH),
)
OUTPUTS: Final = Rule(
    title=Words("And the outputs of all GPUs: n·b·s·V in 16 bits", "还有所有 GPU 的输出：16 位的 n·b·s·V"),
    formula="2·n·b·s·V",
    unit="bytes",
    counts=Words(
        "the logits of all replicas, gathered on the first GPU, where a model returns them.",
        "所有副本的 logits，当模型返回它们时会收集到第一张 GPU。",
    ),
    leaves_out=Words(
        "a loss that is computed on them there, which wants as much again; a model that returns its loss alone has none of it.",
        "在其上计算损失还需要同样大小的显存；只返回损失的模型则没有这一项。",
    ),
    quoted=Quoted({"n": 8, "b": 1, "s": 2048, "V": 32000}, 1_048_576_000, 0, _TORCH),
)
_STATES: Final = Words("optimizer states of the first GPU", "第一张 GPU 的优化器状态")
_LOGITS: Final = Words("logits gathered on the first GPU", "收集到第一张 GPU 的 logits")


def optimizer_states(asked: Asked) -> Step:
    """Return the optimizer states of the first GPU."""
    parts = {"optimizer_states": asked.report.total("optimizer_states")}
    return exact_step(asked, _STATES, parts)


def gathered_logits(asked: Asked) -> Step:
    """Return the logits of all replicas on the first GPU."""
    from memcalc.engines.data_parallel.engine import gathered_logits_of

    return exact_step(asked, _LOGITS, {"logits": gathered_logits_of(asked.report.model, asked.report.setup)})


TOPIC: Final = Topic(
    name="data-parallel",
    title=Words("Data parallelism, and torch's old DataParallel", "数据并行，以及 torch 旧的 DataParallel"),
    summary=Words(
        "why DataParallel's first GPU runs out of memory first", "为什么 DataParallel 的第一张 GPU 最先爆显存"
    ),
    text=(
        Words(
            "Data parallelism runs the same weights on other sequences and adds up the gradients. DDP has one process a GPU, "
            "all equal. torch.nn.DataParallel has one process: the first GPU scatters the batch, copies the weights to the "
            "others in each forward, gathers outputs and gradients, and runs the optimizer.",
            "数据并行用相同的权重处理不同的序列，再把梯度相加。DDP 每张 GPU 一个进程，彼此对等。torch.nn.DataParallel "
            "只有一个进程："
            "第一张 GPU 分发批次，每次前向把权重复制给其他 GPU，收集输出和梯度，并运行优化器。",
        ),
        Words(
            "So the first GPU is the fullest, and the batch that fits is the one that fits there. torch advises DDP, even "
            "within one node.",
            "因此第一张 GPU 最满，能用的批次大小由它决定。torch 建议即使在单机内也使用 DDP。",
        ),
        Words(
            "The exact numbers are of --engine data-parallel: the rows of its first GPU.",
            "精确值来自 --engine data-parallel：第一张 GPU 的各行。",
        ),
    ),
    cases=(
        Case(
            STATES,
            optimizer_states,
            Words("With fp32 weights there is no master.", "权重为 fp32 时没有主权重。"),
            {"engine": "data-parallel"},
        ),
        Case(
            OUTPUTS,
            gathered_logits,
            Words(
                "In fp32 they are twice as large. With DDP each GPU has the logits of its own sequences and gathers none.",
                "fp32 时为两倍。使用 DDP 时每张 GPU 只有自己序列的 logits，不做收集。",
            ),
            {"engine": "data-parallel"},
        ),
    ),
    options={"gpus": 8},
)
