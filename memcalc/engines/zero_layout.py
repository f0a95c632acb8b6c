"""How ZeRO lays a model out in DeepSpeed 0.19: flat buffers, buckets and sub-groups."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.dtypes import DType, fp32
from memcalc.engines.zero3_coordinator import Thresholds
from memcalc.profile import gradient_order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.inputs.model import Model
    from memcalc.setup import Setup

ALL_REDUCE_BUCKET: Final = 500_000_000  # elements; engine.py MEMORY_OPT_ALLREDUCE_SIZE, stage 0
ALIGNMENT: Final = 2  # nccl_start_alignment_factor

STAGE_0: Final = "deepspeed/runtime/fp16/fused_optimizer.py"
STAGE_12: Final = "deepspeed/runtime/zero/stage_1_and_2.py"
FUSED_ADAM: Final = "deepspeed/ops/adam/fused_adam.py"
COORDINATOR: Final = "deepspeed/runtime/zero/partitioned_param_coordinator.py"
STAGE_3: Final = "deepspeed/runtime/zero/stage3.py"


def sizes_of(model: Model) -> list[int]:
    """Elements of every parameter, in definition order."""
    if "sizes" not in model.profiles:
        model.profiles["sizes"] = [prod(shape) for _, shape, _ in model.weights()]
    return model.profiles["sizes"]


def flat_elements(model: Model, ranks: int) -> int:
    """Elements of the flat 16-bit buffer: all parameters, padded to a multiple of 2·ranks."""
    unit = ALIGNMENT * ranks
    return -(-model.num_parameters // unit) * unit


def thresholds_of(setup: Setup) -> Thresholds:
    """The options that decide what stage 3 gathers when."""
    live, reuse = setup.max_live_parameters, setup.max_reuse_distance
    persistence, prefetch = setup.param_persistence_threshold, setup.prefetch_bucket_size
    assert live is not None and reuse is not None and persistence is not None and prefetch is not None
    return Thresholds(live, reuse, persistence, prefetch)


def ready_order(model: Model) -> list[int]:
    """Places (in definition order) of the parameters in the order in which backward has their gradients ready."""
    if "ready order" not in model.profiles:
        places: dict[str, list[int]] = {}
        for i, weight in enumerate(model.program.weights()):
            places.setdefault(weight.name, []).append(i)
        model.profiles["ready order"] = [places[name].pop() for name, _ in gradient_order(model.program)]
    return model.profiles["ready order"]


class Partition(NamedTuple):
    """What one rank has of the flat buffer of stages 1 and 2."""

    first: int
    """The parameters that touch it, by their place in definition order: from `first` up to `end`."""
    end: int
    whole: int
    """Elements of these parameters, in the partition or not."""
    largest: int
    """Elements of the largest slice of one parameter."""
    before_largest: int
    """How many slices come before it."""
    padding: int
    """Elements of the buffer's padding."""

    def touches(self, parameters: range) -> bool:
        """Whether one of them is in it."""
        return self.first < parameters.stop and parameters.start < self.end


def partitions(model: Model, ranks: int) -> list[Partition]:
    """Every rank's part of the flat buffer (stage_1_and_2.py, get_partition_info)."""
    size = flat_elements(model, ranks) // ranks
    sizes = sizes_of(model)
    starts = list(accumulate(sizes, initial=0))
    out: list[Partition] = []
    for start in range(0, ranks * size, size):
        first = max(bisect_right(starts, start) - 1, 0)
        end = min(bisect_left(starts, start + size), len(sizes))
        slices = [min(starts[i + 1], start + size) - max(starts[i], start) for i in range(first, end)]
        here = [i for i, n in zip(range(first, end), slices, strict=True) if n > 0]
        first, end = (here[0], here[-1] + 1) if here else (len(sizes), len(sizes))
        inside = sum(n for n in slices if n > 0)
        slices = [n for n in slices if n > 0]
        largest = max(slices, default=0)
        last = max((i for i, n in enumerate(slices) if n == largest), default=0)
        out.append(Partition(first, end, sum(sizes[first:end]), largest, last, size - inside))
    return out


def straddling_elements(model: Model, ranks: int) -> int:
    """Elements of all parameters that touch the partition of the rank where that is most."""
    return max(partition.whole for partition in partitions(model, ranks))


def largest_group(model: Model) -> int:
    """Elements of the largest group that buffered_allreduce_fallback joins: it closes once it exceeds the bucket."""
    largest = current = 0
    for size in sizes_of(model):
        current += size
        largest = max(largest, current)
        if current > ALL_REDUCE_BUCKET:
            current = 0
    return largest


def buckets_before_exceeding(sizes: list[int], most: int) -> list[list[int]]:
    """Places of the gradients, which come in this order, bucket by bucket; one that is larger has its own."""
    out: list[list[int]] = []
    current = most  # the first bucket begins with the first gradient
    for i, n in enumerate(sizes):
        if current + n > most:
            out.append([])
            current = 0
        out[-1].append(i)
        current += n
    return out


class Flat(NamedTuple):
    """The flat buffer of stages 1 and 2: where each parameter begins, the end besides, and how much of it is one rank's."""

    starts: tuple[int, ...]
    partition: int

    def all_reduces(self, parameters: Iterable[int], most: int) -> list[list[int]]:
        """Elements of the slices of each all-reduce of one bucket (average_tensor, allreduce_and_scatter).

        A slice is what goes to one rank. A gradient larger than the bucket goes in several calls: one ends with the slice
        that exceeds `most`.
        """
        out: list[list[int]] = [[]]
        for n in self._slices(parameters):
            if sum(out[-1]) > most:
                out.append([])
            out[-1].append(n)
        return out

    def _slices(self, parameters: Iterable[int]) -> list[int]:
        slices: list[int] = []
        last = -1
        for i in parameters:
            start, end = self.starts[i], self.starts[i + 1]
            while start < end:
                rank = start // self.partition
                stop = min(end, (rank + 1) * self.partition)
                if rank == last:
                    slices[-1] += stop - start
                else:
                    slices.append(stop - start)
                start, last = stop, rank
        return slices


def flat(model: Model, ranks: int) -> Flat:
    """Where everything is."""
    return Flat(tuple(accumulate(sizes_of(model), initial=0)), flat_elements(model, ranks) // ranks)


class Copies(NamedTuple):
    """Elements of what an all-reduce copies."""

    joined: int
    """Its slices, one behind the other: one slice alone is reduced where it is (flatten)."""
    cast: int
    """The same in the dtype that is sent, where that is not the gradients'."""

    def nbytes(self, dtype: DType, sent: DType) -> int:
        return self.joined * dtype.itemsize + self.cast * sent.itemsize


def copied(calls: list[list[int]], dtype: DType, sent: DType) -> Copies:
    """The largest copies that one of these all-reduces of gradients of `dtype` makes (allreduce_bucket)."""
    made = [Copies(sum(call) if len(call) > 1 else 0, 0 if sent is dtype else sum(call)) for call in calls]
    return max(made, key=lambda copies: copies.nbytes(dtype, sent))


def sent_dtype(setup: Setup) -> DType:
    """What stages 1 and 2 all-reduce gradients in: fp32 where ranks share sequences (stage_1_and_2.py, allreduce_bucket)."""
    return fp32 if setup.cp > 1 else setup.compute_dtype


def first_to_own(model: Model, ranks: int, most: int) -> Partition:
    """Of the ranks whose gradients are in the first bucket that is reduced, the one with the most to hold."""
    order = ready_order(model)
    sizes = sizes_of(model)
    first = buckets_before_exceeding([sizes[i] for i in order], most)[0]
    in_first = {order[k] for k in first}
    owners = [part for part in partitions(model, ranks) if not in_first.isdisjoint(range(part.first, part.end))]
    return max(owners, key=lambda part: part.whole)


def sub_groups(partitions: list[int], size: int) -> list[int]:
    """Elements of the sub-groups that the step takes one at a time: each closes when it has `size`."""
    out: list[int] = []
    current = 0
    for n in partitions:
        current += n
        if current >= size:
            out.append(current)
            current = 0
    return [*out, current] if current or not out else out
