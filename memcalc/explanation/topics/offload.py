"""Offload: what the host keeps of a step, beside DeepSpeed's own rule for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.explanation.exact import exact_step
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.explanation.step import Step
    from memcalc.explanation.topic import Asked

_SOURCE: Final = "DeepSpeed 0.19.8, estimate_zero3_model_states_mem_needs (formula)"
_ZERO_3: Final = {"zero": 3, "engine": "deepspeed", "offload_params": "cpu", "offload_optimizer": "cpu"}
_NVME: Final = {"zero": 3, "engine": "deepspeed", "offload_params": "cpu", "offload_optimizer": "nvme"}
_WEIGHTS: Final = {"zero": 3, "engine": "deepspeed", "offload_params": "cpu", "offload_optimizer": "none"}

ALL: Final = Rule(
    title=Words("The host of one node: 18Φ, and half as much again", "单节点主机内存：18Φ，再加一半"),
    formula="18·Φ·1.5",
    unit="bytes",
    counts=Words(
        "16-bit weights, fp32 weights, gradients in fp32 and Adam's two moments, with a factor of 1.5 for buffers.",
        "16 位权重、fp32 权重、fp32 梯度和 Adam 的两个矩，再乘以 1.5 作为缓冲区余量。",
    ),
    leaves_out=Words("the processes themselves, and data loaders.", "进程本身以及数据加载器。"),
    quoted=Quoted({"Φ": 1e9}, 27e9, 0, _SOURCE),
)
WEIGHTS: Final = Rule(
    title=Words("The weights alone: 2Φ", "只卸载权重：2Φ"),
    formula="2·Φ",
    unit="bytes",
    counts=Words("the 16-bit weights, shared out over the GPUs of one node.", "16 位权重，切在单个节点的各张 GPU 上。"),
    leaves_out=Words("what pinned blocks have beyond their tensors.", "锁页内存块中超出张量的部分。"),
    quoted=Quoted({"Φ": 1e9}, 2e9, 0, "Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857 (formula)"),
)
FILES: Final = Rule(
    title=Words("ZeRO-Infinity's optimizer in files: 16Φ", "ZeRO-Infinity 的优化器在文件中：16Φ"),
    formula="16·Φ",
    unit="bytes",
    counts=Words("weights, gradients and Adam's two moments, all in fp32.", "fp32 的权重、梯度和 Adam 的两个矩。"),
    leaves_out=Words(
        "what is on the host: 16-bit weights and gradients, and buffers.", "主机上的 16 位权重与梯度，以及缓冲区。"
    ),
    quoted=Quoted({"Φ": 1e12}, 16e12, 0, "Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 3 (formula)"),
)
_ON_HOST: Final = Words("on the host of a node, by kind of memory", "一个节点的主机内存，按内存种类")
_BLOCKS: Final = Words(
    "The tensors have 20 bytes for each weight: 16-bit gradients too. torch rounds each pinned block up to a power "
    "of two, which is all that is left of the factor.",
    "张量共为每个权重 20 字节：还有一份 16 位梯度。torch 把每个锁页内存块向上取到 2 的幂，公式中的余量只剩这一项。",
)
_FILES: Final = Words(
    "Parts of gradients of less than 1 MiB have no file: they stay on the GPU until the update. The host has the 16-bit weights "
    "and gradients besides, and four fp32 buffers of the largest sub-group of each rank.",
    "小于 1 MiB 的梯度分片没有文件：它们留在 GPU 上直到更新。主机上另有 16 位权重与梯度，以及每个 rank 四个最大子组大小的 fp32 "
    "缓冲区。",
)
_POWERS: Final = Words(
    "One pinned block for each rank is rounded up to a power of two.",
    "每个 rank 有一个锁页内存块，大小向上取到 2 的幂。",
)


def on_host(asked: Asked) -> Step:
    """Return the bytes of a node's host memory."""
    from memcalc.offload.host import totals

    parts = {kind: nbytes for kind, nbytes in totals(asked.report.host).items() if nbytes}
    return exact_step(asked, _ON_HOST, parts)


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
        Case(FILES, on_host, _FILES, _NVME),
    ),
    options={"gpus": 8, "precision": "bf16-mixed"},
)
