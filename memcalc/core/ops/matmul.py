"""Matrix products: linear layers, transformers' Conv1D, batched products.

`mm` saves each factor whose counterpart requires a gradient; backward computes the second factor's gradient first
(aten/src/ATen/native/LinearAlgebra.cpp, FunctionsManual.cpp mm_mat1_backward, mm_mat2_backward).
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, merge
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import add, like, recording
from memcalc.core.ops.replaceable import replaceable
from memcalc.core.ops.shape import contiguous, expand, reshape, transpose, view
from memcalc.core.ops.work import works, works_backward
from memcalc.core.selective import PRODUCT, selected
from memcalc.core.tensor import Strides, Tensor, is_contiguous, new_tensor


@replaceable
@autocast("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`: x (..., in), weight (out, in), bias (out) -> (..., out).

    A bias is part of the product if the rows of x are one piece of memory (aten/src/ATen/native/Linear.cpp). Otherwise
    it is added to the product in place. Under a dispatch mode, as in the contexts of a selective checkpoint, it is
    added out of place.
    """
    columns, name = transpose(weight, 0, 1), weight.name.removesuffix(".weight")
    if bias is not None and x.memory.contexts is not None and len(x.shape) > 2 and not is_contiguous(x):
        return add(_unflattened(mm(_flat(x), columns, name=name), x), bias)
    return _unflattened(mm(_flat(x), columns, bias, name), x)


@autocast("matmul")
def times(x: Tensor, columns: Tensor, name: str) -> Tensor:
    """Compute `torch.matmul` of (..., k) and (k, n)."""
    return _unflattened(mm(_flat(x), columns, name=name), x)


@autocast("matmul")
def weight_times(weight: Tensor, x: Tensor, name: str) -> Tensor:
    """Compute `torch.matmul` of a weight (out, in) and x (batch, in, seq): x is folded, and the result is transposed by
    a copy."""
    batch, width, seq = x.shape
    product = mm(reshape(transpose(x, 1, 2), merge(batch, seq), width), transpose(weight, 0, 1), name=name)
    return contiguous(transpose(view(product, batch, seq, weight.shape[0]), 1, 2))


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute transformers' Conv1D: x (..., in), weight (in, out), bias (out) -> (..., out)."""
    return _unflattened(addmm(bias, _flat(x), weight, weight.name.removesuffix(".weight")), x)


def _flat(x: Tensor) -> Tensor:
    return x if len(x.shape) == 2 else reshape(x, merge(*x.shape[:-1]), x.shape[-1])


def _unflattened(out: Tensor, x: Tensor) -> Tensor:
    return out if len(x.shape) == 2 else view(out, *x.shape[:-1], out.shape[-1])


@autocast("addmm")
def addmm(bias: Tensor, a: Tensor, b: Tensor, name: str) -> Tensor:
    """Compute bias (n) + (m, k) @ (k, n)."""
    return mm(a, b, bias, name)


@autocast("mm")
def mm(a: Tensor, b: Tensor, bias: Tensor | None = None, name: str = "mm") -> Tensor:
    """Compute (m, k) @ (k, n), plus bias (n) if given, in one allocation."""
    inputs = (a, b) if bias is None else (bias, a, b)
    node = None
    if recording(*inputs):
        factors = _wanted_by_each_other(a, b)
        saved = factors[::-1] if bias is None else factors  # by their names there: mat2 and self, or mat1 and mat2
        node = Node(a.memory, _mm_backward, inputs, saved, (name, b.shape, b.strides))
    if bias is None:
        (out,) = selected(a.memory, PRODUCT, lambda: (_multiplied(a, b, name),))
    else:
        out = _multiplied(a, b, name)
    out.node = node
    return out


def _multiplied(a: Tensor, b: Tensor, name: str) -> Tensor:
    """Allocate the product (..., m, k) @ (..., k, n) and note its FLOPs."""
    works(a.memory, name, (*a.shape, b.shape[-1]), a.dtype)
    return new_tensor(a.memory, (*a.shape[:-1], b.shape[-1]), a.dtype, name)


def _mm_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grad = grads[0]
    name, (k, n), strides = node.context
    saved = node.unpack()
    of_bias = [grad] if len(node.edges) == 3 else []
    first = len(of_bias)
    works_backward(node, name, (grad.shape[0], k, n), grad.dtype, first=first)
    grad_a = grad_b = None
    if node.needs(first + 1):
        grad_b = _laid_out_as(strides, k, n, grad, f"{name} weight gradient")
    if node.needs(first):
        grad_a = new_tensor(node.memory, (grad.shape[0], k), grad.dtype, f"{name} input gradient")
    del saved
    return [*of_bias, grad_a, grad_b]


def _laid_out_as(strides: Strides, k: Dim, n: Dim, grad: Tensor, name: str) -> Tensor:
    """Allocate the gradient of a (k, n) factor: column-major if the factor is."""
    if strides == (1, k.size):
        return transpose(new_tensor(grad.memory, (n, k), grad.dtype, name), 0, 1)
    return new_tensor(grad.memory, (k, n), grad.dtype, name)


@autocast("bmm")
def bmm(a: Tensor, b: Tensor, name: str) -> Tensor:
    """Compute (batch, m, k) @ (batch, k, n)."""
    node = None
    if recording(a, b):
        node = Node(a.memory, _bmm_backward, (a, b), _wanted_by_each_other(a, b), name)
    out = _multiplied(a, b, name)
    out.node = node
    return out


def _bmm_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grad, saved = grads[0], node.unpack()
    batch, m, n = grad.shape
    k = saved[0].shape[2] if node.needs(1) else saved[0].shape[1]
    works_backward(node, node.context, (batch, m, k, n), grad.dtype)
    grad_b = new_tensor(node.memory, (batch, k, n), grad.dtype, "bmm gradient") if node.needs(1) else None
    grad_a = new_tensor(node.memory, (batch, m, k), grad.dtype, "bmm gradient") if node.needs(0) else None
    return [grad_a, grad_b]


@autocast("baddbmm")
def baddbmm(bias: Tensor, a: Tensor, b: Tensor, name: str) -> Tensor:
    """Compute `bias + alpha * (a @ b)`, where the bias requires no gradient and alpha is not 1."""
    node = None
    if recording(a, b):
        node = Node(a.memory, _baddbmm_backward, (a, b), _wanted_by_each_other(a, b), (name, a.shape, b.shape))
    out = _multiplied(a, b, name)
    out.node = node
    return out


def _wanted_by_each_other(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return the factors whose counterpart requires a gradient."""
    return [t for t, other in ((a, b), (b, a)) if other.node is not None]


def _baddbmm_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grads_of_factors: list[Tensor | None] = []
    _saved = node.unpack()
    name, *factors = node.context
    works_backward(node, name, (*factors[0], factors[1][2]), grads[0].dtype)
    for i, shape in enumerate(factors):
        if not node.needs(i):
            grads_of_factors.append(None)
            continue
        product = new_tensor(node.memory, shape, grads[0].dtype, "baddbmm gradient")
        grads_of_factors.append(like(product, "baddbmm gradient"))  # times alpha
        del product
    return grads_of_factors


@autocast("baddbmm")
def biased_baddbmm(bias: Tensor, a: Tensor, b: Tensor, name: str) -> Tensor:
    """Compute `bias + (a @ b)`. It saves each factor whose counterpart requires a gradient."""
    node = None
    if recording(bias, a, b):
        context = name, a.shape, b.shape
        node = Node(a.memory, _biased_baddbmm_backward, (bias, a, b), _wanted_by_each_other(a, b), context)
    out = _multiplied(a, b, name)
    out.node = node
    return out


def _biased_baddbmm_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grad = grads[0]
    _saved = node.unpack()
    name, *factors = node.context
    works_backward(node, name, (*factors[0], factors[1][2]), grad.dtype, first=1)
    gradients = [
        new_tensor(node.memory, shape, grad.dtype, "baddbmm gradient") if node.needs(i) else None
        for i, shape in enumerate(factors, start=1)
    ]
    return [grad, *gradients]


@autocast("matmul")
def matmul(a: Tensor, b: Tensor, name: str) -> Tensor:
    """Compute `torch.matmul` of (..., m, k) and (..., k, n): expand, reshape to three dims, bmm, view."""
    lead = a.shape[:-2]
    flat = merge(*lead)
    left = reshape(expand(a, *a.shape), flat, *a.shape[-2:])
    right = reshape(expand(b, *lead, *b.shape[-2:]), flat, *b.shape[-2:])
    out = bmm(left, right, name)
    return view(out, *lead, a.shape[-2], b.shape[-1])
