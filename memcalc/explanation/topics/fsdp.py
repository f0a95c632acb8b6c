"""FSDP2: fp32 shards, and units that are gathered for their turn."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step, sent_over, states
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_FSDP: Final = "torch/distributed/fsdp/_fully_shard (formula)"

SHARDS: Final = Rule(
    title=Words("FSDP: 16Φ/n, of fp32 shards", "FSDP：16Φ/n，全部为 fp32 分片"),
    formula="(4·Φ + 4·Φ + 4·Φ + 4·Φ)/n",
    unit="bytes",
    counts=Words(
        "fp32 weights, fp32 reduced gradients and both moments, each in n parts. There are no masters: the shards are fp32.",
        "fp32 权重、fp32 规约梯度和两个矩，各切成 n 份。没有主权重：分片本身就是 fp32。",
    ),
    leaves_out=Words(
        "activations, and the bf16 units that are gathered while they run.", "激活值，以及运行时收集的 bf16 单元。"
    ),
    quoted=Quoted({"Φ": 7e9, "n": 8}, 14e9, 0, _FSDP),
)
SENDS: Final = Rule(
    title=Words("FSDP sends 2Φ bytes twice and 4Φ once", "FSDP 的通信：两次权重收集、一次梯度规约"),
    formula="(n-1)/n·(2·Φ + 2·Φ + 4·Φ)",
    unit="bytes",
    counts=Words(
        "bf16 weights gathered in forward (2) and again in backward (2), and an fp32 reduce-scatter of the gradients (4).",
        "前向收集 bf16 权重 (2)，反向再收集一次 (2)，以及 fp32 梯度的 reduce-scatter (4)。",
    ),
    leaves_out=Words(
        "that the root unit stays gathered after forward, and that accumulation repeats all of it.",
        "根单元在前向后保持收集状态；梯度累积会重复全部通信。",
    ),
    quoted=Quoted({"Φ": 7e9, "n": 8}, 49e9, 0, _FSDP),
)
LARGEST: Final = Rule(
    title=Words("On top: the gathered weights of two layers", "额外：两层的完整权重"),
    formula="2·2·Φ/L",
    unit="bytes",
    counts=Words(
        "the layer that runs and the one that is fetched ahead, in bf16.", "正在运行的层和预取的下一层，bf16。"
    ),
    leaves_out=Words(
        "the root unit (embeddings and output head), the flat buffers that weights arrive in and gradients leave from.",
        "根单元（词嵌入和输出层），以及权重到达、梯度离开时的扁平缓冲区。",
    ),
    quoted=Quoted({"Φ": 7e9, "L": 32}, 875e6, 0, _FSDP),
)
_GATHERED: Final = Words("buffers of gathered weights and reductions", "收集权重与规约的缓冲区")
_OTHER: Final = Words(
    "Each parameter is padded to a multiple of n rows; bf16 states halve the bytes.",
    "每个参数会填充到 n 行的整数倍；纯 bf16 时字节减半。",
)


def gathered(asked: Asked) -> Step:
    """Return the bytes of the buffers in which FSDP gathers weights and reduces gradients: the most in a step."""
    words = ("gather", "reduce-scatter", "gradients, divided")
    parts: dict[str, int] = {}
    for item in asked.report.items:
        kind = next((word for word in words if item.component == "buffers" and word in item.name), None)
        if kind is not None:
            parts[kind] = parts.get(kind, 0) + item.nbytes
    return exact_step(asked, _GATHERED, parts)


TOPIC: Final = Topic(
    name="fsdp",
    title=Words("Fully sharded data parallelism (FSDP2)", "完全切分的数据并行 (FSDP2)"),
    summary=Words("torch's ZeRO-3: fp32 shards, units gathered in turn", "PyTorch 的 ZeRO-3：fp32 分片，逐单元收集"),
    text=(
        Words(
            "Each layer is a unit. Before it runs, its weights are gathered from all ranks; after it, they are freed again "
            "(reshard_after_forward). Backward gathers the unit once more and reduce-scatters its gradients.",
            "每层是一个单元。运行前从所有 rank 收集其权重，运行后释放 (reshard_after_forward)。反向再收集一次，并对梯度做 "
            "reduce-scatter。",
        ),
    ),
    cases=(
        Case(SHARDS, states, _OTHER, {"engine": "fsdp2"}),
        Case(
            SENDS,
            sent_over("dp"),
            Words(
                "The root unit, with embeddings and output head, is gathered once and not again in backward.",
                "包含词嵌入和输出层的根单元只收集一次，反向时不再收集。",
            ),
            {"engine": "fsdp2"},
        ),
        Case(
            LARGEST,
            gathered,
            Words(
                "The root unit stays gathered in backward, a unit's weights arrive in a flat buffer before they are copied "
                "out, "
                "and its gradients leave from an fp32 copy.",
                "反向期间根单元保持收集状态；单元的权重先到达扁平缓冲区再拷出；梯度从一份 fp32 副本发出。",
            ),
            {"engine": "fsdp2"},
        ),
    ),
    options={"gpus": 8, "zero": 3},
)
