"""A trillion parameters: 6 · 8 · 64 GPUs."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step, states
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_NARAYANAN: Final = "Narayanan et al. 2021, arXiv 2104.04473, table 1"

GPT_1T: Final = {
    "_name_or_path": "gpt2 with 128 layers of 25600", "model_type": "gpt2",
    "n_embd": 25600, "n_layer": 128, "n_head": 160, "n_positions": 2048, "vocab_size": 51200,
}  # fmt: skip
"""The model of 1008 billion parameters of that table."""

GPUS: Final = Rule(
    title=Words("6 · 8 · 64 = 3072 GPUs", "6 · 8 · 64 = 3072 张 GPU"),
    formula="6·8·64",
    unit="gpus",
    counts=Words(
        "tensor parallelism 8 (a node), pipeline parallelism 64 (128 layers, two a stage), data parallelism 6.",
        "张量并行 8（一个节点）、流水线并行 64（128 层，每阶段两层）、数据并行 6。",
    ),
    leaves_out=Words(
        "that tp · pp = 512 GPUs hold the model once; the factor 6 is for time, not for memory.",
        "tp · pp = 512 张 GPU 就能放下一份模型；系数 6 是为了速度，不是为了显存。",
    ),
    quoted=Quoted({}, 3072, 0, _NARAYANAN),
)
TERABYTES: Final = Rule(
    title=Words("16 bytes per parameter: 16 TB", "每个参数 16 字节：16 TB"),
    formula="16·Φ",
    unit="bytes",
    counts=Words("weights, gradients and Adam's states with mixed precision.", "混合精度下的权重、梯度和 Adam 状态。"),
    leaves_out=Words(
        "activations. 16 TB are 200 GPUs of 80 GB with nothing else on them.",
        "激活值。16 TB 相当于 200 张除此之外什么都不放的 80 GB GPU。",
    ),
    quoted=Quoted({"Φ": 1e12}, 16e12, 0, "Rajbhandari et al., ZeRO, arXiv 1910.02054, section 1"),
)
PER_GPU: Final = Rule(
    title=Words("18·Φ/(t·p) per GPU", "每张 GPU 18·Φ/(t·p)"),
    formula="18·Φ/(t·p)",
    unit="bytes",
    counts=Words(
        "Megatron's 18 bytes per parameter (fp32 main gradients), over the GPUs that split the model.",
        "Megatron 每个参数 18 字节（fp32 主梯度），除以切分模型的 GPU 数。",
    ),
    leaves_out=Words(
        "the embedding, which is on the first stage alone; activations; and the distributed optimizer (--zero 1), which "
        "divides 12 of the 18 by the data-parallel degree.",
        "只在第一个阶段的词嵌入；激活值；以及分布式优化器 (--zero 1)，它把 18 中的 12 再除以数据并行度。",
    ),
    quoted=Quoted(
        {"Φ": 1e12, "t": 8, "p": 64},
        35_156_250_000,
        0,
        f"18 bytes, Megatron-Core documentation; t and p of {_NARAYANAN} (formula)",
    ),
)
_GPUS: Final = Words("GPUs of the setup: dp·tp·pp", "该设置的 GPU 数：dp·tp·pp")


def gpus(asked: Asked) -> Step:
    """Return the GPUs of the setup."""
    setup = asked.report.setup
    step = exact_step(asked, _GPUS, {"gpus": setup.gpus}, "gpus")
    degrees = [setup.dp, setup.tp, setup.pp, setup.cp]
    return step._replace(formula="dp·tp·pp·cp", numbers="·".join(map(str, degrees)))


TOPIC: Final = Topic(
    name="trillion",
    title=Words("A trillion parameters", "一万亿参数"),
    summary=Words("why a trillion parameters took 6 · 8 · 64 GPUs", "为什么训练一万亿参数用了 6 · 8 · 64 张 GPU"),
    text=(
        Words(
            "Tensor parallelism is as wide as a node, since it all-reduces in every layer. Pipeline parallelism takes what "
            "still does not fit. Data parallelism multiplies what fits by as many replicas as the batch and the deadline ask "
            "for.",
            "张量并行以一个节点为界，因为每层都要 all-reduce。仍放不下的部分由流水线并行解决。能放下之后，再按批次大小和工期用"
            "数据并行增加副本。",
        ),
    ),
    cases=(
        Case(GPUS, gpus, Words("This setup has other degrees.", "该设置的并行度不同。")),
        Case(
            TERABYTES,
            states,
            Words("The model is not split here.", "此处没有切分模型。"),
            {"gpus": 1, "tp": 1, "pp": 1, "engine": "none", "global_batch_size": 1},
        ),
        Case(
            PER_GPU,
            states,
            Words(
                "The worst rank is the first stage, which has the embedding beside its layers.",
                "最大的是第一个阶段：除了各层之外还有词嵌入。",
            ),
        ),
    ),
    model=GPT_1T,
    options={"gpus": 3072, "tp": 8, "pp": 64, "recompute": "full"},
    micro_batches=512,
)
