"""Why FSDP1 and DataParallel have a buffer, by the name of its row."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.words import Words

OF_OLDER_ENGINES: Final = {
    "unsharded flat parameter": Words(
        "A unit's parameters, gathered into one tensor of which the weights are views.",
        "一个单元的参数收集成一个张量，权重是它的视图。",
    ),
    "shard, cast to be gathered": Words(
        "The rank's part of a unit, in the dtype that it is gathered in.", "本 rank 的那一部分，转换为收集时的精度。"
    ),
    "flat gradient": Words(
        "The gradients of a unit's parameters, copied into one tensor when the last one is there.",
        "一个单元所有参数的梯度到齐后，拷贝成一个张量。",
    ),
    "flat gradient, cast to be reduced": Words(
        "The flat gradient in the dtype that it is reduced in.", "扁平梯度转换为规约时的精度。"
    ),
    "flat gradient, padded to be reduced": Words(
        "The flat gradient with padding, so that all ranks get equal parts.",
        "扁平梯度加上填充，使各 rank 得到相等的部分。",
    ),
    "zeros for padding": Words(
        "Padding between parameters has no gradient, and gets zeros in the flat one.",
        "参数之间的填充没有梯度，在扁平梯度中补零。",
    ),
    "gradient of a slice": Words(
        "The parameter is a slice of its own now; its gradient is made like it and then becomes a view of the flat one.",
        "参数此时只是一个切片；先按切片创建梯度，再变成扁平梯度的视图。",
    ),
    "reduced gradients": Words(
        "The sum of the ranks' gradients, before it is cast to the dtype of the shards.",
        "各 rank 梯度之和，尚未转换为分片的精度。",
    ),
    "zero of clip_grad_norm_": Words(
        "FSDP1 keeps a zero for ranks that have no gradients.", "FSDP1 为没有梯度的 rank 保留一个零。"
    ),
    "flat copy of parameters to broadcast": Words(
        "DataParallel joins small parameters to buffers of 10 MiB and broadcasts them one after the other.",
        "DataParallel 把小参数合并成 10 MiB 的缓冲区，逐个广播。",
    ),
    "flat copy of gradients to reduce": Words(
        "DataParallel joins small gradients to buffers of 10 MiB and sums them one after the other.",
        "DataParallel 把小梯度合并成 10 MiB 的缓冲区，逐个求和。",
    ),
    "logits of all replicas": Words(
        "DataParallel gathers every tensor of the replicas' outputs on the first GPU.",
        "DataParallel 把各副本输出的所有张量收集到第一张 GPU。",
    ),
}
