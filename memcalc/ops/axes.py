"""Views, slices and sums along any dim.

As in `shape`: a view shares its input's storage, backward of a slice is a full tensor of zeros with the gradient in it,
backward of `split` is one `cat`. A dim is counted from the front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.autograd import Node
from memcalc.dims import ONE_DIM, Dim, Shape, divided
from memcalc.ops.elementwise import recording
from memcalc.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def with_dim(shape: Shape, i: int, *dims: Dim) -> Shape:
    """`shape` with `dims` in the place of dim `i`."""
    return (*shape[:i], *dims, *shape[i + 1 :])


def split_dim(a: Tensor, i: int, *dims: Dim) -> tuple[Tensor, ...]:
    """a.split(sizes, i): views with one grad_fn; backward joins their gradients in one new tensor."""
    node = Node(a.memory, _split_backward, (a,), (), a.shape, outputs=len(dims)) if recording(a) else None
    return tuple(
        Tensor(a.storage, with_dim(a.shape, i, dim), a.strides, a.dtype, node, k) for k, dim in enumerate(dims)
    )


def _split_backward(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor]:
    dtype = next(grad.dtype for grad in grads if grad is not None)
    # a part that nothing used has a gradient of zeros (split_with_sizes_backward in FunctionsManual.cpp)
    _zeros = [new_tensor(node.memory, (), dtype, "zeros") for grad in grads if grad is None]
    return [new_tensor(node.memory, node.context, dtype, "split gradient")]


def chunk_dim(a: Tensor, i: int, chunks: int) -> tuple[Tensor, ...]:
    """a.chunk(chunks, i) into equal parts."""
    return split_dim(a, i, *[divided(a.shape[i], chunks)] * chunks)


def narrow(a: Tensor, i: int, dim: Dim) -> Tensor:
    """A slice of dim `i`, a view; the whole of it is the tensor's alias."""
    if dim.size == a.shape[i].size:
        node = Node(a.memory, _pass_backward, (a,)) if recording(a) else None
        return Tensor(a.storage, a.shape, a.strides, a.dtype, node)
    node = Node(a.memory, _slice_backward, (a,), (), a.shape) if recording(a) else None
    return Tensor(a.storage, with_dim(a.shape, i, dim), a.strides, a.dtype, node)


def select(a: Tensor, i: int) -> Tensor:
    """One place of dim `i`, a view without that dim."""
    node = Node(a.memory, _slice_backward, (a,), (), a.shape) if recording(a) else None
    return Tensor(a.storage, with_dim(a.shape, i), (*a.strides[:i], *a.strides[i + 1 :]), a.dtype, node)


def _slice_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [new_tensor(node.memory, node.context, grads[0].dtype, "slice gradient")]


def _pass_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads[:1]


def squeeze(a: Tensor, i: int) -> Tensor:
    """a.squeeze(i) of a dim of size 1: a view."""
    node = Node(a.memory, _squeeze_backward, (a,), (), i) if recording(a) else None
    return Tensor(a.storage, with_dim(a.shape, i), (*a.strides[:i], *a.strides[i + 1 :]), a.dtype, node)


def _squeeze_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    i, grad = node.context, grads[0]
    stride = grad.strides[i] * grad.shape[i].size if i < len(grad.shape) else 1
    strides = (*grad.strides[:i], stride, *grad.strides[i:])
    return [Tensor(grad.storage, (*grad.shape[:i], ONE_DIM, *grad.shape[i:]), strides, grad.dtype)]
