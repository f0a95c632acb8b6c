"""What the kinds of context parallelism share: tensors laid out by token, and the whole sequence of a part."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from memcalc.core.dims import Dim, Shape
from memcalc.core.ops.attention import heads_inside
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.tensor import Sent, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.layout.collectives import Kind


def laid_out(like: Tensor, shape: Shape, name: str) -> Tensor:
    """A new tensor (batch, heads, seq, head_dim) in memory as (batch, seq, heads, head_dim), of the dtype of `like`."""
    return new_tensor(like.memory, shape, like.dtype, name, heads_inside(shape))


def send(of: Tensor, kind: Kind, name: str, shape: Shape) -> None:
    """Note a call over the context-parallel group; `shape` is that of its payload."""
    memory = of.memory
    memory.sent.append(Sent("cp", kind, name, memory.phase, memory.layer, shape, of.dtype))


def attends_in_parts(q: Tensor, v: Shape, times: int, parts: int, *, backward: bool = False) -> None:
    """Note fused attention of a rank's queries, which meet `times` such `parts` of as many keys as they are themselves."""
    shape = q.shape
    note = attends_backward if backward else attends
    note(q.memory, (*shape[:3], _share(shape[3], times, parts)), shape, (*v[:3], _share(v[3], times, parts)), q.dtype)


@lru_cache(maxsize=1024)
def _share(width: Dim, times: int, parts: int) -> Dim:
    """Of the width, which divides, where of a sequence that varies no share can be taken."""
    return Dim(f"{times}/{parts}·{width.name}", times * width.size // parts)


@lru_cache(maxsize=1024)
def whole_sequence(seq: Dim, ranks: int) -> Dim:
    """All tokens of a sequence of which a rank has `seq`."""
    return Dim(seq.name.removesuffix("/cp"), ranks * seq.size, tuple(ranks * c for c in seq.poly))  # type: ignore[arg-type]
