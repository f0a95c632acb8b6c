"""Pooling of images (batch, channels, height, width).

`max_pool2d` saves its input and the index of each maximum. The mean saves nothing (tools/autograd/derivatives.yaml,
max_pool2d_with_indices; aten/src/ATen/native/AdaptiveAveragePooling.cpp, adaptive_avg_pool2d).
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import like, record, recording
from memcalc.core.tensor import Tensor, new_tensor


def max_pool2d(x: Tensor, height: Dim, width: Dim) -> Tensor:
    """Compute `F.max_pool2d`: x (batch, channels, ...) -> (batch, channels, height, width)."""
    shape = (*x.shape[:2], height, width)
    out = new_tensor(x.memory, shape, x.dtype, "max pooling")
    indices = new_tensor(x.memory, shape, int64, "places of the maxima")
    if recording(x):
        out.node = Node(x.memory, _max_pool2d_backward, (x,), (x, indices))
    return out


def _max_pool2d_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    x, _indices = node.unpack()
    return [new_tensor(x.memory, x.shape, x.dtype, "max pooling gradient")]


def adaptive_avg_pool2d(x: Tensor) -> Tensor:
    """Compute `F.adaptive_avg_pool2d(x, 1)`, a mean: (batch, channels, height, width) -> (batch, channels, 1, 1)."""
    out = new_tensor(x.memory, (*x.shape[:2], ONE_DIM, ONE_DIM), x.dtype, "average pooling")
    return record(out, _adaptive_avg_pool2d_backward, (x,), context=x.shape)


def _adaptive_avg_pool2d_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    # grad.expand(shape) / n
    expanded = Tensor(grads[0].storage, node.context, (*grads[0].strides[:2], 0, 0), grads[0].dtype)
    return [like(expanded, "average pooling gradient")]
