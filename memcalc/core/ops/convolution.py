"""Convolutions: along a sequence with one kernel per channel, or of all channels along any dims.

`convolution` saves its input and its weight. Backward makes all gradients in one call (tools/autograd/derivatives.yaml,
convolution_backward).
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, plus
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.work import works, works_backward
from memcalc.core.tensor import Tensor, new_tensor


@autocast("conv1d")
def depthwise_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Compute `F.conv1d(groups=channels)`: x (batch, channels, seq), weight (channels, 1, kernel) -> (batch, channels,
    seq + 2·padding - kernel + 1)."""
    inputs = [t for t in (x, weight, bias) if t is not None]
    node = Node(x.memory, _convolution_backward, inputs, (x, weight)) if recording(*inputs) else None
    length = plus(x.shape[2], 2 * padding - weight.shape[2].size + 1)
    works(x.memory, "", (*x.shape[:2], length, *weight.shape[1:]), x.dtype, kind="convolution")
    out = new_tensor(x.memory, (*x.shape[:2], length), x.dtype, "convolution")
    out.node = node
    return out


@autocast("convolution")
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *places: Dim) -> Tensor:
    """Compute `F.conv1d` or `F.conv2d`: x (batch, channels, ...), weight (out, channels, ...) -> (batch, out,
    places)."""
    inputs = [t for t in (x, weight, bias) if t is not None]
    node = Node(x.memory, _convolution_backward, inputs, (x, weight)) if recording(*inputs) else None
    works(x.memory, "", (x.shape[0], weight.shape[0], *places, *weight.shape[1:]), x.dtype, kind="convolution")
    out = new_tensor(x.memory, (x.shape[0], weight.shape[0], *places), x.dtype, "convolution")
    out.node = node
    return out


def _convolution_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    _x, weight = node.unpack()
    works_backward(node, "", (*grads[0].shape, *weight.shape[1:]), grads[0].dtype, "convolution")
    return [
        new_tensor(node.memory, shape, dtype, f"convolution {name} gradient") if node.needs(i) else None
        for i, ((shape, dtype), name) in enumerate(zip(node.metadata, ("input", "weight", "bias"), strict=False))
    ]
