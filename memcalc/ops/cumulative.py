"""Cumulative sums, and what masks their upper half."""

from __future__ import annotations

from memcalc.autograd import Node
from memcalc.ops.elementwise import recording
from memcalc.tensor import Tensor, new_tensor


def cumsum(a: Tensor, i: int) -> Tensor:
    """a.cumsum(i): saves nothing; backward turns the gradient round, sums it up and turns it back."""
    node = Node(a.memory, _cumsum_backward, (a,), (), a.shape[i].size) if recording(a) else None
    out = new_tensor(a.memory, a.shape, a.dtype, "cumulative sum")
    out.node = node
    return out


def _cumsum_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    grad = grads[0]
    if node.context == 1:
        return [grad]
    # grad.flip(dim).cumsum(dim).flip(dim): one C++ expression, whose temporaries live until its end.
    _temporaries = [new_tensor(grad.memory, grad.shape, grad.dtype, "cumulative gradient") for _ in ("flip", "cumsum")]
    return [new_tensor(grad.memory, grad.shape, grad.dtype, "cumulative gradient")]
