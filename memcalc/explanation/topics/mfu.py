"""MFU and HFU: FLOPs of the model over what the GPU could do."""

from __future__ import annotations

from typing import Final

from memcalc.errors import InputError
from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words
from memcalc.timing.step import StepTime
from memcalc.units import show_seconds

_NARAYANAN: Final = "Narayanan et al. 2021, arXiv 2104.04473, section 5.1"

SIX: Final = Rule(
    title=Words("6·Φ·T FLOP for a step", "每步 6·Φ·T FLOP"),
    formula="6·Φ·T",
    unit="flop",
    counts=Words(
        "2 FLOP in forward and 4 in backward for each parameter and token: a multiplication and an addition each.",
        "每个参数每个 token：前向 2 FLOP，反向 4 FLOP（一次乘法加一次加法计 2）。",
    ),
    leaves_out=Words(
        "attention's products of queries, keys and values; recomputation; and it counts the embedding, which multiplies "
        "nothing.",
        "注意力中 Q、K、V 之间的乘法；重计算；另外它把不做乘法的词嵌入也算了进去。",
    ),
    quoted=Quoted(
        {"Φ": 7e9, "T": 2048}, 86_016_000_000_000, 0, "Kaplan et al., arXiv 2001.08361, section 2.1 (formula)"
    ),
)
GPT: Final = Rule(
    title=Words(
        "A GPT, with attention and head: 72·B·L·s·h²·(1 + s/6h + V/12hL)",
        "GPT（含注意力和输出层）：72·B·L·s·h²·(1 + s/6h + V/12hL)",
    ),
    formula="72·b·m·L·s·h²·(1 + s/(6·h) + V/(12·h·L))",
    unit="flop",
    counts=Words(
        "the products of 12h² weights a layer, attention over all s² pairs, and the output head, in forward and backward.",
        "每层 12h² 权重的乘法、全部 s² 对的注意力，以及输出层；前向和反向。",
    ),
    leaves_out=Words(
        "recomputation, which makes 96 of the 72; a gated MLP, grouped heads, and that a causal mask needs half of the pairs.",
        "重计算（系数由 72 变为 96）；门控 MLP、分组 KV 头；以及因果掩码只需要一半的注意力对。",
    ),
    quoted=Quoted(
        {"b": 1, "m": 1, "L": 128, "s": 2048, "h": 25600, "V": 51200},
        12_550_538_684_006_400,
        0,
        "Korthikanti et al., arXiv 2205.05198, equation 7 (formula)",
    ),
)
UTILISATION: Final = Rule(
    title=Words("Utilisation: what is done over what could be", "利用率：实际完成与峰值之比"),
    formula="F/P",
    unit="ratio",
    counts=Words(
        "MFU counts the FLOPs that the model needs, HFU also those that recomputation does again.",
        "MFU 只计模型所需的 FLOP，HFU 还计入重计算的 FLOP。",
    ),
    leaves_out=Words(
        "which of the two a paper means. The published 52 % of an A100 count recomputation, so they are HFU; without it they "
        "are 3/4 of that, 39 %.",
        "论文指的是哪一个。A100 上发表的 52% 计入了重计算，因此是 HFU；不计则为其 3/4，即 39%。",
    ),
    quoted=Quoted({"F": 163e12, "P": 312e12}, 0.52, 0.005, _NARAYANAN),
)
_ESTIMATED: Final = Words(
    "memcalc's MFU of a step on {gpu}, estimated at {seconds}", "memcalc 对 {gpu} 上一步的 MFU 估计（每步 {seconds}）"
)
_FLOPS: Final = Words("matrix products of the step on a GPU", "一张 GPU 一步的矩阵乘法")


def flops_of_the_step(asked: Asked) -> Step:
    """Return the FLOPs of forward and backward, without recomputation."""
    flops = asked.report.flops
    if not flops["total"]:
        raise InputError("--params: a bare number of parameters has no products of matrices; allowed: --model")
    return exact_step(asked, _FLOPS, {phase: flops[phase] for phase in ("forward", "backward")}, "flop")


def estimated(asked: Asked) -> Step:
    """Return the model's FLOPs over what the GPU could do in the estimated time of a step. Raise InputError if the time or the
    GPU's rate is not known."""
    time, gpu = asked.report.time, asked.report.gpu
    if not isinstance(time, StepTime):
        raise InputError(f"--gpu: the time of a step is not known: {time.missing}")
    if gpu is None or time.mfu is None or time.peak is None:
        raise InputError("--gpu: its rate in 16 bits is not known; allowed: a GPU of `memcalc gpus`")
    words = _ESTIMATED.said(asked.language, gpu=gpu.full_name, seconds=show_seconds(time.seconds))
    flops = round(time.mfu * time.seconds * time.peak)
    return Step(words, "FLOP/(seconds·P)", f"{flops}/({time.seconds:.4g}·{time.peak:.4g})", time.mfu, "ratio")


TOPIC: Final = Topic(
    name="mfu",
    title=Words("Model FLOPs utilisation", "模型算力利用率 (MFU)"),
    summary=Words("6Φ per token, MFU and HFU", "每个 token 6Φ，以及 MFU 与 HFU"),
    text=(
        Words(
            "MFU is the FLOPs that the model needs for the tokens of a second, over the data sheet's dense rate: "
            "6·Φ·tokens per second / peak. By throughput it is the measured tokens per second over those that the GPU would "
            "do at its peak: the same number.",
            "MFU 等于每秒所处理 token 需要的模型 FLOP 除以数据手册上的稠密峰值：6·Φ·每秒 token 数/峰值。按吞吐量算，"
            "就是实测的每秒 token 数除以峰值下可处理的 token 数：结果相同。",
        ),
        Words(
            "Take the dense rate: data sheets also print one twice as large, with sparsity, which training does not reach. "
            "With --gpu, `memcalc estimate` prints the time of a step, with its MFU.",
            "应使用稠密峰值：数据手册上还有一个带稀疏性的两倍数字，训练用不上。加上 --gpu，`memcalc estimate` 会给出"
            "每步的时间及其 MFU。",
        ),
    ),
    cases=(
        Case(
            SIX,
            flops_of_the_step,
            Words(
                "Attention's products come on top, and the embedding's parameters multiply nothing.",
                "注意力的乘法要另加；词嵌入的参数不参与乘法。",
            ),
        ),
        Case(
            GPT,
            flops_of_the_step,
            Words(
                "The formula is of a GPT whose MLP is 4h wide; a fused attention kernel makes the scores again in backward.",
                "该公式针对 MLP 宽度为 4h 的 GPT；融合注意力核在反向中会重新计算分数。",
            ),
            {"attention": "eager"},
        ),
        Case(
            UTILISATION,
            estimated,
            Words(
                "Put the throughput that you measure into the rule. memcalc's own number is an estimate of the time.",
                "请把实测吞吐量代入法则。memcalc 的数字是对时间的估计。",
            ),
        ),
    ),
    model="gpt2-xl",
    options={"gpu": "a100-80gb"},
)
