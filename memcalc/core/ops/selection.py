"""Elementwise ops that choose: bounds, masks, the larger of two.

Sources of what each op saves and what its backward allocates: tools/autograd/derivatives.yaml and FunctionsManual.cpp.
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dtypes import boolean
from memcalc.core.ops.elementwise import like, of_two, recording
from memcalc.core.tensor import Tensor, new_tensor


def clamp(a: Tensor, bounds: int) -> Tensor:
    """Compute `a.clamp` with one or two bounds. It saves a."""
    node = Node(a.memory, _clamp_backward, (a,), (a,), bounds) if recording(a) else None
    out = like(a, "clamp")
    out.node = node
    return out


def clamp_(a: Tensor, bounds: int) -> Tensor:
    """Compute `a.clamp_` with one or two bounds. It saves a copy of the former a; the result has a's storage."""
    node = None
    if recording(a):
        original = like(a, "copy of the clamped")
        node = Node(a.memory, _clamp_backward, (a,), (original,), bounds)
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _clamp_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (a,) = node.unpack()
    # where((a >= min).logical_and_(a <= max), grad, zero), clamp_backward in FunctionsManual.cpp
    _zero = new_tensor(a.memory, (), grads[0].dtype, "zero")
    _masks = [like(a, "where in bounds", boolean) for _ in range(node.context)]
    return [of_two(a, grads[0], "clamp gradient")]


def clamp_to(a: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Compute `a.clamp(low, high)`, where the bounds are tensors that require no gradient. It saves all three."""
    node = Node(a.memory, _clamp_to_backward, (a,), (a, low, high)) if recording(a) else None
    out = like(a, "clamp")
    out.node = node
    return out


def _clamp_to_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    a, _low, _high = node.unpack()
    # where((a >= min).logical_and_(a <= max), grad, zero), clamp_backward in FunctionsManual.cpp
    _zero = new_tensor(a.memory, (), grads[0].dtype, "zero")
    _masks = [like(a, "where in bounds", boolean) for _ in range(2)]
    return [of_two(a, grads[0], "clamp gradient")]


def where(mask: Tensor, value: Tensor, name: str) -> Tensor:
    """Compute `torch.where(mask, value, scalar)` without a gradient: the scalar first becomes a tensor of `value`'s
    dtype."""
    scalar = new_tensor(mask.memory, (), value.dtype, name)
    out = of_two(mask, value, name, value.dtype)
    del scalar
    return out


def where_else(condition: Tensor, a: Tensor, name: str) -> Tensor:
    """Compute `torch.where(condition, a, constant)` or `a.masked_fill(condition, constant)`. It saves the condition."""
    node = Node(a.memory, _where_else_backward, (a,), (condition,)) if recording(a) else None
    out = of_two(a, condition, name, a.dtype)
    out.node = node
    return out


def _where_else_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _condition = node.unpack()
    return [like(grads[0], "where gradient")]


def masked_fill_(a: Tensor, mask: Tensor) -> Tensor:
    """Compute `a.masked_fill_(mask, number)`. It saves the mask; the result has a's storage."""
    node = Node(a.memory, _where_else_backward, (a,), (mask,)) if recording(a) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def masked_fill_view_(a: Tensor, mask: Tensor) -> Tensor:
    """Compute `masked_fill_` of a view of all of `a` (CopySlices)."""
    node = Node(a.memory, _masked_fill_view_backward, (a,), (mask,)) if recording(a) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _masked_fill_view_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _mask = node.unpack()
    result = like(grads[0], "gradient of the base")
    of_the_view = like(grads[0], "gradient of the view")
    _filled = like(of_the_view, "where gradient")
    return [result]


def where_of_two(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch.where(condition, a, b)`. It saves the condition."""
    node = Node(a.memory, _where_of_two_backward, (a, b), (condition,)) if recording(a, b) else None
    out = of_two(a, b, "chosen")
    out.node = node
    return out


def _where_of_two_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    _condition = node.unpack()
    grad_b = _where_gradient(grads[0]) if node.needs(1) else None
    grad_a = _where_gradient(grads[0]) if node.needs(0) else None
    return [grad_a, grad_b]


def _where_gradient(grad: Tensor) -> Tensor:
    """Compute `where(condition, grad, 0)`: the zero first becomes a tensor."""
    _zero = new_tensor(grad.memory, (), grad.dtype, "zero")
    return like(grad, "where gradient")


def maximum(a: Tensor, other: Tensor) -> Tensor:
    """Compute `torch.max(a, other)` or `torch.min(a, other)`, where `other` requires no gradient. It saves both."""
    node = Node(a.memory, _maximum_backward, (a,), (a, other)) if recording(a) else None
    out = of_two(a, other, "maximum")
    out.node = node
    return out


def _maximum_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    a, _other = node.unpack()
    return [_of_the_larger(grads[0], a)]


def larger(a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch.maximum(a, b)` of one shape. It saves both."""
    node = Node(a.memory, _larger_backward, (a, b), (a, b)) if recording(a, b) else None
    out = of_two(a, b, "larger")
    out.node = node
    return out


def _larger_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    a, b = node.unpack()
    grad_b = _of_the_larger(grads[0], b) if node.needs(1) else None
    grad_a = _of_the_larger(grads[0], a) if node.needs(0) else None
    return [grad_a, grad_b]


def _of_the_larger(incoming: Tensor, a: Tensor) -> Tensor:
    # where(a == b, grad / 2, grad).masked_fill_(a < b, 0): temporaries live until the expression's end.
    _half, _equal = like(incoming, "larger gradient"), like(a, "larger gradient", boolean)
    grad = like(incoming, "larger gradient")
    _less = like(a, "larger gradient", boolean)
    return grad
