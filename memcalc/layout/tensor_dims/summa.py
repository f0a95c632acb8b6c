"""Products of matrices on a square of q·q ranks by SUMMA (colossalai/legacy/nn/layer/parallel_2d/_operation.py, and
parallel_2p5d, where each of d squares does the same with its own sequences).

A product takes q steps. Each step broadcasts a block of A along the rows of ranks and a block of B along the columns,
or reduces a block of the result. Two buffers of each take turns, so that a step's broadcast runs beside the product
before it. A and B themselves are saved, blocks as small as a rank's own part. The gradients are products of the same kind:
C = A·B has dA = dC·Bᵀ and dB = Aᵀ·dC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.work import works
from memcalc.core.tensor import new_tensor
from memcalc.layout.tensor_dims.sending import flat, plain, send, shaped

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor


def times(x: Tensor, weight: Tensor, steps: int, name: str) -> Tensor:
    """Compute x (…, in/q) times the weight's block (in/q, out/q): Matmul_AB_2D."""
    out = shaped(_ab(x, weight, steps, f"{name}: input", f"{name}: weight"), *x.shape[:-1], weight.shape[1])
    if recording(x, weight):
        out.node = Node(x.memory, _times_backward, (x, weight), (x, weight), (steps, name))
    return out


def _times_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    steps, name = node.context
    x, weight = node.unpack()
    grad = grads[0]
    grad_x = shaped(_abt(grad, weight, steps, f"{name}: weight", f"{name}: input gradient"), *x.shape)
    return [grad_x, _atb(x, grad, steps, f"{name}: input", f"{name}: weight gradient")]


def times_transposed(x: Tensor, weight: Tensor, steps: int, name: str) -> Tensor:
    """Compute x (…, in/q) times the transpose of the block (out/q, in/q): Matmul_ABT_2D, which computes logits."""
    out = shaped(_abt(x, weight, steps, f"{name}: weight", f"{name}: output"), *x.shape[:-1], weight.shape[0])
    if recording(x, weight):
        out.node = Node(x.memory, _times_transposed_backward, (x, weight), (x, weight), (steps, name))
    return out


def _times_transposed_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    steps, name = node.context
    x, weight = node.unpack()
    grad = grads[0]
    grad_x = shaped(_ab(grad, weight, steps, f"{name}: output gradient", f"{name}: weight"), *x.shape)
    return [grad_x, _atb(grad, x, steps, f"{name}: output gradient", f"{name}: weight gradient")]


def _ab(a: Tensor, b: Tensor, steps: int, name_a: str, name_b: str) -> Tensor:
    """Add up q products of broadcast blocks: A along the row, B along the column."""
    a, b, memory = flat(a), plain(b), a.memory
    out = new_tensor(memory, (a.shape[0], b.shape[1]), a.dtype, "product")
    _buffers = [like(a, "broadcast block") for _ in range(2)], [like(b, "broadcast block") for _ in range(2)]
    works(memory, "", (*out.shape, a.shape[1]), a.dtype, steps)
    for _ in range(steps):
        send(memory, "row", "broadcast", name_a, a.shape, a.dtype)
        send(memory, "column", "broadcast", name_b, b.shape, b.dtype)
    return shaped(out, *out.shape)  # C.reshape: a view, to which autograd adds nothing in place


def _abt(a: Tensor, b: Tensor, steps: int, name_b: str, name_c: str) -> Tensor:
    """Multiply with q broadcast blocks of B, and reduce each product to the rank of the row that it belongs to."""
    a, b, memory = flat(a), plain(b), a.memory
    out = new_tensor(memory, (a.shape[0], b.shape[0]), a.dtype, "product")
    _buffers = [like(b, "broadcast block") for _ in range(2)], [like(out, "block to reduce") for _ in range(2)]
    works(memory, "", (*out.shape, a.shape[1]), a.dtype, steps)
    for _ in range(steps):
        send(memory, "column", "broadcast", name_b, b.shape, b.dtype)
        send(memory, "row", "reduce", name_c, out.shape, out.dtype)
    return shaped(out, *out.shape)


def _atb(a: Tensor, b: Tensor, steps: int, name_a: str, name_c: str) -> Tensor:
    """Multiply q broadcast blocks of A with B, and reduce each product to the rank of the column that it belongs to."""
    a, b, memory = flat(a), flat(b), a.memory
    out = new_tensor(memory, (a.shape[1], b.shape[1]), a.dtype, "product")
    _buffers = [like(a, "broadcast block") for _ in range(2)], [like(out, "block to reduce") for _ in range(2)]
    works(memory, "", (*out.shape, a.shape[0]), a.dtype, steps)
    for _ in range(steps):
        send(memory, "row", "broadcast", name_a, a.shape, a.dtype)
        send(memory, "column", "reduce", name_c, out.shape, out.dtype)
    return shaped(out, *out.shape)
