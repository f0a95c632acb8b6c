"""Why a row exists, in one sentence: by its place in the model, by the state that it is, or by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.explanation.buffers import buffer_reason, kind_of
from memcalc.explanation.places import REFERENCE, place_of
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.core.rows import Item
    from memcalc.estimation.report import Report

WEIGHTS: Final = Words(
    "Forward and backward multiply by them in {dtype}, {itemsize} bytes an element.",
    "前向和反向都以 {dtype} 使用它们，每个元素 {itemsize} 字节。",
)
WEIGHTS_OF_A_SHARD: Final = Words(
    "Each of {shards} ranks keeps 1/{shards} of every weight between uses; a module's weights are gathered when it runs.",
    "{shards} 个 rank 各保留每个权重的 1/{shards}；模块运行时才收集完整权重。",
)
GRADIENTS: Final = Words(
    "Backward makes one for every trained weight, and the optimizer's step reads it.",
    "反向传播为每个可训练权重产生一个梯度，优化器更新时读取它。",
)
GRADIENTS_OF_A_SHARD: Final = Words(
    "After the reduction a rank keeps the sum for its own part of the weights, 1/{shards} of them.",
    "规约之后，每个 rank 只保留自己负责的那 1/{shards} 权重的梯度之和。",
)

WEIGHTS_OF_A_REFERENCE: Final = Words(
    "The reference is a copy of the policy that never trains; its log-probabilities are what the policy is compared with.",
    "参考模型是策略模型的一份不训练的副本；策略模型与它的对数概率作比较。",
)

_STATES: Final = {
    "fp32 master": Words(
        "An update is mostly smaller than the rounding of a 16-bit weight, so the optimizer adds it to an fp32 copy.",
        "更新量通常小于 16 位权重的舍入误差，所以优化器把它加到一份 fp32 副本上。",
    ),
    "exp_avg": Words("Adam's first moment: the running mean of the gradient.", "Adam 的一阶矩：梯度的滑动平均。"),
    "exp_avg_sq": Words(
        "Adam's second moment: the running mean of the squared gradient.", "Adam 的二阶矩：梯度平方的滑动平均。"
    ),
    "momentum_buffer": Words("Momentum: the decaying sum of the gradients.", "动量：梯度的衰减累加。"),
    "row_var": Words(
        "Adafactor keeps the second moment of a matrix as the means of its rows and columns alone.",
        "Adafactor 只保存矩阵二阶矩的行均值和列均值。",
    ),
    "variance": Words(
        "Adafactor does not factor the second moment of a vector.", "向量的二阶矩在 Adafactor 中不做分解。"
    ),
    "state1": Words("The first moment in 8 bits.", "8 位的一阶矩。"),
    "state2": Words("The second moment in 8 bits.", "8 位的二阶矩。"),
    "qmap1": Words(
        "The table of the values that 8 bits stand for.",
        "8 位编码对应的数值表。",
    ),
    "step": Words(
        "The number of steps, which Adam's bias correction needs.",
        "步数，Adam 的偏差修正需要它。",
    ),
    "flat fp32 copy of the weights": Words(
        "The optimizer updates flat fp32 weights: one contiguous copy of this rank's partition.",
        "优化器更新扁平的 fp32 权重：本 rank 分片的一份连续副本。",
    ),
    "absmax1": Words("The scale of each block of 8-bit states.", "每个 8 位状态块的缩放因子。"),
}
_SAME_STATE: Final = {
    "fp32 main weight": "fp32 master", "col_var": "row_var", "absmax2": "absmax1", "qmap2": "qmap1",
}  # fmt: skip


def reason(report: Report, item: Item, language: str) -> str:
    """Return the sentence on why rows like this one exist; '' if their name says as much."""
    component = item.component
    if component == "parameters":
        return _of_weights(report, item, language)
    if component == "gradients":
        return _said(_of_gradients(report), language, shards=report.setup.shards)
    if component == "optimizer_states":
        state = kind_of(item.name)
        return _said(_STATES.get(_SAME_STATE.get(state, state)), language)
    if component == "saved_activations":
        known = buffer_reason(item.name) if item.name.startswith("received") else None
        return (known or place_of(item.name).saves).said(language)
    return _said(buffer_reason(item.name), language)


def _of_weights(report: Report, item: Item, language: str) -> str:
    shards = report.setup.shards
    if place_of(item.name) is REFERENCE:
        return WEIGHTS_OF_A_REFERENCE.said(language)
    if report.setup.zero == 3 and shards > 1:
        return WEIGHTS_OF_A_SHARD.said(language, shards=shards)
    itemsize = item.formula.rsplit("·", 1)[-1].removesuffix(" B")
    return WEIGHTS.said(language, dtype=item.dtype, itemsize=itemsize)


def _of_gradients(report: Report) -> Words:
    return GRADIENTS_OF_A_SHARD if report.setup.zero >= 2 and report.setup.shards > 1 else GRADIENTS


def _said(words: Words | None, language: str, **values: object) -> str:
    return "" if words is None else words.said(language, **values)
