"""Pipeline parallelism: layers on several GPUs, hidden states between them."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import check_sent, elements_between_stages, exact_step
from memcalc.explanation.schedules import side_by_side
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_NARAYANAN: Final = "Narayanan et al. 2021, arXiv 2104.04473, section"

BETWEEN: Final = Rule(
    title=Words("2·b·s·h elements between two stages for a micro-batch", "每个微批次在两个阶段之间传 2·b·s·h 个元素"),
    formula="2·b·s·h",
    unit="elements",
    counts=Words(
        "the hidden states over one boundary in forward, and their gradient back over it in backward.",
        "前向时隐藏状态跨过一个边界，反向时其梯度再传回来。",
    ),
    leaves_out=Words(
        "that a stage in the middle has two boundaries; tied embeddings, whose gradients the first and last stage add up.",
        "中间阶段有两个边界；共享词嵌入时，首末阶段还要把梯度相加。",
    ),
    quoted=Quoted({"b": 1, "s": 2048, "h": 4096}, 16_777_216, 0, f"{_NARAYANAN} 3.2 (formula)"),
)
IN_FLIGHT: Final = Rule(
    title=Words("1F1B: the first stage holds p micro-batches", "1F1B：第一个阶段同时持有 p 个微批次"),
    formula="p",
    unit="ratio",
    counts=Words(
        "forwards whose backward has not come yet: as many as there are stages, of L/p layers each. The stages after it hold "
        "fewer, the last one a single micro-batch.",
        "反向尚未到来的前向数：等于阶段数，每个含 L/p 层。之后的阶段持有得更少，最后一个只有一个微批次。",
    ),
    leaves_out=Words(
        "that a step with fewer micro-batches than stages has no more than those.",
        "微批次少于阶段数时，最多只有那么多。",
    ),
    quoted=Quoted({"p": 8}, 8, 0, f"{_NARAYANAN} 2.2.1 (formula)"),
)
GPIPE: Final = Rule(
    title=Words("GPipe: every stage holds all m micro-batches", "GPipe：每个阶段持有全部 m 个微批次"),
    formula="m",
    unit="ratio",
    counts=Words("all forwards run before the first backward.", "所有前向都在第一个反向之前完成。"),
    leaves_out=Words(
        "nothing of the count; recomputation makes each of them small.", "计数本身没有遗漏；重计算可让每份都很小。"
    ),
    quoted=Quoted({"m": 64}, 64, 0, f"{_NARAYANAN} 2.2.1 (formula)"),
)
VERSIONS: Final = Rule(
    title=Words(
        "PipeDream: the first stage keeps p versions of its weights", "PipeDream：第一个阶段保存 p 个版本的权重"
    ),
    formula="p",
    unit="ratio",
    counts=Words(
        "a version for each micro-batch in flight, since every backward is followed by an update: stage i of p has p-i of them.",
        "每次反向之后都会更新，因此每个在途微批次各有一个版本：第 i 个阶段有 p-i 个。",
    ),
    leaves_out=Words(
        "that PipeDream-2BW needs two at every stage, and 1F1B one, as it empties the pipeline before it updates.",
        "PipeDream-2BW 每个阶段只需两个版本；1F1B 更新前先排空流水线，只需一个。",
    ),
    quoted=Quoted({"p": 4}, 4, 0, "Narayanan et al. 2019, SOSP, section 3.3 (formula)"),
)
_VERSIONS: Final = Words("versions of the weights that the stage has at once", "该阶段同时保存的权重版本数")
_COUNT: Final = Words("micro-batches that the stage has saved at once", "该阶段同时保存的微批次数")


def in_flight(asked: Asked) -> Step:
    """Return how many micro-batches of the reported stage are saved at once."""
    report = asked.report
    check_sent([c for c in report.collectives if c.axis == "pp"], "pp")
    return exact_step(asked, _COUNT, {"forwards": report.in_flight}, "ratio")


def weight_versions(asked: Asked) -> Step:
    """Return how many versions of its weights the reported stage has at once."""
    from memcalc.pipelining.schedules import schedule_of, versions

    setup, rank = asked.report.setup, asked.report.rank.number
    count = versions(schedule_of(setup.schedule), rank, setup.pp, setup.micro_batches)
    return exact_step(asked, _VERSIONS, {"versions": count}, "ratio")


TOPIC: Final = Topic(
    name="pipeline",
    title=Words("Pipeline parallelism", "流水线并行"),
    summary=Words(
        "layers in p stages: 2bsh between them, p micro-batches in flight",
        "把层分成 p 个阶段：段间通信 2bsh，最多 p 个微批次在途",
    ),
    text=(
        Words(
            "Each stage has L/p layers with their weights, gradients and states. It sends one tensor of b·s·h to the next "
            "stage for a micro-batch, the least of all axes, so pipelines span nodes. What it costs is the bubble, and the "
            "activations of the micro-batches that are under way.",
            "每个阶段有 L/p 层及其权重、梯度和优化器状态。每个微批次只向下一阶段发送一个 b·s·h 的张量，是各并行方式中最少的，"
            "因此流水线可以跨节点。代价是气泡，以及在途微批次的激活值。",
        ),
        Words(
            "Stages differ: the first has the embedding and most micro-batches in flight, the last has the output head and "
            "the loss. memcalc reports the worst; `memcalc estimate --all-ranks` shows all.",
            "各阶段并不相同：第一个有词嵌入和最多的在途微批次，最后一个有输出层和损失。memcalc 报告最大的那个；"
            "`memcalc estimate --all-ranks` 显示全部。",
        ),
    ),
    cases=(
        Case(
            BETWEEN,
            elements_between_stages,
            Words(
                "With sequence parallelism a rank sends the tokens that it has, 1/t of them.",
                "使用序列并行时，每个 rank 只发送自己的 token，即 1/t。",
            ),
        ),
        Case(
            IN_FLIGHT,
            in_flight,
            Words(
                "Other schedules, and fewer micro-batches than stages, have another count.",
                "其他调度，或微批次少于阶段数时，数目不同。",
            ),
            {"schedule": "1f1b", "pp_rank": 0},
        ),
        Case(
            GPIPE,
            in_flight,
            Words(
                "Megatron has no GPipe; this is torch's ScheduleGPipe.",
                "Megatron 没有 GPipe；这里是 torch 的 ScheduleGPipe。",
            ),
            {"schedule": "gpipe", "engine": "fsdp2", "zero": 3, "pp_rank": 0},
        ),
        Case(
            VERSIONS,
            weight_versions,
            Words("Other stages keep fewer.", "其他阶段保存得更少。"),
            {"schedule": "pipedream", "engine": "fsdp2", "zero": 2, "pp_rank": 0},
        ),
    ),
    options={"gpus": 4, "pp": 4},
    micro_batches=8,
    beside=side_by_side,
)
