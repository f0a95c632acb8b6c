"""Parts that the layers of all grids share: collectives over a group of the grid, and tensors without a history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import ONE_DIM, Dim, divided, merge
from memcalc.core.ops.shape import reshape
from memcalc.core.tensor import Sent, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Memory
    from memcalc.layout.collectives import Kind


def send(memory: Memory, group: str, kind: Kind, name: str, shape: Shape, dtype: DType) -> None:
    """Record a collective over a group of the grid (`Grid.groups`). `shape` is that of its payload."""
    memory.sent.append(Sent(group, kind, name, memory.phase, memory.layer, shape, dtype))


def plain(x: Tensor) -> Tensor:
    """Return the tensor without its history, as an autograd function sees its inputs."""
    return Tensor(x.storage, x.shape, x.strides, x.dtype)


def flat(x: Tensor) -> Tensor:
    """Return a matrix of all rows: a view, or a copy if there is no such view."""
    return x if len(x.shape) == 2 else reshape(plain(x), merge(*x.shape[:-1]), x.shape[-1])


def shaped(x: Tensor, *shape: Dim) -> Tensor:
    """Return a view of a fresh tensor."""
    return reshape(x, *shape)


def own_sequences(ids: Tensor, parts: int) -> Tensor:
    """Return this rank's part of a batch, the sequences being cut (torch.chunk along the first dim): a view."""
    return Tensor(ids.storage, (divided(ids.shape[0], parts), *ids.shape[1:]), ids.strides, ids.dtype)


def many(dim: Dim, ranks: int) -> Dim:
    """Return the dim whose equal parts `ranks` ranks have, given one part."""
    name = dim.name.removesuffix(f"/{ranks}") if dim.name.endswith(f"/{ranks}") else f"{ranks}·{dim.name}"
    return Dim(name, ranks * dim.size, tuple(ranks * c for c in dim.poly))  # type: ignore[arg-type]


def along_first(x: Tensor, ranks: int) -> Shape:
    """Return the shape of the tensors of all ranks of a group, joined along the first dim."""
    return (many(x.shape[0], ranks), *x.shape[1:])


def per_token(x: Tensor, name: str, dtype: DType | None = None) -> Tensor:
    """Allocate a number for each token, with a last dim of one."""
    return new_tensor(x.memory, (*x.shape[:-1], ONE_DIM), dtype or x.dtype, name)
