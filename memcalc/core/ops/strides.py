"""Memory layouts: which views are free, which reshapes copy, and how an elementwise result is laid out.

Sources: aten/src/ATen/TensorUtils.cpp (computeStride), aten/src/ATen/TensorIterator.cpp (reorder_dimensions).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from memcalc.core.tensor import Strides, Tensor, contiguous_strides, is_dense, is_row_major, same_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dims import Shape


@lru_cache(maxsize=4096)
def view_strides(shape: Shape, strides: Strides, target: Shape) -> Strides | None:
    """Return the strides of `target` as a view of a tensor of `shape` and `strides`; None if only a copy can have that
    shape."""
    if any(not dim.size for dim in shape):
        return strides if same_sizes(shape, target) else contiguous_strides(target)
    new = [0] * len(target)
    j = len(target) - 1
    chunk_base = strides[-1] if strides else 1
    tensor_numel = view_numel = 1
    for i in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[i].size
        if i == 0 or (shape[i - 1].size != 1 and strides[i - 1] != tensor_numel * chunk_base):
            while j >= 0 and (view_numel < tensor_numel or target[j].size == 1):
                new[j] = view_numel * chunk_base
                view_numel *= target[j].size
                j -= 1
            if view_numel != tensor_numel:
                return None
            if i > 0:
                chunk_base = strides[i - 1]
                tensor_numel = view_numel = 1
    return tuple(new) if j < 0 else None


def elementwise_strides(shape: Shape, operands: Sequence[Tensor]) -> Strides:
    """Return the layout of an elementwise result: the operands' layout if they agree, else the first one's order of
    dims."""
    row_major = contiguous_strides(shape)
    for operand in operands:
        if operand.strides != row_major or not same_sizes(operand.shape, shape):
            return _layout(shape, tuple((t.shape, t.strides) for t in operands))
    return row_major


@lru_cache(maxsize=4096)
def _layout(shape: Shape, operands: tuple[tuple[Shape, Strides], ...]) -> Strides:
    if all(same_sizes(own, shape) for own, _ in operands):
        if all(is_row_major(shape, strides) for _, strides in operands):
            return contiguous_strides(shape)
        first = operands[0][1]
        if all(strides == first for _, strides in operands) and is_dense(shape, first):
            return first
    aligned = [_broadcast(own, strides, shape) for own, strides in operands]
    order: list[int] = list(range(len(shape) - 1, -1, -1))  # innermost dim first
    for i in range(1, len(order)):
        place = i
        for k in range(i - 1, -1, -1):
            comparison = _compare(order[k], order[place], aligned, shape)
            if comparison > 0:
                order[k], order[place] = order[place], order[k]
                place = k
            elif comparison < 0:
                break
    out = [0] * len(shape)
    step = 1
    for dim in order:
        out[dim] = step
        step *= shape[dim].size
    return tuple(out)


def _broadcast(own: Shape, strides: Strides, shape: Shape) -> list[int]:
    lead = len(shape) - len(own)
    return [0] * lead + [
        0 if dim.size == 1 and shape[lead + i].size != 1 else stride
        for i, (dim, stride) in enumerate(zip(own, strides, strict=True))
    ]


def _compare(dim0: int, dim1: int, operands: list[list[int]], shape: Shape) -> int:
    """Return > 0 if dim0 has to come after dim1 (TensorIterator's should_swap)."""
    for strides in operands:
        stride0, stride1 = strides[dim0], strides[dim1]
        if stride0 == 0 or stride1 == 0:
            continue
        if stride0 < stride1:
            return -1
        if stride0 > stride1:
            return 1
        if shape[dim0].size > shape[dim1].size:
            return 1
    return 0
