"""Offload: what the host keeps of a step, beside DeepSpeed's own rule for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.errors import InputError
from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.explanation.topic import Asked

_SOURCE: Final = "DeepSpeed 0.19.8, estimate_zero3_model_states_mem_needs (formula)"
_PAPER: Final = "Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857"
_ZERO_3: Final = {"zero": 3, "engine": "deepspeed", "offload_params": "cpu", "offload_optimizer": "cpu"}
_NVME: Final = {"zero": 3, "engine": "deepspeed", "offload_params": "cpu", "offload_optimizer": "nvme"}
_WEIGHTS: Final = {"zero": 3, "engine": "deepspeed", "offload_params": "cpu", "offload_optimizer": "none"}

ALL: Final = Rule(
    title=Words(
        "The host of one node: its share of 18Φ, and half as much again", "单节点主机内存：18Φ 中的一份，再加一半"
    ),
    formula="18·Φ·1.5·g/N",
    unit="bytes",
    counts=Words(
        "16-bit weights, fp32 weights, gradients in fp32 and Adam's two moments, with a factor of 1.5 for buffers.",
        "16 位权重、fp32 权重、fp32 梯度和 Adam 的两个矩，再乘以 1.5 作为缓冲区余量。",
    ),
    leaves_out=Words("the processes themselves, and data loaders.", "进程本身以及数据加载器。"),
    quoted=Quoted({"Φ": 1e9, "g": 8, "N": 8}, 27e9, 0, _SOURCE),
)
WEIGHTS: Final = Rule(
    title=Words("The weights alone: a node's share of 2Φ", "只卸载权重：2Φ 中单节点的一份"),
    formula="2·Φ·g/N",
    unit="bytes",
    counts=Words("the 16-bit weights, shared out over all GPUs.", "16 位权重，切在所有 GPU 上。"),
    leaves_out=Words("what pinned blocks have beyond their tensors.", "锁页内存块中超出张量的部分。"),
    quoted=Quoted({"Φ": 1e9, "g": 8, "N": 8}, 2e9, 0, f"{_PAPER} (formula)"),
)
FILES: Final = Rule(
    title=Words(
        "ZeRO-Infinity's optimizer in files: a node's share of 16Φ", "ZeRO-Infinity 的优化器文件：16Φ 中单节点的一份"
    ),
    formula="16·Φ·g/N",
    unit="bytes",
    counts=Words("weights, gradients and Adam's two moments, all in fp32.", "fp32 的权重、梯度和 Adam 的两个矩。"),
    leaves_out=Words(
        "what is in the host's memory: 16-bit weights and gradients, and four fp32 buffers of each rank's largest sub-group.",
        "主机内存中的部分：16 位权重与梯度，以及每个 rank 四个最大子组大小的 fp32 缓冲区。",
    ),
    quoted=Quoted(
        {"Φ": 1e12, "g": 16, "N": 16},
        16e12,
        0,
        "Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 3 (formula)",
    ),
)
_ON_HOST: Final = Words("in the memory of a node's host, by kind", "一个节点的主机内存，按种类")
_IN_FILES: Final = Words("in the files of a node", "一个节点的文件")
_BESIDE_FILES: Final = Words(
    "beside the files, in the memory of the node's host (not in the rule)", "文件之外，该节点的主机内存（法则不计）"
)
_BLOCKS: Final = Words(
    "The tensors have 20 bytes for each weight: 16-bit gradients too. torch rounds each pinned block up to a power "
    "of two, which is all that is left of the factor.",
    "张量共为每个权重 20 字节：还有一份 16 位梯度。torch 把每个锁页内存块向上取到 2 的幂，公式中的余量只剩这一项。",
)
_FILES: Final = Words(
    "Parts of gradients of less than 1 MiB have no file: they stay on the GPU until the update.",
    "小于 1 MiB 的梯度分片没有文件：它们留在 GPU 上直到更新。",
)
_POWERS: Final = Words(
    "One pinned block for each rank is rounded up to a power of two.",
    "每个 rank 有一个锁页内存块，大小向上取到 2 的幂。",
)


def on_host(asked: Asked) -> Step:
    """Return the bytes of the memory of a node's host."""
    return exact_step(asked, _ON_HOST, _memory(asked))


def in_files(asked: Asked) -> Step:
    """Return the bytes of a node's files."""
    return exact_step(asked, _IN_FILES, {"nvme": _by_kind(asked)["nvme"]})


def beside_files(asked: Asked) -> tuple[Step, ...]:
    """Return the bytes that the host has in its memory while the states are in files."""
    parts = _memory(asked)
    numbers = " + ".join(map(str, parts.values()))
    return (Step(_BESIDE_FILES.said(asked.language), " + ".join(parts), numbers, sum(parts.values()), "bytes"),)


def _memory(asked: Asked) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in _by_kind(asked).items() if nbytes and kind != "nvme"}


def _by_kind(asked: Asked) -> dict[str, int]:
    from memcalc.offload.host import totals

    if asked.report.states_only:
        raise InputError("--params: a bare number of parameters has no rows of the host; allowed: --model")
    return totals(asked.report.host)


TOPIC: Final = Topic(
    name="offload",
    title=Words("Offload: what the host keeps", "卸载：主机内存里放什么"),
    summary=Words("what offload moves to the host, and what stays on the GPU", "卸载把什么移到主机，GPU 上还剩什么"),
    text=(
        Words(
            "The optimizer is used once in a step, so its states can lie in the host's memory, and the CPU updates the weights "
            "there. Weights are used twice in a micro-batch. If the host has them, each rank copies its part to the GPU before "
            "every all-gather. The GPU keeps what is gathered, the activations, and the buffers of the reduction.",
            "优化器每步只用一次，因此其状态可以放在主机内存里，由 CPU 更新权重。权重在每个微批次中要用两次：放在主机上时，"
            "每个 rank 在每次 all-gather 之前把自己的分片拷到 GPU。GPU 上保留收集到的权重、激活值和规约用的缓冲区。",
        ),
    ),
    cases=(
        Case(ALL, on_host, _BLOCKS, _ZERO_3),
        Case(WEIGHTS, on_host, _POWERS, _WEIGHTS),
        Case(FILES, in_files, _FILES, _NVME, beside_files),
    ),
    options={"gpus": 8, "precision": "bf16-mixed"},
)
