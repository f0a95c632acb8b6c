"""Views, copies and joins.

A view shares its input's storage. A reshape copies if no view has the shape. Backward of a slice is a full tensor of
zeros with the gradient in it (slice_backward). Backward of `cat` is narrow views; backward of `split` is one `cat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node, no_kernel, sum_to
from memcalc.core.dims import ONE_DIM, Dim, Shape, divided
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.strides import view_strides
from memcalc.core.tensor import Strides, Tensor, contiguous_strides, is_contiguous, new_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dtypes import DType


def _view(a: Tensor, shape: Shape, strides: Strides, backward: object, context: object = None) -> Tensor:
    node = Node(a.memory, backward, (a,), (), context) if recording(a) else None  # type: ignore[arg-type]
    return Tensor(a.storage, shape, strides, a.dtype, node)


def view(a: Tensor, *shape: Dim) -> Tensor:
    """Compute `a.view(shape)`. Raises ValueError where torch would refuse it."""
    strides = view_strides(a.shape, a.strides, shape)
    if strides is None:
        raise ValueError(f"no view of {a.shape} {a.strides} has shape {shape}")
    return _view(a, shape, strides, _view_backward, a.shape)


@no_kernel
def _view_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [reshape(grads[0], *node.context)]


def reshape(a: Tensor, *shape: Dim) -> Tensor:
    """Compute `a.reshape(shape)`: a view if there is one, else a contiguous copy."""
    strides = view_strides(a.shape, a.strides, shape)
    if strides is not None:
        return _view(a, shape, strides, _view_backward, a.shape)
    copied = clone(a)
    return _view(copied, shape, contiguous_strides(shape), _view_backward, a.shape)


def clone(a: Tensor) -> Tensor:
    """Return a contiguous copy."""
    out = new_tensor(a.memory, a.shape, a.dtype, "contiguous copy")
    if recording(a):
        out.node = Node(a.memory, _pass_backward, (a,))
    return out


def contiguous(a: Tensor) -> Tensor:
    """Compute `a.contiguous()`: the tensor itself if it is contiguous."""
    return a if is_contiguous(a) else clone(a)


def _pass_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads[:1]


@no_kernel
def _alias_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads[:1]


def transpose(a: Tensor, i: int, j: int) -> Tensor:
    """Compute `a.transpose(i, j)`: a view."""
    return _view(a, *_swapped(a, i, j), _transpose_backward, (i, j))


def _swapped(a: Tensor, i: int, j: int) -> tuple[Shape, Strides]:
    shape, strides = list(a.shape), list(a.strides)
    shape[i], shape[j] = shape[j], shape[i]
    strides[i], strides[j] = strides[j], strides[i]
    return tuple(shape), tuple(strides)


@no_kernel
def _transpose_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [Tensor(grads[0].storage, *_swapped(grads[0], *node.context), grads[0].dtype)]


def part(a: Tensor, dim: Dim, axis: int = -1) -> Tensor:
    """Compute `a[..., i:i+dim]`: a slice of the last dim or of `axis`, as a view. A slice of the whole dim is an alias
    of the tensor."""
    if dim.size == a.shape[axis].size:
        return _view(a, a.shape, a.strides, _alias_backward)
    shape = list(a.shape)
    shape[axis] = dim
    return _view(a, tuple(shape), a.strides, _part_backward, a.shape)


@no_kernel
def _part_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [new_tensor(node.memory, node.context, grads[0].dtype, "slice gradient")]


def first(a: Tensor, *shape: Dim) -> Tensor:
    """Compute `a[:n, :m, ...]` of a tensor that requires no gradient: a view."""
    return Tensor(a.storage, shape, a.strides, a.dtype)


def select(a: Tensor, i: int) -> Tensor:
    """Compute `a.select(i, k)`: a view without dim `i`. Backward is a full tensor of zeros with the gradient in it."""
    shape, strides = (*a.shape[:i], *a.shape[i + 1 :]), (*a.strides[:i], *a.strides[i + 1 :])
    return _view(a, shape, strides, _part_backward, a.shape)


def every_second(a: Tensor) -> Tensor:
    """Compute `a[..., ::2]` or `a[..., 1::2]`: a view."""
    shape = (*a.shape[:-1], divided(a.shape[-1], 2))
    return _view(a, shape, (*a.strides[:-1], 2 * a.strides[-1]), _part_backward, a.shape)


def copy_into(a: Tensor, part_of_a: Tensor) -> Tensor:
    """Compute `a[..., i:i+n].copy_(part_of_a)`: `a` with another grad_fn (torch/csrc/autograd/functions/tensor.cpp,
    CopySlices)."""
    node = Node(a.memory, _copy_into_backward, (a, part_of_a)) if recording(a, part_of_a) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _copy_into_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    (shape, dtype), (part_shape, _) = node.metadata
    result = new_tensor(node.memory, shape, dtype, "gradient with the copied part zero")
    part_gradient = new_tensor(node.memory, part_shape, dtype, "gradient of the copied part")
    if not node.needs(0):
        return [None, part_gradient]
    _zeros = new_tensor(node.memory, part_shape, dtype, "zeros")
    return [result, part_gradient]


def interleave(tensors: Sequence[Tensor], dim: Dim) -> Tensor:
    """Compute `torch.stack(tensors, -1).flatten(-2)`, a new tensor; `dim` is the joined last dim. Backward selects
    views."""
    return reshape(stack(tensors, Dim(str(len(tensors)), len(tensors))), *tensors[0].shape[:-1], dim)


def repeat_interleave(a: Tensor, dim: Dim) -> Tensor:
    """Compute `a.repeat_interleave(n, dim=-1)`, a contiguous copy of an expanded view; `dim` is the new last dim."""
    count = Dim(str(dim.size // a.shape[-1].size), dim.size // a.shape[-1].size)
    expanded = expand(unsqueeze(a, len(a.shape)), *a.shape, count)
    return reshape(clone(expanded), *a.shape[:-1], dim)


def split(a: Tensor, *dims: Dim) -> tuple[Tensor, ...]:
    """Compute `a.split(sizes, -1)`: views with one grad_fn. Backward joins their gradients in one new tensor."""
    node = Node(a.memory, _split_backward, (a,), (), a.shape, outputs=len(dims)) if recording(a) else None
    return tuple(Tensor(a.storage, (*a.shape[:-1], dim), a.strides, a.dtype, node, i) for i, dim in enumerate(dims))


@no_kernel
def _split_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    dtype = next(grad.dtype for grad in grads if grad is not None)  # type: ignore[redundant-expr]
    return [new_tensor(node.memory, node.context, dtype, "split gradient")]


def chunk(a: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """Compute `a.chunk(chunks, -1)`: equal parts."""
    return split(a, *[divided(a.shape[-1], chunks)] * chunks)


def split_one(a: Tensor, i: int) -> tuple[Tensor, ...]:
    """Compute `a.split(1, i)`: views of size 1 in dim `i`, with one grad_fn as in `split`."""
    count = a.shape[i].size
    shape = (*a.shape[:i], ONE_DIM, *a.shape[i + 1 :])
    node = Node(a.memory, _split_backward, (a,), (), a.shape, outputs=count) if recording(a) else None
    return tuple(Tensor(a.storage, shape, a.strides, a.dtype, node, k) for k in range(count))


def cat(tensors: Sequence[Tensor], dim: Dim, axis: int = -1) -> Tensor:
    """Compute `torch.cat(tensors, axis)`, contiguous; `dim` is the joined dim."""
    first = tensors[0]
    shape = list(first.shape)
    shape[axis] = dim
    out = new_tensor(first.memory, tuple(shape), _widest(tensors), "cat")
    if recording(*tensors):
        out.node = Node(first.memory, _cat_backward, tensors, (), [t.shape for t in tensors])
    return out


def _widest(tensors: Sequence[Tensor]) -> DType:
    """Return the dtype of a join of several dtypes of one kind: the widest."""
    return max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)


def _cat_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grad = grads[0]
    return [
        Tensor(grad.storage, shape, grad.strides, grad.dtype) if node.needs(i) else None
        for i, shape in enumerate(node.context)
    ]


def stack(tensors: Sequence[Tensor], dim: Dim) -> Tensor:
    """Compute `torch.stack(tensors, -1)`, contiguous; `dim` counts the tensors. Backward is a view for each."""
    first = tensors[0]
    out = new_tensor(first.memory, (*first.shape, dim), _widest(tensors), "stack")
    if recording(*tensors):
        out.node = Node(first.memory, _stack_backward, tensors)
    return out


def _stack_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    (grad,) = grads
    piece = Tensor(grad.storage, grad.shape[:-1], grad.strides[:-1], grad.dtype)
    return [piece if node.needs(i) else None for i in range(len(node.edges))]


def unsqueeze(a: Tensor, i: int) -> Tensor:
    """Insert a dim of size 1 before dim `i` (i >= 0): a view."""
    stride = a.strides[i] * a.shape[i].size if i < len(a.shape) else 1
    strides = (*a.strides[:i], stride, *a.strides[i:])
    return _view(a, (*a.shape[:i], ONE_DIM, *a.shape[i:]), strides, _view_backward, a.shape)


def expand(a: Tensor, *shape: Dim) -> Tensor:
    """Compute `a.expand(shape)` with as many dims as before: a view with stride 0."""
    strides = tuple(
        stride if dim.size == target.size else 0 for dim, target, stride in zip(a.shape, shape, a.strides, strict=True)
    )
    return _view(a, shape, strides, _expand_backward, a.shape)


@no_kernel
def _expand_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    grad = grads[0]
    return [grad if [d.size for d in grad.shape] == [d.size for d in node.context] else sum_to(grad, node.context)]


def rotate_half(a: Tensor) -> Tensor:
    """Compute `cat((-a[..., half:], a[..., :half]))`: the two slices, a negated copy, and the join."""
    half = divided(a.shape[-1], 2)
    first = part(a, half)
    second = part(a, half)
    return cat((-second, first), a.shape[-1])
