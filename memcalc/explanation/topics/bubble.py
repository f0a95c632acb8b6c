"""The bubble: how long the stages of a pipeline wait."""

from __future__ import annotations

from typing import Final

from memcalc.errors import InputError
from memcalc.explanation.exact import MEMCALC, ratio_step
from memcalc.explanation.schedules import side_by_side
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_NARAYANAN: Final = "Narayanan et al. 2021, arXiv 2104.04473, section"

PER_IDEAL: Final = Rule(
    title=Words("(p-1)/m of the ideal time", "气泡占理想时间的 (p-1)/m"),
    formula="(p-1)/m",
    unit="ratio",
    counts=Words(
        "the forwards and backwards of p-1 stages that the last stage waits for, over those of m micro-batches that it runs.",
        "首末阶段等待的 p-1 个前向与反向，与自己运行的 m 个微批次之比。",
    ),
    leaves_out=Words(
        "stages of unequal time (the embedding, the output head), and the time of the sends.",
        "各阶段耗时不等（词嵌入、输出层），以及发送所需的时间。",
    ),
    quoted=Quoted({"p": 8, "m": 64}, 0.109375, 0, f"{_NARAYANAN} 2.2.1 (formula)"),
)
OF_THE_STEP: Final = Rule(
    title=Words("(p-1)/(m+p-1) of the step: the same bubble", "占整步时间的 (p-1)/(m+p-1)：同一个气泡"),
    formula="(p-1)/(m+p-1)",
    unit="ratio",
    counts=Words("the bubble over the whole step, waiting included.", "气泡与包含等待在内的整步时间之比。"),
    leaves_out=Words(
        "the same. Two numbers for one bubble: ask which time is below the line.",
        "同上。同一个气泡有两种说法：要问分母是哪个时间。",
    ),
    quoted=Quoted({"p": 8, "m": 64}, 7 / 71, 1e-12, "Huang et al., GPipe, arXiv 1811.06965, section 2.3 (formula)"),
)
INTERLEAVED: Final = Rule(
    title=Words("Interleaved: (p-1)/(v·m)", "交错调度：(p-1)/(v·m)"),
    formula="(p-1)/(v·m)",
    unit="ratio",
    counts=Words(
        "the same with v chunks a stage: filling the pipeline takes 1/v of the time.",
        "每个阶段有 v 个模型块：填满流水线只需 1/v 的时间。",
    ),
    leaves_out=Words(
        "that there are v times as many sends, and more micro-batches in flight.",
        "发送次数变为 v 倍，在途微批次也更多。",
    ),
    quoted=Quoted({"p": 8, "m": 64, "v": 2}, 0.0546875, 0, f"{_NARAYANAN} 2.2.2 (formula)"),
)
CHIMERA: Final = Rule(
    title=Words("Chimera: (p-2)/(3m/2+p-2) of the step", "Chimera：占整步时间的 (p-2)/(3m/2+p-2)"),
    formula="(p-2)/(3·m/2+p-2)",
    unit="ratio",
    counts=Words(
        "two pipelines in opposite directions, each of which fills the other's idle places; p/2-1 stages wait each way. A "
        "backward takes twice as long as a forward.",
        "两条方向相反的流水线互相填补空闲；每个方向等待 p/2-1 个阶段。反向耗时为前向的两倍。",
    ),
    leaves_out=Words(
        "that all weights are there twice, and their gradients have to be summed over both copies.",
        "所有权重都有两份，其梯度要在两份之间求和。",
    ),
    quoted=Quoted({"p": 4, "m": 4}, 0.25, 0, "Li and Hoefler 2021, arXiv 2107.06925, section 3.1 (formula)"),
)
DUALPIPE: Final = Rule(
    title=Words("DualPipe: (p-2)/(3·m)", "DualPipe：(p-2)/(3·m)"),
    formula="(p-2)/(3·m)",
    unit="ratio",
    counts=Words(
        "(p/2-1)(F&B + B - 3W) over m(F + B), where a forward F and each half of a backward B take equally long, and an "
        "overlapped pair F&B as long as both.",
        "(p/2-1)(F&B + B - 3W) 与 m(F + B) 之比；前向 F 与反向 B 的每一半耗时相同，重叠的一对 F&B 耗时为两者之和。",
    ),
    leaves_out=Words(
        "what the overlap is for: sends hidden behind compute. All weights are there twice.",
        "重叠的目的：把通信藏在计算之后。所有权重都有两份。",
    ),
    quoted=Quoted({"p": 8, "m": 20}, 0.1, 1e-12, "deepseek-ai/DualPipe, README, table of bubbles (formula)"),
)
_IDLE: Final = Words("idle time over the ideal time of the schedule", "该调度的空闲时间与理想时间之比")
_OF_STEP: Final = Words("idle time over the step", "空闲时间与整步时间之比")
_SCHEDULE: Final = Words(
    "Another schedule fills the waiting with other work: zero-bubble with the gradients of weights.",
    "其他调度会用别的计算填补等待：例如 zero-bubble 用权重梯度的计算。",
)


def idle(asked: Asked) -> Step:
    """Return the bubble of the setup's schedule as a share of the ideal time."""
    words = MEMCALC.said(asked.language, what=_IDLE.said(asked.language))
    share = _share(asked)
    return Step(words, asked.report.setup.schedule, "", share, "ratio")


def of_the_step(asked: Asked) -> Step:
    """Return the bubble of the setup's schedule as a share of the step's time."""
    share = _share(asked)
    return ratio_step(asked, _OF_STEP, "idle/(1 + idle)", share, 1 + share)


def _share(asked: Asked) -> float:
    from memcalc.pipelining.idle import idle_share

    if asked.report.setup.pp == 1:
        raise InputError("--pp 1: has no bubble; allowed: 2 or more")
    return idle_share(asked.report.setup)


_OF_TORCH: Final = {"engine": "fsdp2", "zero": 2, "pp_rank": 0}

TOPIC: Final = Topic(
    name="bubble",
    title=Words("The pipeline's bubble", "流水线气泡"),
    summary=Words("how long stages wait: (p-1)/m", "各阶段等待多久：(p-1)/m"),
    text=(
        Words(
            "The last stage can begin when p-1 stages before it have done a forward, and the first can end when the "
            "gradient has come back through all. More micro-batches make the same wait a smaller part of the step.",
            "最后一个阶段要等前面 p-1 个阶段各完成一次前向才能开始，第一个阶段要等梯度传回来才能结束。"
            "微批次越多，同样的等待占比越小。",
        ),
        Words(
            "GPipe and 1F1B have the same bubble. 1F1B holds fewer micro-batches, so it can have more of them.",
            "GPipe 和 1F1B 的气泡相同。1F1B 同时持有的微批次更少，因此可以使用更多微批次。",
        ),
        Words(
            "Without micro-batches (naive model parallelism) one of p GPUs works at a time: the bubble is p-1 times the ideal "
            "time. PipeDream never empties the pipeline, so it has none, and pays with older versions of the weights. ZB-V has "
            "none within a rank's own span; as ranks begin one after the other, a synchronous step still waits p-1 chunks.",
            "没有微批次时（朴素模型并行），p 张 GPU 中同一时刻只有一张在工作：气泡是理想时间的 p-1 倍。"
            "PipeDream 从不排空流水线，因此没有气泡，代价是保存旧版本的权重。ZB-V 在每个 rank 自己的时间段内没有气泡；"
            "但各 rank 依次开始，同步的一步仍要等待 p-1 个模型块。",
        ),
    ),
    cases=(
        Case(PER_IDEAL, idle, _SCHEDULE),
        Case(OF_THE_STEP, of_the_step, _SCHEDULE),
        Case(INTERLEAVED, idle, _SCHEDULE, {"schedule": "interleaved", "virtual_stages": 2}),
        Case(
            CHIMERA,
            of_the_step,
            Words(
                "The formula is for as many micro-batches as stages. With more of them, groups follow each other, and where a "
                "backward takes twice as long as a forward they leave gaps (direct concatenation, section 3.5).",
                "该公式针对微批次数等于阶段数的情形。微批次更多时，各组首尾相接；"
                "反向耗时为前向两倍时组间会留下空隙（直接拼接，第 3.5 节）。",
            ),
            {"schedule": "chimera", **_OF_TORCH},
        ),
        Case(
            DUALPIPE,
            idle,
            Words("More stages than two wait for each other.", "两个以上的阶段会互相等待。"),
            {"schedule": "dualpipe", **_OF_TORCH},
        ),
    ),
    options={"gpus": 4, "pp": 4},
    micro_batches=32,
    beside=side_by_side,
)
