"""PipeDream: no bubble, and older versions of the weights in its place."""

from __future__ import annotations

from typing import Final

from memcalc.errors import InputError
from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

OLDER: Final = Rule(
    title=Words("The first stage keeps p-1 older versions of its weights", "第一个阶段要多存 p-1 个旧版本的权重"),
    formula="2·(p-1)·Φ/p",
    unit="bytes",
    counts=Words(
        "a version for each micro-batch in flight besides the newest one, in 16 bits, of Φ/p weights.",
        "除最新版本外，每个在途微批次一个版本，16 位，每个版本 Φ/p 个权重。",
    ),
    leaves_out=Words(
        "that later stages keep fewer, p-1-i on stage i, and that stages are not equal: the first has the embedding.",
        "后面的阶段存得更少（阶段 i 为 p-1-i 个）；各阶段并不相等，第一个阶段还有词嵌入。",
    ),
    quoted=Quoted({"p": 4, "Φ": 8e9}, 12e9, 0, "Narayanan et al. 2019, PipeDream, SOSP, section 3.3 (formula)"),
)
_OLDER: Final = Words("older versions of the weights on this rank", "该 rank 上的旧版本权重")


def older(asked: Asked) -> Step:
    """Return the bytes of older versions of the weights."""
    versions = [item for item in asked.report.items if item.component == "parameters" and "older version" in item.name]
    if not versions:
        setup = asked.report.setup
        raise InputError(f"--schedule {setup.schedule}: keeps one version of the weights here; allowed: pipedream")
    return exact_step(asked, _OLDER, {"versions": sum(item.nbytes for item in versions)})


TOPIC: Final = Topic(
    name="pipedream",
    title=Words("PipeDream: a pipeline that is never emptied", "PipeDream：从不排空的流水线"),
    summary=Words("no bubble, at the price of older versions of the weights", "没有气泡，代价是旧版本的权重"),
    text=(
        Words(
            "GPipe and 1F1B empty the pipeline before each update. PipeDream updates a stage's weights after every backward "
            "and goes on, so nobody waits. But the backward of a micro-batch needs the weights of its forward, which are not "
            "the newest any more. A stage stashes a version for each micro-batch in flight: p-i of them on stage i.",
            "GPipe 和 1F1B 在每次更新前排空流水线。PipeDream 在每次反向之后就更新该阶段的权重并继续，因此没有等待。"
            "但一个微批次的反向需要其前向所用的权重，而那已不是最新版本。"
            "每个阶段为每个在途微批次保存一个版本：阶段 i 有 p-i 个。",
        ),
        Words(
            "PipeDream-2BW adds gradients up over m micro-batches and needs two versions. PipeDream-Flush is 1F1B: one version, "
            "and the bubble is back. As weights are older than the gradients that change them, the first two train another "
            "mathematics than one GPU does.",
            "PipeDream-2BW 对 m 个微批次累加梯度，只需两个版本。PipeDream-Flush 就是 1F1B：只有一个版本，但气泡又回来了。"
            "由于权重比用来更新它的梯度更旧，前两者的训练在数学上与单卡不同。",
        ),
    ),
    cases=(
        Case(
            OLDER,
            older,
            Words(
                "The first stage has the embedding beside its layers. Versions are sharded like the weights, over dp.",
                "第一个阶段除层以外还有词嵌入。各版本与权重一样在数据并行组内分片。",
            ),
        ),
    ),
    options={"gpus": 4, "pp": 4, "engine": "fsdp2", "zero": 2, "schedule": "pipedream", "pp_rank": 0},
    micro_batches=8,
)
