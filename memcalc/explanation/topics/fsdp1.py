"""FSDP1: flat parameters, and what a flat gradient costs."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step, sent_over, states
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_PAPER: Final = "arXiv 2304.11277 and torch/distributed/fsdp/_flat_param.py (formula)"

SHARDS: Final = Rule(
    title=Words("FSDP1: 16Φ/n, of flat fp32 shards", "FSDP1：16Φ/n，扁平的 fp32 分片"),
    formula="(4·Φ + 4·Φ + 4·Φ + 4·Φ)/n",
    unit="bytes",
    counts=Words(
        "fp32 weights, fp32 reduced gradients and both moments, each in n equal parts of every flat parameter.",
        "fp32 权重、fp32 规约梯度和两个矩，每个扁平参数各切成 n 等份。",
    ),
    leaves_out=Words(
        "padding: each parameter begins at 16 bytes, and a flat parameter ends at a multiple of n.",
        "填充：每个参数按 16 字节对齐，扁平参数的末尾补到 n 的整数倍。",
    ),
    quoted=Quoted({"Φ": 7e9, "n": 8}, 14e9, 0, _PAPER),
)
SENDS: Final = Rule(
    title=Words("FSDP1 sends 2Φ bytes twice and 4Φ once", "FSDP1 的通信：两次 2Φ，一次 4Φ"),
    formula="(n-1)/n·(2·Φ + 2·Φ + 4·Φ)",
    unit="bytes",
    counts=Words(
        "bf16 flat parameters gathered in forward (2) and in backward (2), and an fp32 reduce-scatter (4).",
        "前向 (2) 和反向 (2) 收集 bf16 扁平参数，以及一次 fp32 reduce-scatter (4)。",
    ),
    leaves_out=Words(
        "that the root stays gathered after forward; with accelerate gradients are reduced in bf16 (2).",
        "根单元在前向后保持收集状态；accelerate 以 bf16 规约梯度 (2)。",
    ),
    quoted=Quoted({"Φ": 7e9, "n": 8}, 49e9, 0, _PAPER),
)
LAYER: Final = Rule(
    title=Words(
        "A layer's gradient: its parts, the flat copy, the fp32 copy", "一层的梯度：各部分、扁平拷贝、fp32 拷贝"
    ),
    formula="(2·Φ + 4·Φ)/L",
    unit="bytes",
    counts=Words(
        "the flat bf16 gradient (2) beside its fp32 copy (4), from which the reduce-scatter reads.",
        "扁平的 bf16 梯度 (2) 和 reduce-scatter 读取的 fp32 拷贝 (4)。",
    ),
    leaves_out=Words(
        "the moment before: the parameters' gradients (2) and the flat copy of them (2) are there together.",
        "此前的一刻：各参数的梯度 (2) 与其扁平拷贝 (2) 同时存在。",
    ),
    quoted=Quoted({"Φ": 7e9, "L": 32}, 1_312_500_000, 0, _PAPER),
)
_FLAT: Final = Words("a layer's flat gradient and its copy", "一层的扁平梯度及其拷贝")


def flat_gradients(asked: Asked) -> Step:
    """Return the bytes of the largest layer's flat gradient, and of the copy that is reduced."""
    from memcalc.engines.fsdp1.engine import unit_kinds
    from memcalc.setup.setup import DTYPES

    setup = asked.report.setup
    elements = max(kind.flat.unpadded for kind in unit_kinds(asked.report.model, setup) if kind.is_layer)
    gradient, reduced = setup.compute_dtype, DTYPES[setup.grad_dtype]
    copy = 0 if gradient is reduced else elements * reduced.itemsize
    return exact_step(asked, _FLAT, {"gradient": elements * gradient.itemsize, "copy": copy})


_ENGINE: Final = {"engine": "fsdp1"}
TOPIC: Final = Topic(
    name="fsdp1",
    title=Words("FullyShardedDataParallel (FSDP1)", "FullyShardedDataParallel (FSDP1)"),
    summary=Words("flat parameters, and how FSDP1 differs from FSDP2", "扁平参数，以及 FSDP1 与 FSDP2 的区别"),
    text=(
        Words(
            "FSDP1 joins the parameters of a layer into one flat parameter and cuts that into n parts. They are gathered into "
            "one tensor, of which the layer's weights are views: nothing is copied out as in FSDP2.",
            "FSDP1 把一层的参数拼成一个扁平参数再切成 n 份。收集到的是一个张量，层的权重是它的视图：不像 FSDP2 那样还要拷出。",
        ),
        Words(
            "Backward pays for it. Autograd keeps the gradients of all the layer's parameters until the last one is there, and "
            "then copies them into one flat gradient, which is cast to be reduced.",
            "代价在反向。autograd 把该层所有参数的梯度保留到最后一个到齐，再拷成一个扁平梯度，并转换精度后规约。",
        ),
    ),
    cases=(
        Case(
            SHARDS,
            states,
            Words("A layer's whole gradient is there, too, while it is reduced.", "规约时还存在一层的完整梯度。"),
            _ENGINE,
        ),
        Case(
            SENDS,
            sent_over("dp"),
            Words("The root is gathered once and not again in backward.", "根单元只收集一次，反向不再收集。"),
            _ENGINE,
        ),
        Case(
            LAYER,
            flat_gradients,
            Words("The embeddings and the head are in no layer.", "词嵌入和输出层不属于任何层。"),
            _ENGINE,
        ),
    ),
    options={"gpus": 8, "zero": 3},
)
