"""Activations on the host: what Megatron moves there, module by module."""

from __future__ import annotations

from typing import Final

from memcalc.errors import InputError
from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_MANAGER: Final = "megatron/core/pipeline_parallel/fine_grained_activation_offload.py"

CORE: Final = Rule(
    title=Words("Core attention moved to the host: 8·s·b·h per layer", "注意力核心移到主机：每层 8·s·b·h"),
    formula="8·s·b·h·L",
    unit="bytes",
    counts=Words(
        "queries, keys, values and the output, 2·s·b·h bytes each in 16 bits, of every layer.",
        "每层的 Q、K、V 和输出，16 位各 2·s·b·h 字节。",
    ),
    leaves_out=Words(
        "that fewer key and value heads are smaller; that the last layer's stay on the GPU, as backward needs them at once; and "
        "that a pinned block is rounded up to a power of two.",
        "K、V 头较少时更小；最后一层留在 GPU 上，因为反向马上要用；锁页内存块向上取整到 2 的幂。",
    ),
    quoted=Quoted({"s": 4096, "b": 1, "h": 4096, "L": 32}, 4_294_967_296, 0, f"{_MANAGER} (formula)"),
)
_HOST: Final = Words("activations in the host's pinned memory, of one GPU", "一块 GPU 在主机锁页内存中的激活值")


def on_host(asked: Asked) -> Step:
    """Return the bytes that one GPU's activations take on the host."""
    report = asked.report
    if report.setup.offload_modules is None:
        raise InputError("--offload-modules: the rule is about activations on the host; allowed: core_attn")
    ranks = min(report.setup.gpus, report.setup.gpus_per_node)
    return exact_step(asked, _HOST, {"pinned": sum(item.nbytes for item in report.host) // ranks})


TOPIC: Final = Topic(
    name="activation-offload",
    title=Words("Activations on the host", "激活值卸载到主机"),
    summary=Words(
        "saved tensors go to the host in forward, and come back before backward needs them",
        "前向时把保存的张量移到主机，反向需要之前取回",
    ),
    text=(
        Words(
            "What a module saves is copied to the host when the module has run, and back while backward runs what comes before. "
            "That costs no FLOPs, as recomputation does, but the bytes have to go over PCIe twice in the time of a layer. The "
            "last layer's stay: there is no time to bring them back.",
            "模块运行之后，它保存的张量被复制到主机；反向运行其前面的部分时再复制回来。与重计算不同，这不增加运算量，"
            "但这些字节要在一层的时间内两次经过 PCIe。最后一层不移动：没有时间取回。",
        ),
        Words(
            "A tensor that two modules have saved is copied twice, and is freed on the GPU when the last of them lets go: the "
            "output of attention stays as long as the projection after it keeps it.",
            "被两个模块保存的张量会复制两次，最后一个模块放手后才在 GPU 上释放："
            "只要后面的投影还保存着注意力的输出，它就留在 GPU 上。",
        ),
    ),
    cases=(
        Case(
            CORE,
            on_host,
            Words(
                "The last layer's stay on the GPU. With a pipeline the first stages have several micro-batches on the host.",
                "最后一层留在 GPU 上。使用流水线时，前面的阶段有多个微批在主机上。",
            ),
            {"engine": "megatron", "gpus": 1, "offload_modules": "core_attn"},
        ),
    ),
)
