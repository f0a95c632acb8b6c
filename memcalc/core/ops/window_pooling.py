"""Means over windows of images (batch, channels, height, width).

Both ops save their input, of which backward needs the shape alone (tools/autograd/derivatives.yaml, avg_pool2d and
_adaptive_avg_pool2d).
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.ops.elementwise import record
from memcalc.core.tensor import Tensor, new_tensor


def average(x: Tensor, height: Dim, width: Dim) -> Tensor:
    """Compute `F.avg_pool2d`: x (batch, channels, ...) -> (batch, channels, height, width)."""
    out = new_tensor(x.memory, (*x.shape[:2], height, width), x.dtype, "average pooling")
    return record(out, _average_backward, (x,), (x,))


def adaptive_average(x: Tensor, height: Dim, width: Dim) -> Tensor:
    """Compute `F.adaptive_avg_pool2d` of more than one place: x (batch, channels, ...) -> (batch, channels, height,
    width)."""
    return average(x, height, width)


def _average_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (x,) = node.unpack()
    return [new_tensor(x.memory, x.shape, x.dtype, "average pooling gradient")]
