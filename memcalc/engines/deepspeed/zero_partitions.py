"""A rank's part of the flat buffers of DeepSpeed's ZeRO-1 and ZeRO-2, in rows: states, gradients, and the temporaries
of its step.

Source: deepspeed/runtime/zero/stage_1_and_2.py. Each of the optimizer's groups of parameters has a flat buffer and is
updated after the previous group. The gradients of all groups are one block, which is freed with the last group.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, fp32, fp64
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import state_rows
from memcalc.engines.deepspeed.zero_layout import STAGE_12, Owned, groups_of, inside_of, over, unreached_of, whole_of
from memcalc.engines.deepspeed.zero_optimizer import PARTITION, temporaries_of_step
from memcalc.optimizers import Parameter

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_IN_STEP: Final = "within the step"
FP32_COPY: Final = "flat fp32 copy of the weights"
"""The name of the copy that stages 1 to 3 update if the weights themselves are fp32: the stages clone their partition
even then."""


def block(component: str, name: str, dims: str, elements: int, dtype: DType, life: str, source: str) -> Row:
    """Return the row of a block of one dim."""
    return Row(component, name, (Dim(dims, elements),), dtype, life=life, basis="modelled", source=source)  # type: ignore[arg-type]


def nbytes_of(rows: list[Row]) -> int:
    """Return the bytes of all rows together."""
    return sum(row.nbytes for row in rows)


def partitioned_states(setup: Setup, model: Model, ranks: int) -> list[Row]:
    """Return the fp32 master and the optimizer's states of a rank's partitions."""
    sizes = Counter((group.alike > 1, group.partition) for group in groups_of(model, ranks))
    return [
        row
        for (experts, size), groups in sizes.items()
        for row in flat_states(setup, size, STAGE_12, groups, "expert_parameters/(dp/ep)" if experts else _all(setup))
    ]


def _all(setup: Setup) -> str:
    """Return the name of the dim of a partition of all parameters."""
    return f"parameters/{over(setup)}"


def flat_states(setup: Setup, elements: int, source: str, count: int = 1, dim: str | None = None) -> list[Row]:
    """Return the fp32 master and the optimizer's states of `count` partitions of `elements` elements. `dim` is the name
    of their dim if they are not of all parameters."""
    dim = dim or _all(setup)
    flat = Parameter(PARTITION, (Dim(dim, elements),), count, False)
    name = "fp32 master" if setup.has_master_weights else FP32_COPY
    master = block("optimizer_states", name, dim, elements, fp32, "always", source)._replace(copies=count)
    return [master, *(row for row in state_rows(setup, [flat], fp32) if row.shape)]  # DeepSpeed counts steps in Python


def owned_gradients(setup: Setup, whole: int, partition: int) -> list[Row]:
    """Return the gradients that stay on the rank: whole ones of all parameters that touch its partition
    (copy_grads_in_partition).

    In stage 1 the textbook's gradients are all of them, and these copies are added when they are reduced.
    """
    dtype, life = setup.compute_dtype, "the first flush to the step"
    component = "buffers" if setup.zero == 1 else "gradients"
    name = "rest of the gradients that straddle the partition"
    inside = min(whole, partition)
    own = block(component, "gradients of the partition", _all(setup), inside, dtype, life, STAGE_12)
    if whole <= partition:
        return [own]
    return [own, block("buffers", name, "straddling", whole - partition, dtype, life, STAGE_12)]


class _Moment(NamedTuple):
    """The rows of a step at one moment, besides gradients and their padding."""

    rows: tuple[Row, ...]
    nbytes: int


def step_of(owned: Owned, setup: Setup) -> list[Row]:
    """Return the rows of the largest peak of one rank's step(). The candidates are a slice in fp64 for a group's norm,
    a partition joined and in fp32, and the optimizer's step over it. Gradients that were cast or joined are freed
    before the optimizer's step of the last group."""
    whole, dtype = whole_of(owned), setup.compute_dtype
    gradients = [*(owned_gradients(setup, whole, inside_of(owned)) if whole else []), *zeros_of(owned, dtype)]
    left = [*accumulate((part.padding for part in reversed(owned)), initial=0)][::-1]
    held = [nbytes_of(gradients) + padding * dtype.itemsize for padding in left]
    peaks = [(held[0], 0, _norm(part.largest, part.before_largest, i)) for i, part in enumerate(owned)]
    how = setup.optimizer, setup.optimizer_implementation, dtype, _all(setup)
    for i, part in enumerate(owned):
        joined = part.slices + (part.padding > 0) > 1
        cast, step = _update(part.size, joined, *how)
        is_view = not joined and dtype is fp32
        after = i if is_view else i + 1
        peaks += [(held[i], i, cast), (0 if after == len(owned) else held[after], after, step)]
    _, place, most = max(peaks, key=lambda peak: peak[0] + peak[2].nbytes)
    return [*(gradients if place < len(owned) else ()), *_padding(left[place], dtype), *most.rows]


def zeros_of(owned: Owned, dtype: DType) -> list[Row]:
    """Return the gradients made for parameters of a rank's partitions that have none (get_all_grad_tensors)."""
    return zeros(unreached_of(owned), dtype)


def zeros(elements: int, dtype: DType) -> list[Row]:
    """Return gradients of zeros with `elements` elements. The gradients of the partition include their places, too."""
    life, name = "the end of backward to the step", "zeros for what gets no gradient"
    return [block("buffers", name, "parameters", elements, dtype, life, STAGE_12)] if elements else []


def _padding(elements: int, dtype: DType) -> list[Row]:
    """Return the zeros behind the gradients of groups that are not updated yet."""
    name = "padding of the gradients"
    return [block("temporaries", name, "padding", elements, dtype, _IN_STEP, STAGE_12)] if elements else []


@lru_cache(maxsize=4096)
def _update(
    size: int, joined: bool, optimizer: str, implementation: str, dtype: DType, dim: str
) -> tuple[_Moment, _Moment]:
    """Return the two moments of an update: a partition's gradients in one block (joined unless they are one slice,
    flatten) and in fp32, then the optimizer's step over the fp32 block."""
    name = "gradients of the partition"
    norm = block("buffers", "the norm of the gradients", "numbers", 2, fp32, _IN_STEP, STAGE_12)
    one_block = block("temporaries", f"{name}, joined", dim, size, dtype, _IN_STEP, STAGE_12)
    in_fp32 = block("temporaries", f"{name} in fp32", dim, size, fp32, _IN_STEP, STAGE_12)
    made = [one_block] if joined else []
    cast = [in_fp32] if dtype is not fp32 else []
    step = [norm, *(cast or made), *temporaries_of_step(optimizer, implementation, dim, size)]
    return _Moment((norm, *made, *cast), nbytes_of([norm, *made, *cast])), _Moment(tuple(step), nbytes_of(step))


@lru_cache(maxsize=4096)
def _norm(largest: int, before_largest: int, before: int) -> _Moment:
    """Return the moment at which a group's norm is computed, after those of the groups `before` it."""
    rows = [
        block("temporaries", "a gradient in fp64 for the norm", "largest slice", largest, fp64, _IN_STEP, STAGE_12),
        block("temporaries", "norms of gradients", "numbers", before_largest + 1, fp64, _IN_STEP, STAGE_12),
    ]
    if before:
        rows.append(block("temporaries", "norms of groups", "numbers", before, fp32, _IN_STEP, STAGE_12))
    return _Moment(tuple(rows), nbytes_of(rows))
