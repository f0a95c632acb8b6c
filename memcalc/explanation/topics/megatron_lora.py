"""LoRA as Megatron-Bridge cuts it: adapters of joined tensor-parallel layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.errors import InputError
from memcalc.explanation.exact import exact_step
from memcalc.explanation.folding import ITEMSIZES
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.estimation.report import Item

_BRIDGE: Final = "megatron/bridge/peft/utils.py (formula)"
_LAYER: Final = "self_attention.linear_qkv"

PARAMETERS: Final = Rule(
    title=Words(
        "r·(h + a·d + 2·k·d)/t parameters of an adapter on each rank",
        "每个 rank 上适配器有 r·(h + a·d + 2·k·d)/t 个参数",
    ),
    formula="r·(h + a·d + 2·k·d)/t",
    unit="parameters",
    counts=Words(
        "both thin matrices of one linear_qkv: rank times its inputs and outputs, over the ranks. So it is for "
        "other layers.",
        "一个 linear_qkv 的两个低秩矩阵：秩乘以其输入与输出之和，再除以 rank 数。其他层同理。",
    ),
    leaves_out=Words(
        "that peft's adapters are others: one for each of queries, keys and values, with a matrix A that every "
        "rank has whole.",
        "peft 的适配器与此不同：Q、K、V 各一个，且每个 rank 都有完整的 A 矩阵。",
    ),
    quoted=Quoted({"r": 16, "h": 4096, "a": 32, "k": 32, "d": 128, "t": 2}, 131_072, 0, _BRIDGE),
)
KEPT: Final = Rule(
    title=Words("2·b·s·h bytes are kept for A on every rank", "每个 rank 为 A 保留 2·b·s·h 字节"),
    formula="2·b·s·h",
    unit="bytes",
    counts=Words(
        "the norm's gathered output, the input of the adapter beside a column-parallel layer, with sequence parallelism.",
        "使用序列并行时列并行层旁适配器的输入，即归一化层收集后的输出。",
    ),
    leaves_out=Words(
        "the rank's shard of it, 2·b·s·h/t, which the fused layer keeps as well; what is between A and B, "
        "2·b·s·r; the mask of "
        "a dropout.",
        "融合层另外保留的该 rank 的分片 2·b·s·h/t；A 与 B 之间的 2·b·s·r；dropout 的掩码。",
    ),
    quoted=Quoted({"b": 1, "s": 2048, "h": 4096}, 16_777_216, 0, _BRIDGE),
)
_ON_RANK: Final = Words("parameters of the adapter of linear_qkv on a rank", "一个 rank 上 linear_qkv 适配器的参数")
_SAVED: Final = Words("bytes kept for the adapter's A beside linear_qkv", "为 linear_qkv 旁适配器的 A 保留的字节")


def parameters_on_rank(asked: Asked) -> Step:
    """Return the parameters of the adapter of a layer's linear_qkv."""
    found = _rows(asked, f"{_LAYER}.adapter.", "parameters")
    return exact_step(
        asked, _ON_RANK, {i.name.rsplit(".", 2)[1]: _bytes(i) // ITEMSIZES[i.dtype] for i in found}, "parameters"
    )


def saved_for_a(asked: Asked) -> Step:
    """Return the bytes that the adapter of a layer's linear_qkv keeps of the norm's output."""
    found = [i for i in _rows(asked, f"{_LAYER}: ", "saved_activations") if i.name.endswith("gathered norm")]
    if not found:
        raise InputError("--sequence-parallel off: nothing is gathered; allowed: on, with --tp 2 or more")
    return exact_step(asked, _SAVED, {"gathered norm": _bytes(found[0])})


def _rows(asked: Asked, name: str, component: str) -> list[Item]:
    found = [i for i in asked.report.items if name in i.name and i.component == component]
    if not found:
        raise InputError(
            "--lora-targets: linear_qkv has no adapter; allowed: with --engine megatron and --lora-rank 1 or more"
        )
    return found


def _bytes(item: Item) -> int:
    """Return the bytes of one layer's tensor."""
    return item.nbytes // item.blocks


TOPIC: Final = Topic(
    name="megatron-lora",
    title=Words("LoRA with Megatron-Bridge", "Megatron-Bridge 的 LoRA"),
    summary=Words(
        "both matrices are cut over the ranks; A keeps whole sequences",
        "两个矩阵都在各 rank 间切分；A 保留完整的序列",
    ),
    text=(
        Words(
            "Megatron's layers are joined: linear_qkv has queries, keys and values, linear_fc1 gate and up. "
            "Megatron-Bridge adapts "
            "a joined layer as one, so an adapter has one A and one B. Beside a column-parallel layer A has "
            "rows of a part of "
            "the rank, and its output, of width r, is gathered. Beside a row-parallel layer A has the columns "
            "of the layer's "
            "part of the input, its output is summed over the ranks, and the output of B is gathered.",
            "Megatron 的层是合并的：linear_qkv 包含 Q、K、V，linear_fc1 包含 gate 和 up。"
            "Megatron-Bridge 把合并的层作为一个整体适配，"
            "因此一个适配器只有一个 A 和一个 B。列并行层旁，A 只有一部分秩的行，其宽度为 r 的输出要收集。"
            "行并行层旁，A 只有该层那部分输入对应的列，其输出在各 rank 间求和，B 的输出再收集。",
        ),
        Words(
            "Frozen layers keep no inputs, but their adapters do. With sequence parallelism the layer gives its "
            "adapter the norm's "
            "output of whole sequences, which it has gathered anyway, and A keeps that: what tensor parallelism "
            "does not divide.",
            "冻结的层不保留输入，但它的适配器保留。使用序列并行时，该层把已经收集好的完整序列的归一化输出交给适配器，"
            "A 将其保留："
            "这是张量并行无法均分的部分。",
        ),
    ),
    cases=(
        Case(
            PARAMETERS,
            parameters_on_rank,
            Words("It is the same for every layer that has the adapter.", "每个有该适配器的层都相同。"),
        ),
        Case(
            KEPT,
            saved_for_a,
            Words("It does not depend on the number of ranks.", "与 rank 的数量无关。"),
        ),
    ),
    options={"gpus": 2, "tp": 2, "engine": "megatron", "lora_rank": 16, "precision": "bf16-mixed"},
)
