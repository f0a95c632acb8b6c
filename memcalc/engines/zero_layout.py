"""How ZeRO lays a model out in DeepSpeed 0.19: flat buffers, buckets and sub-groups."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

ALL_REDUCE_BUCKET: Final = 500_000_000  # elements; engine.py MEMORY_OPT_ALLREDUCE_SIZE, stage 0
ALIGNMENT: Final = 2  # nccl_start_alignment_factor

STAGE_0: Final = "deepspeed/runtime/fp16/fused_optimizer.py"
STAGE_12: Final = "deepspeed/runtime/zero/stage_1_and_2.py"
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


def straddling_elements(model: Model, ranks: int) -> int:
    """Elements of all parameters that touch the partition of the rank where that is most."""
    size = flat_elements(model, ranks) // ranks
    worst = [0] * ranks
    start = 0
    for n in sizes_of(model):
        for rank in range(start // size, (start + n - 1) // size + 1):
            worst[rank] += n
        start += n
    return max(worst)


def largest_group(model: Model) -> int:
    """Elements of the largest group that buffered_allreduce_fallback joins: it closes once it exceeds the bucket."""
    largest = current = 0
    for size in sizes_of(model):
        current += size
        largest = max(largest, current)
        if current > ALL_REDUCE_BUCKET:
            current = 0
    return largest


def buckets_before_exceeding(sizes: list[int], most: int) -> list[int]:
    """Elements of the reduce buckets of so many, from the last parameter to the first; a larger one has its own."""
    out: list[int] = []
    current = 0
    for n in reversed(sizes):
        if current and current + n > most:
            out.append(current)
            current = 0
        current += n
    return [*out, current]


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
