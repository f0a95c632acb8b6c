"""Compressed gradients: casts, matrices of a low rank, signs; and the memory that error feedback takes."""

from __future__ import annotations

from typing import Final

from memcalc.errors import InputError
from memcalc.explanation.exact import check_sent, exact_step, ratio_step, sent_over
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_POWER_SGD: Final = "PowerSGD, arXiv 1905.13727"

CAST: Final = Rule(
    title=Words(
        "A hook that casts fp32 gradients to 16 bits: half the bytes", "把 fp32 梯度转成 16 位的钩子：通信量减半"
    ),
    formula="2·(n-1)/n·2·Φ",
    unit="bytes",
    counts=Words("a ring all-reduce of two bytes for each gradient.", "每个梯度两字节的环形 all-reduce。"),
    leaves_out=Words(
        "the 16-bit copy of a bucket, and the buffers of the modules, which are broadcast.",
        "每个桶的 16 位副本，以及广播的模块缓冲区。",
    ),
    quoted=Quoted({"n": 8, "Φ": 7e9}, 24.5e9, 0, "torch's fp16_compress_hook (formula)"),
)
LOW_RANK: Final = Rule(
    title=Words(
        "PowerSGD of rank 1: a matrix of h·f numbers as h + f", "秩为 1 的 PowerSGD：h·f 个数的矩阵变为 h + f 个数"
    ),
    formula="h·f/(h + f)",
    unit="ratio",
    counts=Words("one matrix; with rank r it is r times less.", "单个矩阵；秩为 r 时压缩比为其 1/r。"),
    leaves_out=Words(
        "vectors, and matrices too small to be worth it, which are sent as they are.",
        "向量以及压缩不划算的小矩阵会原样发送。",
    ),
    quoted=Quoted({"h": 512, "f": 4608}, 461, 0.2, _POWER_SGD),
)
ERRORS: Final = Rule(
    title=Words("Error feedback: one more copy of the gradients", "误差反馈：多一份梯度大小的显存"),
    formula="4·Φ",
    unit="bytes",
    counts=Words("in fp32, what the last step's low rank left out.", "以 fp32 保存上一步低秩近似遗漏的部分。"),
    leaves_out=Words(
        "P and Q, and two more copies of a bucket while its hook runs.", "P 和 Q，以及钩子运行时一个桶的两份临时副本。"
    ),
    quoted=Quoted({"Φ": 7e9}, 28e9, 0, "torch's powerSGD_hook.py, error_dict (formula)"),
)
SIGNS: Final = Rule(
    title=Words("1-bit Adam: a bit for each parameter, in two phases", "1-bit Adam：两个阶段中每个参数各一比特"),
    formula="2·(n-1)/n·Φ/8",
    unit="bytes",
    counts=Words(
        "an all-to-all of signs, then an all-gather of the averages' signs: a sixteenth of 16-bit gradients.",
        "先对符号做 all-to-all，再对平均值的符号做 all-gather：是 16 位梯度的十六分之一。",
    ),
    leaves_out=Words(
        "scales, padding, and the errors of both phases, 4 + 4/n bytes a parameter that Adam does not have.",
        "缩放因子、填充，以及两个阶段的误差：比 Adam 每个参数多 4 + 4/n 字节。",
    ),
    quoted=Quoted({"n": 8, "Φ": 7e9}, 1_531_250_000, 0, "1-bit Adam, arXiv 2102.02888 (formula)"),
)
_TIMES: Final = Words("all gradients over what the hook sends", "全部梯度与钩子实际发送量之比")
_KEPT: Final = Words("what PowerSGD keeps between steps", "PowerSGD 在各步之间保存的数据")


def compressed_times(asked: Asked) -> Step:
    """Return the bytes of all gradients over those that the hook sends."""
    own, whole = (
        [c for c in report.collectives if c.collective == "all_reduce"]
        for report in (asked.report, asked.again(compression_phase="warmup"))
    )
    check_sent(own, "dp")
    payload = sum(c.payload for c in own)
    if not payload:
        raise InputError("--comm-hook: sends nothing; allowed: a model with weights")
    return ratio_step(asked, _TIMES, "gradients/sent", sum(c.payload for c in whole), payload)


def states_of_the_hook(asked: Asked) -> Step:
    """Return the bytes that PowerSGD's hook keeps between steps."""
    own = [item for item in asked.report.items if item.name.startswith("PowerSGD's")]
    return exact_step(asked, _KEPT, {item.name.removeprefix("PowerSGD's "): item.nbytes for item in own})


_HOOK: Final = {"engine": "ddp", "precision": "bf16-autocast"}

TOPIC: Final = Topic(
    name="gradient-compression",
    title=Words("Compressed gradients", "梯度压缩"),
    summary=Words(
        "what 16-bit hooks, PowerSGD and 1-bit Adam send, and what they keep",
        "16 位钩子、PowerSGD 和 1-bit Adam 发送什么、保存什么",
    ),
    text=(
        Words(
            "On a slow network data parallelism waits for its gradients. There are three ways to send fewer bytes: cast them, "
            "send two thin matrices whose product is nearly the gradient (PowerSGD), or send signs and one scale (1-bit "
            "Adam). The last two lose much of each gradient, so they add what was lost to the next one: error feedback.",
            "网络慢时数据并行要等待梯度。减少字节的办法有三种：转换精度；发送两个乘积近似梯度的窄矩阵 (PowerSGD)；"
            "只发送符号和一个缩放因子 (1-bit Adam)。后两种会丢失较多信息，因此把丢失的部分加到下一步：误差反馈。",
        ),
        Words(
            "Both begin with steps that compress nothing: PowerSGD's first 1,000 by default, 1-bit Adam's first 100,000 "
            "(freeze_step). With 15 % of a run as warm-up, and a sixteenth of the bytes after it, a run sends 0.15 + 0.85/16 of "
            "its bytes, about a fifth. Memory goes the other way: errors stay between steps, and the step itself makes copies.",
            "两者开头都不压缩：PowerSGD 默认前 1000 步，1-bit Adam 默认前 100000 步 (freeze_step)。预热占 15 % 时，"
            "其后为十六分之一，总量为原来的 0.15 + 0.85/16，约五分之一。显存则相反：误差常驻，步骤本身还需要副本。",
        ),
    ),
    cases=(
        Case(
            CAST,
            sent_over("dp"),
            Words("DDP also broadcasts the buffers of the modules.", "DDP 还会广播模块的缓冲区。"),
            {**_HOOK, "comm_hook": "fp16"},
        ),
        Case(
            LOW_RANK,
            compressed_times,
            Words(
                "The rule is of one matrix of the MLP; other matrices are compressed less or more, and vectors not at all.",
                "该法则针对 MLP 的一个矩阵；其他矩阵的压缩比不同，向量不压缩。",
            ),
            {**_HOOK, "comm_hook": "powersgd"},
        ),
        Case(
            ERRORS,
            states_of_the_hook,
            Words("The rest is P and Q.", "多出的部分是 P 和 Q。"),
            {**_HOOK, "comm_hook": "powersgd"},
        ),
        Case(
            SIGNS,
            sent_over("dp"),
            Words("The rest is scales, padding and a flag.", "多出的部分是缩放因子、填充和一个标志。"),
            {"engine": "deepspeed", "zero": 0, "optimizer": "onebit-adam", "precision": "fp16-mixed"},
        ),
    ),
    options={"gpus": 8},
)
