"""Activations and dropout that overwrite their input.

The result has the input's storage. A node that saves its result then keeps no more than the input
(tools/autograd/derivatives.yaml: relu, sigmoid and tanh save `result`).
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.ops.elementwise import like, of_two, recording
from memcalc.core.tensor import Tensor


def relu_(a: Tensor) -> Tensor:
    """Compute `F.relu(a, inplace=True)`."""
    return _overwritten(a)


def _overwritten(a: Tensor) -> Tensor:
    out = Tensor(a.storage, a.shape, a.strides, a.dtype)
    out.is_view = a.is_view
    if recording(a):
        saved = Tensor(a.storage, a.shape, a.strides, a.dtype)
        out.node = Node(a.memory, _relu_in_place_backward, (a,), (saved,))
    return out


def _relu_in_place_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (saved,) = node.unpack()
    return [of_two(grads[0], saved, "gradient")]


def dropout_(a: Tensor, p: float) -> Tensor:
    """Compute `F.dropout(a, p, inplace=True)` in training: a mask in the input's dtype, that the input is multiplied
    with (native/Dropout.cpp, _dropout_impl: `noise.bernoulli_(1 - p); noise.div_(1 - p); input.mul_(noise)`)."""
    if p == 0.0:
        return a
    mask = like(a, "dropout mask")
    out = Tensor(a.storage, a.shape, a.strides, a.dtype)
    out.is_view = a.is_view
    if recording(a):
        out.node = Node(a.memory, _dropout_in_place_backward, (a,), (mask,))
    return out


def _dropout_in_place_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (mask,) = node.unpack()
    return [of_two(grads[0], mask, "dropout gradient")]
