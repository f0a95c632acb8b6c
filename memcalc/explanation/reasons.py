"""Why a row is there, in one sentence: by its place in the model, by the state that it is, or by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.explanation.places import place_of
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
    "absmax1": Words("The scale of each block of 8-bit states.", "每个 8 位状态块的缩放因子。"),
}
_SAME_STATE: Final = {
    "fp32 main weight": "fp32 master", "col_var": "row_var", "absmax2": "absmax1",
}  # fmt: skip

_BY_NAME: Final = {
    "DDP buckets": Words(
        "DDP reduces gradients in flat buckets, which are a second copy of the gradients unless gradient_as_bucket_view is on.",
        "DDP 把梯度拷贝到扁平的桶中做规约；除非打开 gradient_as_bucket_view，否则相当于多一份梯度。",
    ),
    "gathered parameters": Words(
        "Whole weights of the modules that run, or that are fetched ahead, collected from all ranks.",
        "正在运行或预取的模块的完整权重，从所有 rank 收集而来。",
    ),
    "all-gather result": Words(
        "The weights of a unit arrive in one flat buffer before they are copied to their places.",
        "一个单元的权重先到达一个扁平缓冲区，再拷贝到各自的位置。",
    ),
    "reduce-scatter input": Words(
        "The gradients of a unit, copied into one flat tensor of the reduction's dtype.",
        "一个单元的梯度，按规约精度拷贝到一个扁平张量中。",
    ),
    "reduce bucket": Words(
        "Gradients are copied into it and reduced when it is full.", "梯度先拷贝到这个桶里，装满后再规约。"
    ),
    "copy of the bucket that is reduced": Words(
        "One bucket is reduced while backward fills the other.", "一个桶在规约时，反向传播继续填充另一个桶。"
    ),
    "small parameters kept whole": Words(
        "Weights below the persistence threshold are not sharded: gathering them would cost more than it saves.",
        "小于 persistence 阈值的权重不切分：收集它们的开销大于节省的显存。",
    ),
    "dummy weight gradient": Words(
        "The kernel adds weight gradients to the main gradients itself, and gives autograd a placeholder for them.",
        "融合核直接把权重梯度累加到主梯度，只给 autograd 一个占位张量。",
    ),
    "all-gather buffer": Words(
        "Sequence parallelism gathers a layer's input into one buffer that all layers share.",
        "序列并行把层输入收集到所有层共用的一个缓冲区。",
    ),
    "hidden state or gradient between stages": Words(
        "A pipeline stage holds what it received or has still to send.", "流水线阶段持有已接收或待发送的张量。"
    ),
    "input_ids": Words("The step's batch.", "本步的输入批次。"),
    "logits gradient": Words(
        "The gradient of the logits, a row of the vocabulary's size for each token.",
        "logits 的梯度：每个 token 一行，长度为词表大小。",
    ),
    "log-probabilities gradient": Words(
        "The gradient of the log-probabilities, a row of the vocabulary's size for each token.",
        "对数概率的梯度：每个 token 一行，长度为词表大小。",
    ),
    "exp_avg_sq_sqrt": Words(
        "The foreach optimizer computes the root of the second moment of all weights at once.",
        "foreach 优化器一次性计算所有权重二阶矩的平方根。",
    ),
    "gradient cast to fp32 for the master": Words(
        "The optimizer updates fp32 weights, so it casts the gradients.",
        "优化器更新 fp32 权重，因此先把梯度转换为 fp32。",
    ),
}


def reason(report: Report, item: Item, language: str) -> str:
    """Return the sentence on why rows like this one exist; '' if their name says as much."""
    component = item.component
    if component == "parameters":
        return _of_weights(report, item, language)
    if component == "gradients":
        return _said(_of_gradients(report), language, shards=report.setup.shards)
    if component == "optimizer_states":
        state = item.name.rsplit(": ", 1)[-1]
        return _said(_STATES.get(_SAME_STATE.get(state, state)), language)
    if component == "saved_activations":
        return place_of(item.name).saves.said(language)
    return _said(_BY_NAME.get(item.name.split(" (")[0].rsplit(": ", 1)[-1]), language)


def _of_weights(report: Report, item: Item, language: str) -> str:
    shards = report.setup.shards
    if report.setup.zero == 3 and shards > 1:
        return WEIGHTS_OF_A_SHARD.said(language, shards=shards)
    itemsize = item.formula.rsplit("·", 1)[-1].removesuffix(" B")
    return WEIGHTS.said(language, dtype=item.dtype, itemsize=itemsize)


def _of_gradients(report: Report) -> Words:
    return GRADIENTS_OF_A_SHARD if report.setup.zero >= 2 and report.setup.shards > 1 else GRADIENTS


def _said(words: Words | None, language: str, **values: object) -> str:
    return "" if words is None else words.said(language, **values)
