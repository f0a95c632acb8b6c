"""DualPipe: forwards overlap with backwards of the other direction."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import MEMCALC
from memcalc.explanation.schedules import in_flight
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

IN_FLIGHT: Final = Rule(
    title=Words("p+1 micro-batches in flight on every rank", "每个 rank 上有 p+1 个在途微批次"),
    formula="p+1",
    unit="ratio",
    counts=Words(
        "micro-batches whose activations a rank keeps at once, of both directions, each in one stage of Φ/p weights.",
        "一个 rank 同时保存激活值的微批次数（两个方向合计），每个对应一个 Φ/p 权重的阶段。",
    ),
    leaves_out=Words(
        "that the weights are there twice, and that a backward in two halves keeps a part of its activations for longer.",
        "权重有两份；而且分成两半的反向会让一部分激活值存活更久。",
    ),
    quoted=Quoted({"p": 8}, 9, 0, "deepseek-ai/DualPipe, README, table of activations: PP + 1 (formula)"),
)
_MOST: Final = Words("most micro-batches in flight on a rank", "单个 rank 上同时在途的微批次最多数")


def most(asked: Asked) -> Step:
    """Return the most micro-batches that a rank has in flight in the setup's schedule."""
    words = MEMCALC.said(asked.language, what=_MOST.said(asked.language))
    return Step(words, asked.report.setup.schedule, "", in_flight(asked.report.setup), "ratio")


TOPIC: Final = Topic(
    name="dualpipe",
    title=Words("DualPipe and DualPipeV", "DualPipe 与 DualPipeV"),
    summary=Words(
        "a forward beside a backward, to hide the all-to-alls of experts", "前向与反向同时进行，以隐藏专家的通信"
    ),
    text=(
        Words(
            "DeepSeek-V3's schedule has two pipelines in opposite directions, as Chimera does. In its middle a rank runs a "
            "forward of one direction and a backward of the other as a pair: while one sends its experts' tokens, the other "
            "computes. Some backwards are cut in two halves, for the input and for the weights, to fill what waiting is left.",
            "DeepSeek-V3 的调度与 Chimera 一样有两条方向相反的流水线。中间阶段，一个 rank 把一个方向的前向与另一个方向的反向"
            "配成一对执行：一个在发送专家的 token 时，另一个在计算。部分反向被拆成输入和权重两半，用来填补剩余的等待。",
        ),
        Words(
            "Ranks keep p+1 micro-batches in flight, one more than the first rank of 1F1B, and all ranks keep equally many. "
            "DualPipeV cuts the same order in the middle: the second direction is the way back through a V, on half of the "
            "ranks and with one copy of the weights.",
            "每个 rank 有 p+1 个在途微批次，比 1F1B 的第一个 rank 多一个，且各 rank 相同。"
            "DualPipeV 把同一顺序从中间切开：第二个方向成为 V 形的回程，只用一半的 rank 和一份权重。",
        ),
    ),
    cases=(
        Case(
            IN_FLIGHT,
            most,
            Words("With few micro-batches there are fewer to be in flight.", "微批次较少时，在途的也更少。"),
        ),
    ),
    options={"gpus": 4, "pp": 4, "engine": "fsdp2", "zero": 2, "schedule": "dualpipe", "pp_rank": 0},
    micro_batches=16,
)
