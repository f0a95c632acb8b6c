"""All-reduces of a bucket in DeepSpeed's stages 1 and 2, and the copies that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType


class AllReduce(NamedTuple):
    """One all-reduce call: the number of its ranks, and the elements of its slices. Each slice belongs to one rank."""

    ranks: int
    slices: list[int]


class Copies(NamedTuple):
    """The elements of the copies that an all-reduce makes."""

    joined: int
    """The elements of the slices in one block. A single slice is reduced in place (flatten)."""
    cast: int
    """The elements of the copy in the dtype that is sent, if it is not the gradients'."""

    def nbytes(self, dtype: DType, sent: DType) -> int:
        return self.joined * dtype.itemsize + self.cast * sent.itemsize


def copied(calls: list[AllReduce], dtype: DType, sent: DType) -> Copies:
    """Return the largest copies of one of these all-reduces, for gradients of `dtype` (allreduce_bucket)."""
    made = [
        Copies(sum(call.slices) if len(call.slices) > 1 else 0, 0 if sent is dtype else sum(call.slices))
        for call in calls
    ]
    return max(made, key=lambda copies: copies.nbytes(dtype, sent), default=Copies(0, 0))
