"""Norms as one kernel each.

Layer norm saves its input, weight and bias, and mean and rstd per token, in fp32 (native/cuda/layer_norm_kernel.cu). Batch norm
saves its input, its weight, the running statistics, and mean and inverse deviation per channel (tools/autograd/derivatives.yaml,
native_batch_norm).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM
from memcalc.core.dtypes import fp32
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.replaceable import replaceable
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType


@replaceable
@autocast("layer_norm")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute native_layer_norm over the last dim."""
    out = new_tensor(x.memory, x.shape, x.dtype, "layer norm")
    statistics = [new_tensor(x.memory, (*x.shape[:-1], ONE_DIM), fp32, f"layer norm {s}") for s in ("mean", "rstd")]
    inputs = [t for t in (x, weight, bias) if t is not None]
    if recording(*inputs):
        out.node = Node(x.memory, _layer_norm_backward, inputs, [*inputs, *statistics])
    return out


def _layer_norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    saved = node.unpack()
    return [
        new_tensor(t.memory, t.shape, t.dtype, "layer norm gradient") if node.needs(i) else None
        for i, t in enumerate(saved[: len(node.edges)])
    ]


@autocast("linalg_vector_norm")
def lengths(a: Tensor, dtype: DType | None = None) -> Tensor:
    """Compute `torch.linalg.norm(a, dim=1)` of a matrix that requires no gradient: the length of each row."""
    return new_tensor(a.memory, a.shape[:1], dtype or a.dtype, "lengths of rows")


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
    """Compute native_batch_norm of a training step over (batch, channels, ...). The running statistics change in place.

    The op's own statistics have the weight's dtype, which is wider than the input's under autocast (batch_norm_cpu in
    aten/src/ATen/native/Normalization.cpp).
    """
    out = new_tensor(x.memory, x.shape, x.dtype, "batch norm")
    statistics = [new_tensor(x.memory, weight.shape, weight.dtype, f"batch norm {s}") for s in ("mean", "invstd")]
    if recording(x, weight, bias):
        saved = [x, weight, running_mean, running_var, *statistics]
        out.node = Node(x.memory, _batch_norm_backward, (x, weight, bias), saved)
    return out


def _batch_norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    x, weight, *_ = node.unpack()
    return [
        new_tensor(t.memory, t.shape, t.dtype, "batch norm gradient") if node.needs(i) else None
        for i, t in enumerate((x, weight, weight))
    ]
