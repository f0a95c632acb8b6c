"""ZeRO-1 after backward: gradients are moved into the bucket and all-reduced, one bucket after the other.

Source: deepspeed/runtime/zero/stage_1_and_2.py (reduce_gradients, reduce_ipg_grads, copy_grads_in_partition).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.engines.deepspeed.all_reduces import Copies
from memcalc.engines.deepspeed.zero_layout import (
    STAGE_12,
    Flat,
    Owned,
    buckets_before_exceeding,
    flat,
    partitions,
    reduced_in_order,
    sent_dtype,
    sizes_of,
    unreached_of,
    whole_of,
)
from memcalc.engines.deepspeed.zero_partitions import block, owned_gradients, zeros

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Row
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


class Reducing(NamedTuple):
    """The elements alive besides the bucket while a bucket is reduced. They are plain integers: there is one record for
    each rank and bucket."""

    waiting: int
    """The elements of gradients that are not in a bucket."""
    owned: int
    """The elements of whole gradients that touch the rank's partition, copied out of the bucket."""
    copies: Copies = Copies(0, 0)
    zeros: int = 0
    """The elements of gradients made for parameters of the partition that have none, after all are reduced."""

    def nbytes(self, dtype: DType, sent: DType) -> int:
        return (self.waiting + self.owned + self.zeros) * dtype.itemsize + self.copies.nbytes(dtype, sent)


def buckets_in_order(model: Model, layout: Flat, most: int) -> list[list[int]]:
    """Return the places of the parameters of each bucket of at most `most` elements."""
    order, sizes = reduced_in_order(model, layout), sizes_of(model)
    return [[order[k] for k in bucket] for bucket in buckets_before_exceeding([sizes[i] for i in order], most)]


def most_while_reducing(model: Model, setup: Setup) -> tuple[Owned, Reducing]:
    """Return the moment with most bytes over all ranks and buckets, and the partitions of its rank. The moments are those while
    a bucket is reduced, and right after it.

    A gradient in the bucket is a view of it. One that is larger than the bucket stays where it is, until the rank's own
    gradients are copied out or, on other ranks, until the reduction is over.
    """
    ranks, most = setup.shards, setup.reduce_bucket_size
    assert most is not None
    layout, sizes = flat(model, ranks), sizes_of(model)
    buckets = buckets_in_order(model, layout, most)
    dtype, sent = setup.compute_dtype, sent_dtype(setup)
    large = [sum(sizes[i] for i in bucket if sizes[i] > most) for bucket in buckets]
    ordered = [[layout.order[i] for i in bucket] for bucket in buckets]
    bucket_of = {place: i for i, places in enumerate(ordered) for place in places}
    copies = [layout.copies(places, most, dtype, sent) for places in ordered]
    waiting = list(_left_after(buckets, sizes, large))
    heights = [n * dtype.itemsize + made.nbytes(dtype, sent) for n, made in zip(waiting, copies, strict=True)]

    def highest(first: int, end: int) -> int:
        return heights.index(max(heights[first:end]), first)

    def moments() -> Iterator[tuple[Owned, Reducing]]:
        for own in dict.fromkeys(partitions(model, ranks)):
            touched = {bucket_of[i] for part in own for i in range(part.first, part.end) if i in bucket_of}
            owned = first = gone = 0
            for touches in sorted(touched):
                i = highest(first, touches + 1)
                yield own, Reducing(waiting[i] - gone, owned, copies[i])
                owned = whole_of(own)
                yield own, Reducing(waiting[touches] - gone, owned)
                gone += large[touches]
                first = touches + 1
            if first < len(buckets):
                i = highest(first, len(buckets))
                yield own, Reducing(waiting[i] - gone, owned, copies[i])
            if zeros := unreached_of(own):
                yield own, Reducing(waiting[-1] - gone if waiting else 0, owned, zeros=zeros)

    return max(moments(), key=lambda one: one[1].nbytes(dtype, sent))


def _left_after(buckets: Sequence[Sequence[int]], sizes: Sequence[int], large: Sequence[int]) -> Iterator[int]:
    """Yield the elements of gradients that are in no bucket once each bucket is filled. Those that are larger than a bucket stay
    outside."""
    left = sum(sizes[i] for bucket in buckets for i in bucket)
    for bucket, outside in zip(buckets, large, strict=True):
        left -= sum(sizes[i] for i in bucket) - outside
        yield left


def rows_of(setup: Setup, most: Reducing, partition: int) -> list[Row]:
    """Return the rows of a moment of the reduction, on a rank that has `partition` elements."""
    dtype = setup.compute_dtype
    owned = owned_gradients(setup, most.owned, partition) if most.owned else []
    copy = bucket_copy(most.copies.joined, dtype) if most.copies.joined else []
    if most.copies.cast:
        name, life = "the bucket in the dtype that is sent", "a flush in backward"
        copy.append(block("buffers", name, "bucket", most.copies.cast, sent_dtype(setup), life, STAGE_12))
    return [*_rest(most.waiting, dtype), *owned, *zeros(most.zeros, dtype), *copy]


def _rest(elements: int, dtype: DType) -> list[Row]:
    life, name = "backward", "gradients not reduced yet"
    return [block("gradients", name, "parameters", elements, dtype, life, STAGE_12)] if elements else []


def bucket_copy(elements: int, dtype: DType) -> list[Row]:
    """Return the copy of the bucket that is all-reduced, if it goes to several ranks (allreduce_bucket, flatten)."""
    name = "copy of the bucket that is reduced"
    return [block("buffers", name, "bucket", elements, dtype, "a flush in backward", STAGE_12)]
