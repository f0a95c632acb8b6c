"""Products in fp8: copies of the weights, and inputs that are kept in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.errors import InputError
from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.estimation.report import Item

_ENGINE: Final = "transformer_engine/pytorch/module/base.py, get_weight_workspace (formula)"
_LAYER: Final = "transformer_engine/pytorch/module/layernorm_linear.py (formula)"

WEIGHTS: Final = Rule(
    title=Words("2·Φ bytes of weights in fp8 beside those of 16 bits", "16 位权重之外的 fp8 权重：2·Φ 字节"),
    formula="2·Φ",
    unit="bytes",
    counts=Words(
        "every weight in 8 bits twice: by rows for the product of forward, by columns for the gradient of its input.",
        "每个权重的两份 8 位副本：按行的用于前向乘法，按列的用于计算输入的梯度。",
    ),
    leaves_out=Words(
        "that embeddings, the head, norms and routers stay in 16 bits; that a Blackwell GPU needs one copy, if a tensor has one "
        "scale; the scales of blocks.",
        "词嵌入、输出头、归一化和路由保持 16 位；若每个张量只有一个缩放因子，Blackwell GPU 只需一份副本；分块的缩放因子。",
    ),
    quoted=Quoted({"Φ": 7e9}, 14e9, 0, _ENGINE),
)
KEPT: Final = Rule(
    title=Words("b·s·h bytes of an input in 8 bits", "8 位的输入：b·s·h 字节"),
    formula="b·s·h",
    unit="bytes",
    counts=Words(
        "the input of one linear_qkv, which its weight's gradient is computed from; in 16 bits it is twice as much.",
        "一个 linear_qkv 的输入，用于计算其权重的梯度；16 位时为其两倍。",
    ),
    leaves_out=Words(
        "the input of the norm before it, 2·b·s·h, which the norm keeps in 16 bits.",
        "其前归一化层的输入 2·b·s·h，由归一化层以 16 位保留。",
    ),
    quoted=Quoted({"b": 1, "s": 2048, "h": 4096}, 8_388_608, 0, _LAYER),
)
_COPIES: Final = Words("weights in fp8 beside those of 16 bits", "16 位权重之外的 fp8 权重")
_INPUT: Final = Words("bytes that linear_qkv of a layer keeps of its input", "一层的 linear_qkv 为其输入保留的字节")


def weights_in_fp8(asked: Asked) -> Step:
    """Return the bytes of the rows and of the columns of all weights in fp8, with their scales."""
    parts = {kind: _sum(asked, "buffers", f"{kind}") for kind in ("fp8 rows", "fp8 columns", "scales")}
    return exact_step(asked, _COPIES, {kind: nbytes for kind, nbytes in parts.items() if nbytes})


def input_in_fp8(asked: Asked) -> Step:
    """Return the bytes that a layer's linear_qkv saves in fp8, with scales."""
    found = [
        i
        for i in _items(asked, "saved_activations", "")
        if "linear_qkv: fp8" in i.name or "linear_qkv: scales" in i.name
    ]
    if not found:
        raise InputError("--model: no layer has a linear_qkv; allowed: llama-7b, mistral-7b, …")
    return exact_step(asked, _INPUT, {i.name.rpartition(": ")[2]: i.nbytes // i.blocks for i in found})


def _items(asked: Asked, component: str, name: str) -> list[Item]:
    if asked.report.setup.fp8_recipe is None:
        raise InputError(
            "--fp8-recipe none: products have 16 bits; allowed: with --engine megatron and --fp8-recipe tensorwise"
        )
    return [i for i in asked.report.items if i.component == component and name in i.name]


def _sum(asked: Asked, component: str, name: str) -> int:
    return sum(i.nbytes for i in _items(asked, component, name))


TOPIC: Final = Topic(
    name="fp8",
    title=Words("Products in fp8", "fp8 矩阵乘法"),
    summary=Words(
        "8-bit inputs are kept, and 8-bit copies of the weights beside them", "保留 8 位的输入，以及权重的 8 位副本"
    ),
    text=(
        Words(
            "With fp8 the linear layers multiply numbers of 8 bits; weights, their main copies, gradients and all other "
            "activations are as before. A layer casts its input and its weight. An operand of a product in fp8 has to lie "
            "along the dim that is summed over, so Hopper needs a transposed copy of each tensor that two products take.",
            "使用 fp8 时，线性层用 8 位数相乘；权重、主权重、梯度和其他激活值不变。每层把输入和权重转换成 8 位。"
            "fp8 乘法的操作数必须沿求和维度排列，因此在 Hopper 上，用于两个乘法的张量需要一份转置副本。",
        ),
        Words(
            "So a layer keeps its input in 8 bits instead of 16, but has two copies of its weight, which stay between steps. "
            "With few tokens fp8 needs more memory than bf16, with many less. Keeping weights in fp8 alone "
            "(--fp8-param-gather) takes the 16-bit ones away, and halves what the distributed optimizer gathers.",
            "因此每层以 8 位而非 16 位保留输入，但其权重多出两份副本，并在各步之间一直保留。"
            "token 少时 fp8 比 bf16 更占显存，token 多时则更省。只保留 fp8 权重（--fp8-param-gather）会省去 16 位权重，"
            "并使分布式优化器的收集通信量减半。",
        ),
    ),
    cases=(
        Case(
            WEIGHTS,
            weights_in_fp8,
            Words(
                "The rest of the parameters is in the embedding, the head and the norms.",
                "其余参数在词嵌入、输出头和归一化中。",
            ),
        ),
        Case(
            KEPT,
            input_in_fp8,
            Words(
                "linear_fc1 keeps as much, linear_fc2 the width of the MLP.",
                "linear_fc1 保留同样多，linear_fc2 保留 MLP 宽度那么多。",
            ),
        ),
    ),
    options={"engine": "megatron", "fp8_recipe": "tensorwise", "precision": "bf16-mixed"},
)
