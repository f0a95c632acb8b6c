"""What a mixture of experts is routed with: choosing, sorting and gathering tokens, and one product per expert.

Where torch's backward would write into fresh zeros (index_backward, topk's scatter), it writes out of place under a
dispatch mode (areAnyTensorSubclassLike in FunctionsManual.cpp), so the oracle sees two tensors and so do we.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.autograd import Node
from memcalc.dims import ONE_DIM
from memcalc.dtypes import int64
from memcalc.ops.elementwise import like, of_two, recording
from memcalc.ops.shape import transpose, view
from memcalc.tensor import Strides, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.dims import Dim


def topk(a: Tensor, k: Dim) -> tuple[Tensor, Tensor]:
    """torch.topk(a, k, dim=-1): values and indices; saves the indices."""
    shape = (*a.shape[:-1], k)
    values = new_tensor(a.memory, shape, a.dtype, "top values")
    indices = new_tensor(a.memory, shape, int64, "top indices")
    if recording(a):
        values.node = Node(a.memory, _topk_backward, (a,), (indices,))
    return values, indices


def maximum(a: Tensor) -> Tensor:
    """a.max(dim=-1).values: saves the indices, as the first of topk."""
    return view(topk(a, ONE_DIM)[0], *a.shape[:-1])


def _topk_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _indices = node.unpack()
    return [_written_into_zeros(node, grads[0], "top values gradient")]


def _written_into_zeros(node: Node, grad: Tensor, name: str) -> Tensor:
    _zeros = new_tensor(node.memory, node.metadata[0][0], grad.dtype, name)
    return new_tensor(node.memory, node.metadata[0][0], grad.dtype, name)


def div_(a: Tensor, b: Tensor) -> Tensor:
    """a /= b: saves b, and a copy of what a was; the result has a's storage."""
    node = None
    if recording(a, b):
        original = like(a, "copy of the numerator")
        node = Node(a.memory, _div_backward, (a, b), (original, b))
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def div(a: Tensor, b: Tensor) -> Tensor:
    """a / b: saves both."""
    node = Node(a.memory, _div_backward, (a, b), (a, b)) if recording(a, b) else None
    out = of_two(a, b, "quotient")
    out.node = node
    return out


def _div_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    original, b = node.unpack()
    grad_b = _quotient_gradient(grads[0], original, b)
    return [of_two(grads[0], b, "quotient gradient"), grad_b]


def _quotient_gradient(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # -grad * ((a / b) / b): one C++ expression, whose temporaries live until its end.
    _temporaries = [of_two(a, b, "quotient gradient"), of_two(a, b, "quotient gradient"), like(grad, "neg")]
    return like(grad, "quotient gradient")


def add_(a: Tensor, b: Tensor) -> Tensor:
    """a += b of the same shape: saves nothing; the result has a's storage."""
    node = Node(a.memory, _add_inplace_backward, (a, b)) if recording(a, b) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _add_inplace_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [grads[0], grads[0]]


def gather(a: Tensor, where: Tensor) -> Tensor:
    """a.gather(-1, where): saves the indices."""
    node = Node(a.memory, _gather_backward, (a,), (where,)) if recording(a) else None
    out = new_tensor(a.memory, where.shape, a.dtype, "gathered")
    out.node = node
    return out


def _gather_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _where = node.unpack()
    return [_written_into_zeros(node, grads[0], "gathered gradient")]


def scatter(a: Tensor, where: Tensor) -> Tensor:
    """a.scatter(-1, where, number): saves the indices."""
    node = Node(a.memory, _scatter_backward, (a,), (where,)) if recording(a) else None
    out = like(a, "scattered")
    out.node = node
    return out


def _scatter_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _where = node.unpack()
    return [like(grads[0], "scattered gradient")]


def masked_fill(a: Tensor, mask: Tensor) -> Tensor:
    """a.masked_fill(mask, number): saves the mask."""
    node = Node(a.memory, _masked_fill_backward, (a,), (mask,)) if recording(a) else None
    out = like(a, "masked")
    out.node = node
    return out


def _masked_fill_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _mask = node.unpack()
    return [like(grads[0], "masked gradient")]


def sort(a: Tensor) -> tuple[Tensor, Tensor]:
    """torch.sort of integers: the sorted values and where they were."""
    return like(a, "sorted"), like(a, "permutation")


def index(a: Tensor, where: Tensor, name: str) -> Tensor:
    """a[where]: rows of a; saves the indices."""
    node = Node(a.memory, _index_backward, (a,), (where,), name) if recording(a) else None
    out = new_tensor(a.memory, (*where.shape, *a.shape[1:]), a.dtype, name)
    out.node = node
    return out


def _index_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _where = node.unpack()
    return [_written_into_zeros(node, grads[0], f"{node.context} gradient")]


def sum_middle(a: Tensor) -> Tensor:
    """a.sum(dim=1) of three dims."""
    out = new_tensor(a.memory, (a.shape[0], a.shape[2]), a.dtype, "sum")
    if recording(a):
        out.node = Node(a.memory, _sum_middle_backward, (a,), (), a.shape)
    return out


def _sum_middle_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    grad = grads[0]
    return [Tensor(grad.storage, node.context, (grad.strides[0], 0, grad.strides[1]), grad.dtype)]


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, name: str) -> Tensor:
    """Rows of a (rows, k) times their own expert's matrix of b (experts, k, n): saves both factors and the offsets.

    As for `mm`, the second factor's gradient comes first.
    """
    node = None
    if recording(a, b):
        node = Node(a.memory, _grouped_mm_backward, (a, b), (a, b, offsets), name)
    out = new_tensor(a.memory, (a.shape[0], b.shape[2]), a.dtype, name)
    out.node = node
    return out


def _grouped_mm_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    a, b, _offsets = node.unpack()
    grad_b = _laid_out_as(b.strides, b, f"{node.context} weight gradient")
    grad_a = new_tensor(node.memory, a.shape, a.dtype, f"{node.context} input gradient")
    return [grad_a, grad_b]


def _laid_out_as(strides: Strides, b: Tensor, name: str) -> Tensor:
    """The gradient of b (experts, k, n): each matrix column-major if b's are."""
    experts, k, n = b.shape
    if strides[1] == 1:
        return transpose(new_tensor(b.memory, (experts, n, k), b.dtype, name), 1, 2)
    return new_tensor(b.memory, (experts, k, n), b.dtype, name)
