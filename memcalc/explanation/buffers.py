"""Why a buffer or a temporary exists, in one sentence, by the name of its row."""

from __future__ import annotations

import re
from typing import Final

from memcalc.explanation.buffers_of_older_engines import OF_OLDER_ENGINES
from memcalc.explanation.words import Words

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
    "reduce bucket that backward fills": Words(
        "With overlap_comm there are two buckets: one is reduced while backward fills the other.",
        "开启 overlap_comm 时有两个桶：一个在规约，反向传播填充另一个。",
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
    "gradients of the partition": Words(
        "The reduced gradients that this rank's part of the optimizer updates.",
        "本 rank 的优化器分片要更新的、已规约的梯度。",
    ),
    "gradients of the partition, and of what straddles it": Words(
        "The gradients of this rank's partition, and whole gradients of weights that two partitions share.",
        "本 rank 分片的梯度，以及跨两个分片的权重的完整梯度。",
    ),
    "rest of the gradients that straddle the partition": Words(
        "A weight that two partitions share keeps its whole gradient, not only this rank's part.",
        "跨两个分片的权重保留完整梯度，而不只是本 rank 的部分。",
    ),
    "all-reduce copy of gradients": Words(
        "Gradients are copied into one flat tensor, which is all-reduced in one call.",
        "梯度拷贝到一个扁平张量中，一次 all-reduce 完成。",
    ),
    "the copy in the dtype that is sent": Words(
        "The flat gradients are sent in another dtype than they are kept in, so they are cast to it.",
        "扁平梯度的通信精度与保存精度不同，需要先转换。",
    ),
    "the bucket in the dtype that is sent": Words(
        "The bucket is sent in another dtype than it is kept in, so it is cast.",
        "桶的通信精度与保存精度不同，需要先转换。",
    ),
    "all-gather buffer of several parameters": Words(
        "Parameters that are gathered in one call arrive in one flat buffer, and are copied out of it.",
        "一次收集的多个参数先到达一个扁平缓冲区，再分别拷出。",
    ),
    "attention scores buffer": Words(
        "Megatron computes attention scores into one buffer that all layers share.",
        "Megatron 把注意力分数写入所有层共用的一个缓冲区。",
    ),
    "gradient not reduced yet": Words(
        "Backward has made this gradient, and it waits for its place in the reduce bucket.",
        "反向传播已产生该梯度，正等待放入规约桶。",
    ),
    "gradients not reduced yet": Words(
        "Backward has made these gradients, and they wait for their place in the reduce bucket.",
        "反向传播已产生这些梯度，正等待放入规约桶。",
    ),
    "reduced gradients in their own dtype": Words(
        "The sums come in the dtype that is sent, and are cast back to the gradients' dtype.",
        "规约结果是通信精度，需要转换回梯度的精度。",
    ),
    "received gradients": Words(
        "The gradient of this stage's output, received from the next stage.",
        "从下一阶段接收的、本阶段输出的梯度。",
    ),
    "received hidden states": Words(
        "The stage's input, received from the previous stage. Its backward needs it.",
        "从上一阶段接收的本阶段输入，反向传播需要它。",
    ),
    "received hidden states or gradients": Words(
        "A stage receives its input from the previous stage, and its output's gradient from the next.",
        "本阶段从上一阶段接收输入，从下一阶段接收输出的梯度。",
    ),
    "gradient sum": Words(
        "A gradient of earlier micro-batches that the next one is added to.",
        "之前微批次的梯度，后续微批次的梯度累加到它上面。",
    ),
    "cached cos and sin": Words(
        "The cosines and sines of rotary positions, made once and kept for all steps.",
        "旋转位置编码的 cos 和 sin，计算一次后一直保留。",
    ),
    "rotary angles": Words(
        "The angles of rotary positions, made once and kept.",
        "旋转位置编码的角度，计算一次后一直保留。",
    ),
    "original_inv_freq": Words(
        "The frequencies of rotary positions, a buffer of the module.",
        "旋转位置编码的频率，是模块的缓冲区。",
    ),
    "routing probabilities": Words(
        "The weight of each token for each expert. Backward needs it, in a tensor that the layer's code keeps.",
        "每个 token 对每个专家的权重，反向传播需要，由该层代码持有。",
    ),
    "map of tokens to experts": Words(
        "The router's choice: for each token, which experts it goes to.",
        "路由结果：每个 token 发往哪些专家。",
    ),
    "row_id_map": Words(
        "The order in which tokens are sorted by expert. Backward sorts the gradients back with it.",
        "token 按专家排序的顺序，反向传播用它把梯度还原。",
    ),
    "bias and counts of experts": Words(
        "The bias that balances the experts, and the number of tokens of each.",
        "用于专家负载均衡的偏置，以及每个专家的 token 数。",
    ),
    "contiguous copy": Words(
        "The next operation needs its input contiguous in memory, so it is copied.",
        "下一个算子要求输入在内存中连续，因此需要拷贝。",
    ),
    "attention mask": Words(
        "The mask that tells which tokens attention may see.",
        "指明注意力可以看到哪些 token 的掩码。",
    ),
    "attention mask of all batches": Words(
        "The mask that tells which tokens attention may see, one for all micro-batches.",
        "指明注意力可以看到哪些 token 的掩码，所有微批次共用。",
    ),
    "attention mask of the batch": Words(
        "The data loader's mask, which tells which tokens attention may see.",
        "数据加载器给出的掩码，指明注意力可以看到哪些 token。",
    ),
    "causal mask of all layers": Words(
        "The mask that hides later tokens, one for all layers.",
        "遮住后续 token 的掩码，所有层共用。",
    ),
    "shard of the batch": Words(
        "This rank's part of the sequences.",
        "本 rank 负责的那部分序列。",
    ),
    "ranges that the norm leaves out": Words(
        "The places of weights that several ranks have whole: only one of them counts them in the norm.",
        "多个 rank 都有的权重的位置：计算范数时只由其中一个 rank 计入。",
    ),
    "numbers of the parts": Words(
        "The sizes of the parts that tensor-parallel ranks send to the next stage.",
        "张量并行 rank 发往下一阶段的各部分的大小。",
    ),
    "loss": Words(
        "The loss, which the training loop keeps until the next step.",
        "训练循环持有损失直到下一步。",
    ),
    "logits in fp32": Words(
        "The loss is computed in fp32, so the logits are cast.", "损失以 fp32 计算，因此要转换 logits。"
    ),
    "losses": Words(
        "The losses of the step's micro-batches.",
        "本步各微批次的损失。",
    ),
    "losses of the step, their means, the norm": Words(
        "Single numbers that the engine keeps of a step.",
        "引擎为每一步保留的若干单个数值。",
    ),
    "the loss, scaled": Words(
        "The loss times the loss scale, of which backward starts.",
        "损失乘以缩放系数，反向传播从它开始。",
    ),
    "the last norm": Words(
        "The norm of the gradients, which the engine keeps.",
        "引擎保留的梯度范数。",
    ),
    "the norm of this step": Words(
        "The norm of the gradients, which the engine keeps.",
        "引擎保留的梯度范数。",
    ),
    "padding of the flat weights": Words(
        "Flat weights are padded so that all ranks have equal parts.",
        "扁平权重经过填充，使各 rank 分到相等的部分。",
    ),
    "FusedAdam's overflow flag": Words(
        "A flag that the kernel sets if a gradient is infinite.",
        "若梯度溢出，融合核会设置这个标志。",
    ),
    "whether a gradient overflowed": Words(
        "fp16's check for infinite gradients.",
        "fp16 训练对梯度溢出的检查结果。",
    ),
    "gradients flattened in fp32": Words(
        "Gradients are cast to fp32 and joined into one tensor, which the norm and the update read.",
        "梯度转换为 fp32 并拼成一个张量，供计算范数和更新使用。",
    ),
    "gradients cast to fp32": Words(
        "The optimizer updates fp32 weights, so gradients are cast.",
        "优化器更新 fp32 权重，因此先转换梯度。",
    ),
    "gradients of a sub-group in fp32": Words(
        "The optimizer updates one sub-group at a time, with its gradients in fp32.",
        "优化器逐个子组更新，该子组的梯度转换为 fp32。",
    ),
    "gradients of a sub-group, joined": Words(
        "The gradients of the sub-group that is updated, in one tensor.",
        "正在更新的子组的梯度，拼成一个张量。",
    ),
    "mask of the norm": Words(
        "It leaves out weights that another rank counts in the norm.",
        "计算范数时排除由其他 rank 计入的权重。",
    ),
    "column-parallel output": Words(
        "The output of a matrix that is split by columns: this rank's columns.",
        "按列切分的矩阵的输出，即本 rank 的那些列。",
    ),
    "exp_avg_sq.sqrt()": Words(
        "Adam divides by the root of the second moment.",
        "Adam 要除以二阶矩的平方根。",
    ),
    "denom": Words(
        "Adam divides the update by it: the root of the second moment, plus epsilon.",
        "Adam 更新量的分母：二阶矩的平方根加 epsilon。",
    ),
    "update": Words(
        "The amount that the optimizer adds to the weight.",
        "优化器加到权重上的更新量。",
    ),
}
_LIKE: Final = {
    "loss of the last micro-batch": "loss",
    "ends": "mask of the norm",
    "sums": "mask of the norm",
    "signs": "mask of the norm",
    "position_ids": "input_ids",
    "position ids": "input_ids",
    "labels": "input_ids",
    "shift_labels": "input_ids",
    "tokens": "input_ids",
    "loss mask": "input_ids",
    "attention_mask": "attention mask",
    "input_features": "input_ids",
    "pixel_values": "input_ids",
    "token_type_ids": "input_ids",
    "inv_freq": "original_inv_freq",
}
"""Names of rows that exist for the same reason as another one."""

_BY_PATTERN: Final = (
    (
        re.compile(r"padding"),
        Words(
            "Flat tensors are padded so that all ranks have equal parts.",
            "扁平张量经过填充，使各 rank 分到相等的部分。",
        ),
    ),
    (
        re.compile(r"weight gradient$"),
        Words(
            "Backward has just made a weight's gradient, which is not yet where gradients are kept.",
            "反向传播刚产生的权重梯度，尚未放到梯度的存放处。",
        ),
    ),
    (
        re.compile(r"gradient|softmax minus|minus one"),
        Words(
            "Backward makes it, and frees it when the operation before has used it.",
            "反向传播产生它，前一个算子用完后即释放。",
        ),
    ),
    (
        re.compile(r"running_(mean|var)|num_batches_tracked|tokens_per_expert"),
        Words("A statistic that the module keeps in a buffer.", "模块保存在缓冲区中的统计量。"),
    ),
)


def kind_of(name: str) -> str:
    """Return a row's name without its size and without the tensor that it is of."""
    return name.split(" (")[0].rsplit(": ", 1)[-1]


def buffer_reason(name: str) -> Words | None:
    """Return why a buffer or temporary with this row name exists; None if its name says as much."""
    kind = kind_of(name)
    for known in (kind, kind.rsplit(".", 1)[-1]):
        if known in _BY_NAME or known in _LIKE:
            return _BY_NAME[_LIKE.get(known, known)]
    found = OF_OLDER_ENGINES.get(kind)
    if found is not None:
        return found
    return next((words for pattern, words in _BY_PATTERN if pattern.search(name)), None)
