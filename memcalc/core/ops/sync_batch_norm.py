"""Batch norm over the batches of all data-parallel ranks (torch/nn/modules/_functions.py, SyncBatchNorm).

Forward gathers mean, inverse deviation and count of every rank; backward adds up two sums per channel. The op saves its
input, its weight, the common mean and inverse deviation, and the counts.
"""

from __future__ import annotations

from typing import Final

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Dim, Shape
from memcalc.core.dtypes import DType, boolean, fp32, int32
from memcalc.core.ops.elementwise import cast, recording
from memcalc.core.ops.norm import batch_norm
from memcalc.core.ops.shape import contiguous
from memcalc.core.tensor import Memory, Sent, Tensor, new_tensor

AXIS: Final = "batch norm"
"""The axis of what the op sends, which is that of data parallelism: an engine sends its own over it."""
GATHERED: Final = "batch norm statistics"
SUMMED: Final = "sums of batch norm gradients"


def sync_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, ranks: int
) -> Tensor:
    """Compute nn.SyncBatchNorm's training forward over (batch, channels, ...) on one of `ranks` ranks. One rank runs
    a plain batch norm."""
    if ranks == 1:
        return batch_norm(x, weight, bias, running_mean, running_var)
    memory, (channels,) = x.memory, weight.shape
    node_inputs = (x, weight, bias)
    x = contiguous(x)
    wide = _accumulated(x.dtype)
    statistics = [new_tensor(memory, (channels,), wide, f"sync batch norm {s}") for s in ("mean", "invstd")]
    count = new_tensor(memory, (ONE_DIM,), wide, "count")
    three = Dim(f"(2·{channels.name}+1)", 2 * channels.size + 1)
    combined = new_tensor(memory, (three,), wide, "mean, invstd and count")
    world = Dim("dp", ranks)
    of_all = new_tensor(memory, (world, three), wide, "mean, invstd and count of all ranks")
    _send(memory, "all_gather", GATHERED, of_all.shape, wide)
    del combined
    mask = new_tensor(memory, (world,), boolean, "ranks with a batch")
    counts = new_tensor(memory, (world, ONE_DIM), wide, "counts")
    means = [new_tensor(memory, (world, channels), wide, f"{s} of all ranks") for s in ("mean", "invstd")]
    common = [new_tensor(memory, (channels,), wide, f"sync batch norm common {s}") for s in ("mean", "invstd")]
    whole = cast(counts, int32, "counts as integers")
    node = None
    if recording(*node_inputs):
        node = Node(memory, _sync_batch_norm_backward, node_inputs, (x, weight, *common, whole))
    out = new_tensor(memory, x.shape, x.dtype, "sync batch norm")
    out.node = node
    del statistics, count, of_all, mask, counts, means
    return out


def _sync_batch_norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    x, weight, mean, _invstd, _counts = node.unpack()
    memory, (channels,) = node.memory, weight.shape
    grad = contiguous(grads[0])
    sums = [new_tensor(memory, (channels,), mean.dtype, f"sum of {s}") for s in ("dy", "dy·(x-mean)")]
    of_weights = [
        new_tensor(memory, (channels,), weight.dtype, f"sync batch norm {s} gradient") for s in ("weight", "bias")
    ]
    of_input = None
    if node.needs(0):
        combined = new_tensor(memory, (Dim(f"2·{channels.name}", 2 * channels.size),), mean.dtype, "sums of gradients")
        _send(memory, "all_reduce", SUMMED, combined.shape, mean.dtype)
        of_input = new_tensor(memory, x.shape, grad.dtype, "sync batch norm gradient")
        del combined
    del sums
    return [of_input, *of_weights]


def _accumulated(dtype: DType) -> DType:
    """Return the dtype of a GPU's statistics: fp32 for 16-bit inputs (batch_norm_stats in native/cuda/Normalization.cu)."""
    return fp32 if dtype.itemsize == 2 else dtype


def _send(memory: Memory, kind: str, name: str, shape: Shape, dtype: DType) -> None:
    memory.sent.append(Sent(AXIS, kind, name, memory.phase, memory.layer, shape, dtype))
