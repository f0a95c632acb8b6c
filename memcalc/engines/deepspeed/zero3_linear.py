"""The linear function that stage 3 calls instead of torch's (deepspeed/runtime/zero/linear.py, zero3_linear_wrap;
`memory_efficient_linear`, on by default).

The function saves input, weight and bias as they are, whether or not their gradients need them. It saves them after it
has run, so a recomputation that ends with this function has made its output.
"""

from __future__ import annotations

from memcalc.core.autograd import Node, sum_to
from memcalc.core.dims import merge
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.matmul import addmm, mm, times
from memcalc.core.ops.shape import reshape, transpose, view
from memcalc.core.tensor import Tensor


def zero3_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run LinearFunctionForZeroStage3: x (..., in), weight (out, in), bias (out) -> (..., out). A bias is added in
    place, or is part of the product of two matrices."""
    memory, name = x.memory, weight.name.removesuffix(".weight")
    inputs = (x, weight) if bias is None else (x, weight, bias)
    records, enabled = recording(*inputs), memory.grad_enabled
    memory.grad_enabled = False
    columns = transpose(weight, 0, 1)
    out = times(x, columns, name) if bias is None or len(x.shape) > 2 else addmm(bias, x, columns, name)
    memory.grad_enabled = enabled
    if records:
        out.node = Node(memory, _backward, inputs, inputs, name)
    return out


def _backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grad, (x, weight, *biases) = grads[0], node.unpack()
    rows, name = merge(*grad.shape[:-1]), node.context
    grad_input = grad_weight = None
    if node.needs(0):
        product = mm(reshape(grad, rows, grad.shape[-1]), weight, name=f"{name} input gradient")
        grad_input = view(product, *x.shape)
        grad_input.is_view = False  # matmul's own view of its product is none that autograd knows (_unsafe_view)
    if node.needs(1):
        columns = transpose(reshape(grad, rows, grad.shape[-1]), 0, 1)
        grad_weight = mm(columns, reshape(x, rows, x.shape[-1]), name=f"{name} weight gradient")
    return [grad_input, grad_weight, *(sum_to(grad, bias.shape) if node.needs(2) else None for bias in biases)]
