"""Ops that route tokens to experts: choosing, sorting and gathering tokens, and one product per expert.

Some backwards of torch write into fresh zeros: index_backward, topk's and gather's (FunctionsManual.cpp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, merge
from memcalc.core.dtypes import int64
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import like, of_two, recording
from memcalc.core.ops.shape import transpose, view
from memcalc.core.ops.work import works, works_backward
from memcalc.core.tensor import Strides, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dims import Dim, Shape
    from memcalc.core.dtypes import DType


def topk(a: Tensor, k: Dim) -> tuple[Tensor, Tensor]:
    """Compute `torch.topk(a, k, dim=-1)`: values and indices. It saves the indices."""
    shape = (*a.shape[:-1], k)
    values = new_tensor(a.memory, shape, a.dtype, "top values")
    indices = new_tensor(a.memory, shape, int64, "top indices")
    if recording(a):
        values.node = Node(a.memory, _topk_backward, (a,), (indices,))
    return values, indices


def maximum(a: Tensor) -> Tensor:
    """Compute `a.max(dim=-1).values`. It saves the indices, as topk with k = 1."""
    return view(topk(a, ONE_DIM)[0], *a.shape[:-1])


def _topk_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _indices = node.unpack()
    return [_written_into_zeros(node, grads[0], "top values gradient")]


def _written_into_zeros(node: Node, grad: Tensor, name: str) -> Tensor:
    return new_tensor(node.memory, node.metadata[0][0], grad.dtype, name)


def div_(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a /= b`. It saves b and a copy of the former a; the result has a's storage."""
    node = None
    if recording(a, b):
        original = like(a, "copy of the numerator")
        node = Node(a.memory, _div_backward, (a, b), (original, b))
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def div(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a / b`. It saves both."""
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
    """Compute `a += b` of the same shape. It saves nothing; the result has a's storage."""
    node = Node(a.memory, _add_inplace_backward, (a, b)) if recording(a, b) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _add_inplace_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [grads[0], grads[0]]


def gather(a: Tensor, where: Tensor) -> Tensor:
    """Compute `a.gather(-1, where)`. It saves a, for its shape, and the indices."""
    node = Node(a.memory, _gather_backward, (a,), (a, where)) if recording(a) else None
    out = new_tensor(a.memory, where.shape, a.dtype, "gathered")
    out.node = node
    return out


def _gather_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _a_and_where = node.unpack()
    return [_written_into_zeros(node, grads[0], "gathered gradient")]


def scatter(a: Tensor, where: Tensor) -> Tensor:
    """Compute `a.scatter(-1, where, number)`. It saves the indices."""
    node = Node(a.memory, _scatter_backward, (a,), (where,)) if recording(a) else None
    out = like(a, "scattered")
    out.node = node
    return out


def _scatter_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _where = node.unpack()
    return [like(grads[0], "scattered gradient")]


def scatter_(a: Tensor, where: Tensor, source: Tensor) -> Tensor:
    """Compute `a.scatter_(-1, where, source)`, where `a` requires no gradient. It saves the indices; the result has a's
    storage."""
    node = Node(a.memory, _scatter_inplace_backward, (source,), (where,)) if recording(source) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _scatter_inplace_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (where,) = node.unpack()
    return [new_tensor(node.memory, where.shape, grads[0].dtype, "scattered gradient")]


def masked_fill(a: Tensor, mask: Tensor) -> Tensor:
    """Compute `a.masked_fill(mask, number)`. It saves the mask."""
    node = Node(a.memory, _masked_fill_backward, (a,), (mask,)) if recording(a) else None
    out = like(a, "masked")
    out.node = node
    return out


def _masked_fill_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _mask = node.unpack()
    return [like(grads[0], "masked gradient")]


def sort(a: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `torch.sort` of integers: the sorted values and their former places."""
    return like(a, "sorted"), like(a, "permutation")


def index(a: Tensor, where: Tensor, name: str) -> Tensor:
    """Compute `a[where]`: rows of a. It saves the indices."""
    node = Node(a.memory, _index_backward, (a,), (where,), name) if recording(a) else None
    out = new_tensor(a.memory, (*where.shape, *a.shape[1:]), a.dtype, name)
    out.node = node
    return out


def index_one(a: Tensor, i: int, name: str) -> Tensor:
    """Compute `a[..., [k], ...]` in dim `i`: a copy of one entry. It saves the index."""
    where = new_tensor(a.memory, (ONE_DIM,), int64, "index")
    node = Node(a.memory, _index_backward, (a,), (where,), name) if recording(a) else None
    out = new_tensor(a.memory, (*a.shape[:i], ONE_DIM, *a.shape[i + 1 :]), a.dtype, name)
    out.node = node
    return out


def _index_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _where = node.unpack()
    return [_written_into_zeros(node, grads[0], f"{node.context} gradient")]


def index_two(a: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Compute `a[first, second]`. It saves both indices."""
    name = "weights of rows"
    node = Node(a.memory, _index_backward, (a,), (first, second), name) if recording(a) else None
    out = new_tensor(a.memory, (*first.shape, *a.shape[2:]), a.dtype, name)
    out.node = node
    return out


def index_put_(a: Tensor, where: Tensor, source: Tensor) -> Tensor:
    """Compute `a[where] = source`, where `a` requires no gradient. It saves the indices; the result has a's storage."""
    node = Node(a.memory, _index_put_backward, (source,), (where,)) if recording(source) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _index_put_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _where = node.unpack()
    return [new_tensor(node.memory, node.metadata[0][0], grads[0].dtype, "rows of the gradient")]


def index_add_(a: Tensor, where: Tensor, source: Tensor) -> Tensor:
    """Compute `a.index_add_(0, where, source)`. It saves the indices, and the source for its shape; the result has a's
    storage."""
    node = Node(a.memory, _index_add_backward, (a, source), (where, source)) if recording(a, source) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _index_add_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    _where, source = node.unpack()
    source_gradient = new_tensor(node.memory, source.shape, source.dtype, "rows of the gradient")
    return [grads[0] if node.needs(0) else None, source_gradient]


@autocast("linalg_vector_norm")
def absolute_norm(a: Tensor, dtype: DType | None = None) -> Tensor:
    """Compute `torch.norm(a, p=1, dim=-1, keepdim=True, dtype=dtype)`. It saves its input and its result."""
    out = new_tensor(a.memory, (*a.shape[:-1], ONE_DIM), dtype or a.dtype, "norm of the weights")
    if recording(a):
        result = Tensor(out.storage, out.shape, out.strides, out.dtype)
        out.node = Node(a.memory, _absolute_norm_backward, (a,), (a, result))
    return out


def _absolute_norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    a, _result = node.unpack()
    return [of_two(like(a, "sign"), grads[0], "norm gradient")]


def repeat_rows(a: Tensor, times: Dim) -> Tensor:
    """Compute `a.repeat(times, 1)`: `times` copies of the whole of a."""
    out = new_tensor(a.memory, (merge(times, a.shape[0]), a.shape[1]), a.dtype, "repeated rows")
    if recording(a):
        out.node = Node(a.memory, _repeat_rows_backward, (a,), (), a.shape)
    return out


def _repeat_rows_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [new_tensor(node.memory, node.context, grads[0].dtype, "sum over the repetitions")]


@autocast("sum")
def sum_first(a: Tensor, dtype: DType | None = None) -> Tensor:
    """Compute `a.sum(dim=0, dtype)`."""
    out = new_tensor(a.memory, a.shape[1:], dtype or a.dtype, "sum")
    if recording(a):
        out.node = Node(a.memory, _sum_first_backward, (a,), (), a.shape)
    return out


def _sum_first_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [Tensor(grads[0].storage, node.context, (0, *grads[0].strides), grads[0].dtype)]


@autocast("sum")
def sum_all(a: Tensor, dtype: DType | None = None) -> Tensor:
    """Compute `a.sum(dtype=dtype)`: a scalar."""
    out = new_tensor(a.memory, (), dtype or a.dtype, "sum")
    if recording(a):
        out.node = Node(a.memory, _sum_all_backward, (a,), (), a.shape)
    return out


def _sum_all_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [Tensor(grads[0].storage, node.context, (0,) * len(node.context), grads[0].dtype)]


@autocast("sum")
def sum_middle(a: Tensor, dtype: DType | None = None) -> Tensor:
    """Compute `a.sum(dim=1, dtype)` of three dims."""
    out = new_tensor(a.memory, (a.shape[0], a.shape[2]), dtype or a.dtype, "sum")
    if recording(a):
        out.node = Node(a.memory, _sum_middle_backward, (a,), (), a.shape)
    return out


def _sum_middle_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    grad = grads[0]
    return [Tensor(grad.storage, node.context, (grad.strides[0], 0, grad.strides[1]), grad.dtype)]


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, name: str, rows: Dim | None = None) -> Tensor:
    """Multiply each row of a (rows, k) by its expert's matrix of b (experts, k, n). It saves each factor
    whose counterpart requires a gradient, and the offsets.

    As for `mm`, the second factor's gradient is computed first. `rows` is the number of rows that belong to an expert,
    if a has room for more.
    """
    node, rows = None, rows or a.shape[0]
    if recording(a, b):
        saved = [t for t, other in ((a, b), (b, a)) if other.node is not None]
        node = Node(
            a.memory, _grouped_mm_backward, (a, b), (*saved, offsets), (name, rows, a.shape, b.shape, b.strides)
        )
    works(a.memory, name, (rows, *b.shape[1:]), a.dtype, kind="grouped matmul", groups=b.shape[0].size)
    out = new_tensor(a.memory, (a.shape[0], b.shape[2]), a.dtype, name)
    out.node = node
    return out


def _grouped_mm_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    _saved = node.unpack()
    name, rows, a, b, strides = node.context
    dtype = grads[0].dtype
    works_backward(node, name, (rows, *b[1:]), dtype, "grouped matmul", groups=b[0].size)
    grad_a = grad_b = None
    if node.needs(1):
        grad_b = _laid_out_as(strides, b, grads[0], f"{name} weight gradient")
    if node.needs(0):
        grad_a = new_tensor(node.memory, a, dtype, f"{name} input gradient")
    return [grad_a, grad_b]


def _laid_out_as(strides: Strides, b: Shape, grad: Tensor, name: str) -> Tensor:
    """Allocate the gradient of a factor (experts, k, n): each matrix is column-major if the factor's matrices are."""
    experts, k, n = b
    if strides[1] == 1:
        return transpose(new_tensor(grad.memory, (experts, n, k), grad.dtype, name), 1, 2)
    return new_tensor(grad.memory, (experts, k, n), grad.dtype, name)
