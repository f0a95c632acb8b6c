"""Views, slices and sums along any dim, counted from the front.

As in `shape`: a view shares its input's storage, backward of a slice is a full tensor of zeros with the gradient in it,
and backward of `split` is one `cat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.dims import ONE_DIM, Dim, Shape, divided, merge
from memcalc.core.ops.elementwise import like, record, recording
from memcalc.core.ops.shape import clone, expand, reshape, unsqueeze, view
from memcalc.core.tensor import Strides, Tensor, contiguous_strides, new_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def with_dim(shape: Shape, i: int, *dims: Dim) -> Shape:
    """Return `shape` with `dims` in the place of dim `i`."""
    return (*shape[:i], *dims, *shape[i + 1 :])


def split_dim(a: Tensor, i: int, *dims: Dim) -> tuple[Tensor, ...]:
    """Compute `a.split(sizes, i)`: views with one grad_fn. Backward joins their gradients in one new tensor."""
    node = Node(a.memory, _split_backward, (a,), (), a.shape, outputs=len(dims)) if recording(a) else None
    return tuple(
        Tensor(a.storage, with_dim(a.shape, i, dim), a.strides, a.dtype, node, k) for k, dim in enumerate(dims)
    )


@no_kernel
def _split_backward(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor]:
    dtype = next(grad.dtype for grad in grads if grad is not None)
    # a part that nothing used gets a gradient of zeros (split_with_sizes_backward in FunctionsManual.cpp)
    _zeros = [new_tensor(node.memory, (), dtype, "zeros") for grad in grads if grad is None]
    return [new_tensor(node.memory, node.context, dtype, "split gradient")]


def chunk_dim(a: Tensor, i: int, chunks: int) -> tuple[Tensor, ...]:
    """Compute `a.chunk(chunks, i)`: equal parts."""
    return split_dim(a, i, *[divided(a.shape[i], chunks)] * chunks)


def narrow(a: Tensor, i: int, dim: Dim) -> Tensor:
    """Return a slice of dim `i` as a view. A slice of the whole dim is an alias of the tensor."""
    if dim.size == a.shape[i].size:
        node = Node(a.memory, _pass_backward, (a,)) if recording(a) else None
        return Tensor(a.storage, a.shape, a.strides, a.dtype, node)
    node = Node(a.memory, _slice_backward, (a,), (), a.shape) if recording(a) else None
    return Tensor(a.storage, with_dim(a.shape, i, dim), a.strides, a.dtype, node)


def select(a: Tensor, i: int) -> Tensor:
    """Return one place of dim `i`: a view without that dim."""
    node = Node(a.memory, _slice_backward, (a,), (), a.shape) if recording(a) else None
    return Tensor(a.storage, with_dim(a.shape, i), (*a.strides[:i], *a.strides[i + 1 :]), a.dtype, node)


@no_kernel
def _slice_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [new_tensor(node.memory, node.context, grads[0].dtype, "slice gradient")]


@no_kernel
def _pass_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads[:1]


def squeeze(a: Tensor, i: int) -> Tensor:
    """Compute `a.squeeze(i)` of a dim of size 1: a view."""
    node = Node(a.memory, _squeeze_backward, (a,), (), i) if recording(a) else None
    return Tensor(a.storage, with_dim(a.shape, i), (*a.strides[:i], *a.strides[i + 1 :]), a.dtype, node)


@no_kernel
def _squeeze_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    i: int = node.context
    grad = grads[0]
    stride = grad.strides[i] * grad.shape[i].size if i < len(grad.shape) else 1
    strides = (*grad.strides[:i], stride, *grad.strides[i:])
    return [Tensor(grad.storage, (*grad.shape[:i], ONE_DIM, *grad.shape[i:]), strides, grad.dtype)]


def unbind(a: Tensor, i: int) -> tuple[Tensor, ...]:
    """Compute `a.unbind(i)`: views without dim `i`, with one grad_fn. Backward stacks their gradients in one new
    tensor."""
    count = a.shape[i].size
    shape, strides = with_dim(a.shape, i), (*a.strides[:i], *a.strides[i + 1 :])
    node = Node(a.memory, _unbind_backward, (a,), (), a.shape, outputs=count) if recording(a) else None
    return tuple(Tensor(a.storage, shape, strides, a.dtype, node, k) for k in range(count))


@no_kernel
def _unbind_backward(node: Node, grads: Sequence[Tensor]) -> list[Tensor]:
    return [new_tensor(node.memory, node.context, grads[0].dtype, "unbind gradient")]


def permute(a: Tensor, *order: int) -> Tensor:
    """Compute `a.permute(order)`: a view."""
    node = Node(a.memory, _permute_backward, (a,), (), order) if recording(a) else None
    return _permuted(a, order, node)


def _permuted(a: Tensor, order: Sequence[int], node: Node | None = None) -> Tensor:
    return Tensor(a.storage, tuple(a.shape[i] for i in order), tuple(a.strides[i] for i in order), a.dtype, node)


@no_kernel
def _permute_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    order: tuple[int, ...] = node.context
    return [_permuted(grads[0], [order.index(i) for i in range(len(order))])]


def cat_dim(tensors: Sequence[Tensor], i: int, dim: Dim) -> Tensor:
    """Compute `torch.cat(tensors, i)`, contiguous; `dim` is the joined dim. Backward narrows the gradient to views."""
    first = tensors[0]
    out = new_tensor(first.memory, with_dim(first.shape, i, dim), first.dtype, "cat")
    if recording(*tensors):
        out.node = Node(first.memory, _cat_backward, tensors)
    return out


def _cat_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grad = grads[0]
    return [
        Tensor(grad.storage, shape, grad.strides, grad.dtype) if node.needs(k) else None
        for k, (shape, _) in enumerate(node.metadata)
    ]


def pad_dim(a: Tensor, i: int, dim: Dim) -> Tensor:
    """Compute `F.pad` of dim `i` to `dim`: a copy, even if nothing is added. Backward cuts the padding off, also by a
    copy."""
    node = Node(a.memory, _pad_backward, (a,), (), a.shape) if recording(a) else None
    shape = with_dim(a.shape, i, dim)
    if dim.size == a.shape[i].size:
        out = like(a, "padded")
    else:
        out = new_tensor(a.memory, shape, a.dtype, "padded", _channels_last(shape) if is_channels_last(a) else None)
    out.node = node
    return out


def _pad_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    grad = grads[0]
    return [like(Tensor(grad.storage, node.context, grad.strides, grad.dtype), "padded gradient")]


def is_channels_last(a: Tensor) -> bool:
    """Tell whether four dims are laid out as (0, 2, 3, 1) (c10/core/MemoryFormat.h, is_channels_last_strides_2d)."""
    if len(a.shape) != 4 or not a.strides[1]:
        return False
    least = 0
    for i in (1, 3, 2, 0):
        if a.strides[i] < least or (i == 0 and least == a.strides[1]):
            return False
        least = a.strides[i] * max(a.shape[i].size, 1)
    return True


def _channels_last(shape: Shape) -> Strides:
    batch, height, width, channels = contiguous_strides((shape[0], shape[2], shape[3], shape[1]))
    return (batch, channels, height, width)


def repeat_interleave(a: Tensor, i: int, dim: Dim) -> Tensor:
    """Compute `a.repeat_interleave(repeats, i)` up to `dim`: an expanded view and a copy."""
    repeats = Dim(f"{dim.name}/{a.shape[i].name}", dim.size // a.shape[i].size)
    repeated = clone(expand(unsqueeze(a, i + 1), *with_dim(a.shape, i, a.shape[i], repeats)))
    return view(repeated, *with_dim(a.shape, i, dim))


def repeat(a: Tensor, times: Dim) -> Tensor:
    """Compute `a.repeat(times, 1, ...)`: `times` copies of the whole of `a`. Backward sums the repetitions up."""
    out = new_tensor(a.memory, (merge(times, a.shape[0]), *a.shape[1:]), a.dtype, "repeated")
    return record(out, _repeat_backward, (a,), context=times)


def _repeat_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    grad, times, (shape, _) = grads[0], node.context, node.metadata[0]
    if times.size == 1:
        return [reshape(grad, *shape)]
    _repetitions = reshape(grad, times, *shape)
    return [new_tensor(node.memory, shape, grad.dtype, "sum over the repetitions")]


def assign_place(a: Tensor, i: int, value: Tensor) -> Tensor:
    """Compute `a.select(i, k).copy_(value)`: `a` with another grad_fn (torch/csrc/autograd/functions/tensor.cpp,
    CopySlices)."""
    node = None
    if recording(a, value):
        place = Tensor(a.storage, with_dim(a.shape, i), (*a.strides[:i], *a.strides[i + 1 :]), a.dtype)
        node = Node(a.memory, _assign_place_backward, (a, value), (), (a.strides, place.shape, place.strides))
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _assign_place_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    strides, shape, place_strides = node.context
    grad = grads[0]
    result = new_tensor(node.memory, grad.shape, grad.dtype, "gradient with the assigned place zero", strides)
    place_gradient = like(Tensor(result.storage, shape, place_strides, grad.dtype), "gradient of the assigned place")
    if not node.needs(0):
        return [None, place_gradient]
    _zeros = like(place_gradient, "zeros")
    return [result, place_gradient]
