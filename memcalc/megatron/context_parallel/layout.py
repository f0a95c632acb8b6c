"""Parts that all kinds of context parallelism use: tensors laid out by token, and the whole sequence of a part."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim, Shape
from memcalc.core.ops.attention import heads_inside
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.tensor import Sent, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.layout.collectives import Kind


_DIAGONAL: Final = 2
Laid = Callable[["Tensor"], "Tensor"]
"""A function that returns a tensor in the layout that a kernel takes: the tensor itself, or a copy."""


def laid_out(like: Tensor, shape: Shape, name: str) -> Tensor:
    """Allocate a tensor (batch, heads, seq, head_dim), laid out as (batch, seq, heads, head_dim), with the dtype of
    `like`."""
    return new_tensor(like.memory, shape, like.dtype, name, heads_inside(shape))


def send(of: Tensor, kind: Kind, name: str, shape: Shape, group: str = "cp") -> None:
    """Record a call over the context-parallel group, or a part of it. `shape` is that of its payload."""
    memory = of.memory
    memory.sent.append(Sent(group, kind, name, memory.phase, memory.layer, shape, of.dtype))


def attends_in_parts(q: Tensor, v: Shape, times: int, parts: int, *, backward: bool = False) -> None:
    """Record fused attention of a rank's queries with `times / parts` as many keys as queries.

    Two of the parts are on the diagonal, where a causal kernel leaves out half; the others are whole. The number of heads is
    multiplied by the share of keys: the width of a head decides the speed of a kernel.
    """
    batch, heads, seq, width = q.shape
    note = attends_backward if backward else attends
    for count, is_causal in ((_DIAGONAL, True), (times - _DIAGONAL, False)):
        if heads.size * count % parts:  # a part of a single head
            own, values = (*q.shape[:3], share(width, count, parts)), (*v[:3], share(v[3], count, parts))
        else:
            computed = share(heads, count, parts)
            own, values = (batch, computed, seq, width), (batch, computed, *v[2:])
        note(q.memory, own, q.shape, values, q.dtype, is_causal)


@lru_cache(maxsize=1024)
def share(width: Dim, times: int, parts: int) -> Dim:
    """Return `times / parts` of a width or a number of heads, which divides evenly; a sequence of varying length need not."""
    return Dim(f"{times}/{parts}·{width.name}", times * width.size // parts)


@lru_cache(maxsize=1024)
def whole_sequence(seq: Dim, ranks: int) -> Dim:
    """Return the dim of a whole sequence, if a rank has `seq` tokens of it."""
    return Dim(seq.name.removesuffix("/cp"), ranks * seq.size, tuple(ranks * c for c in seq.poly))  # type: ignore[arg-type]
