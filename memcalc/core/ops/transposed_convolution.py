"""Transposed convolutions, which make images larger.

The op saves its input and its weight, as every convolution. Each of the input's values is multiplied with the whole
kernel, so the products are counted over the input's places (torch/utils/flop_counter.py, conv_flop_count).
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.work import works, works_backward
from memcalc.core.tensor import Tensor, new_tensor


@autocast("conv_transpose2d")
def transposed_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *out_shape: Dim) -> Tensor:
    """Compute `F.conv_transpose2d`: x (batch, channels, height, width), weight (channels, filters, ...) -> (batch,
    out_shape), where `out_shape` is (out channels, height, width)."""
    inputs = [t for t in (x, weight, bias) if t is not None]
    node = Node(x.memory, _transposed_backward, inputs, (x, weight)) if recording(*inputs) else None
    works(x.memory, "", (*x.shape, *weight.shape[1:]), x.dtype, kind="convolution")
    out = new_tensor(x.memory, (x.shape[0], *out_shape), x.dtype, "transposed convolution")
    out.node = node
    return out


def _transposed_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    x, weight = node.unpack()
    works_backward(node, "", (*x.shape, *weight.shape[1:]), grads[0].dtype, "convolution")
    return [
        new_tensor(node.memory, shape, dtype, f"convolution {name} gradient") if node.needs(i) else None
        for i, ((shape, dtype), name) in enumerate(zip(node.metadata, ("input", "weight", "bias"), strict=False))
    ]
