"""What a mixture of experts is routed with: choosing, sorting and gathering tokens, and one product per expert.

Where torch's backward would write into fresh zeros (index_backward, topk's scatter), it writes out of place under a
dispatch mode (areAnyTensorSubclassLike in FunctionsManual.cpp), so the oracle sees two tensors and so do we.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.autograd import Node
from memcalc.dtypes import int64
from memcalc.ops.autocast import autocast
from memcalc.ops.elementwise import like, of_two, recording
from memcalc.ops.shape import transpose
from memcalc.tensor import Strides, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.dims import Dim
    from memcalc.dtypes import DType


def topk(a: Tensor, k: Dim) -> tuple[Tensor, Tensor]:
    """torch.topk(a, k, dim=-1): values and indices; saves the indices."""
    shape = (*a.shape[:-1], k)
    values = new_tensor(a.memory, shape, a.dtype, "top values")
    indices = new_tensor(a.memory, shape, int64, "top indices")
    if recording(a):
        values.node = Node(a.memory, _topk_backward, (a,), (indices,))
    return values, indices


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


def _div_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    original, b = node.unpack()
    grad_b = _quotient_gradient(grads[0], original, b)
    return [of_two(grads[0], b, "quotient gradient"), grad_b]


def _quotient_gradient(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # -grad * ((a / b) / b): one C++ expression, whose temporaries live until its end.
    _temporaries = [of_two(a, b, "quotient gradient"), of_two(a, b, "quotient gradient"), like(grad, "neg")]
    return like(grad, "quotient gradient")


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


@autocast("sum")
def sum_middle(a: Tensor, dtype: DType | None = None) -> Tensor:
    """a.sum(dim=1, dtype) of three dims."""
    out = new_tensor(a.memory, (a.shape[0], a.shape[2]), dtype or a.dtype, "sum")
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
