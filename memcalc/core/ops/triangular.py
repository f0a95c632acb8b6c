"""Triangular systems.

Sources: tools/autograd/derivatives.yaml (linalg_solve_triangular), FunctionsManual.cpp
(linalg_solve_triangular_backward), torch/_meta_registrations.py (linalg_solve_triangular_meta).
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.shape import transpose
from memcalc.core.ops.work import works
from memcalc.core.tensor import Tensor, new_tensor


def solve_triangular(a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch.linalg.solve_triangular(a, b)`. It saves a and its result; each matrix of the result is
    column-major."""
    out = _column_major(b)
    if recording(a, b):
        result = Tensor(out.storage, out.shape, out.strides, out.dtype)
        out.node = Node(out.memory, _solve_triangular_backward, (a, b), (a, result))
    return out


def _column_major(b: Tensor) -> Tensor:
    last = len(b.shape) - 1
    made = new_tensor(b.memory, (*b.shape[:-2], b.shape[-1], b.shape[-2]), b.dtype, "solution")
    return transpose(made, last - 1, last)


def _solve_triangular_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    a, result = node.unpack()
    grad_b = _column_major(grads[0])
    # -matmul(grad_b, result.mH), then its triangle: each takes the name of the one before.
    works(a.memory, "system gradient", (*result.shape, a.shape[-1]), a.dtype)
    product = new_tensor(a.memory, a.shape, a.dtype, "system gradient")
    grad_a = new_tensor(a.memory, a.shape, a.dtype, "system gradient")
    del product
    grad_a = new_tensor(a.memory, a.shape, a.dtype, "system gradient")
    return [grad_a, grad_b]
