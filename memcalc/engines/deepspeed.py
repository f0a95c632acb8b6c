"""DeepSpeed's ZeRO with the configuration of 0.19 (`zero_optimization: {stage}`, `bf16` or `fp16` enabled or not).

What it really holds besides the textbook's 16 bytes per parameter: a reduce bucket, of 5e8 elements if nothing else is said
and whatever the model's size, copies while a bucket is flushed, whole gradients of the parameters that straddle a
partition's edge, and fp32 copies of the gradients in the step. Sources:
deepspeed/runtime/fp16/fused_optimizer.py (stage 0), zero/stage_1_and_2.py,
zero/stage3.py, zero/partition_parameters.py, zero/partitioned_param_coordinator.py, engine.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.dims import Dim, numel
from memcalc.dtypes import DType, fp32, fp64
from memcalc.engines.deepspeed_collectives import collectives, textbook
from memcalc.engines.holdings import (
    Flush,
    Holdings,
    input_rows,
    parameter_classes,
    state_rows,
    step_temporaries,
    weight_rows,
)
from memcalc.engines.zero_layout import (
    STAGE_0,
    STAGE_3,
    STAGE_12,
    buckets_before_exceeding,
    flat_elements,
    largest_group,
    sizes_of,
    straddling_elements,
    sub_groups,
)
from memcalc.optimizers import Parameter
from memcalc.rows import Row, shard

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup import Setup

__all__ = ["collectives", "holdings", "textbook"]


def _block(component: str, name: str, dims: str, elements: int, dtype: DType, life: str, source: str) -> Row:
    return Row(component, name, (Dim(dims, elements),), dtype, life=life, basis="modelled", source=source)  # type: ignore[arg-type]


def holdings(model: Model, setup: Setup) -> Holdings:
    if setup.zero == 0:
        return _stage_0(model, setup)
    return _stage_3(model, setup) if setup.zero == 3 else _stages_1_2(model, setup)


def _stage_0(model: Model, setup: Setup) -> Holdings:
    dtype, total = setup.compute_dtype, model.num_parameters
    gradients = tuple(weight_rows(model, dtype, "gradients", "backward to step"))
    always = weight_rows(model, dtype, "parameters", "always")
    parameters = parameter_classes(model)
    step = list(gradients)
    if setup.has_master_weights:
        flat = Parameter("flat fp32 weights", (Dim("parameters", total),), 1, False)
        always.append(_block("optimizer_states", "fp32 master", "parameters", total, fp32, "always", STAGE_0))
        always += [row for row in state_rows(setup, [flat], fp32) if row.shape]  # it counts steps in Python
        step += [
            _block("temporaries", "gradients cast to fp32", "parameters", total, fp32, "within the step", STAGE_0),
            _block("temporaries", "gradients flattened in fp32", "parameters", total, fp32, "within the step", STAGE_0),
        ]
    else:
        always += state_rows(setup, parameters, dtype)
        step += step_temporaries(setup, parameters, dtype, dtype)
    always += input_rows(model, fp32, setup.compute_dtype)
    accumulated = gradients if setup.micro_batches > 1 else ()
    reduced = largest_group(model)
    copy = _block(
        "buffers",
        "all-reduce copy of gradients",
        "bucket",
        reduced,
        dtype,
        "end of backward",
        "deepspeed/runtime/engine.py",
    )
    return Holdings(
        tuple(always), accumulated, accumulated, tuple(step),
        after_backward=((*gradients, copy),), keeps_gradients=not accumulated, accumulates=bool(accumulated),
    )  # fmt: skip


def _stages_1_2(model: Model, setup: Setup) -> Holdings:
    dtype, ranks, total = setup.compute_dtype, setup.shards, model.num_parameters
    partition = flat_elements(model, ranks) // ranks
    always = weight_rows(model, dtype, "parameters", "always")
    padding = flat_elements(model, ranks) - total
    if padding:
        always.append(_block("buffers", "padding of the flat weights", "padding", padding, dtype, "always", STAGE_12))
    always += [*_partitioned_states(setup, partition), *input_rows(model, fp32, setup.compute_dtype)]
    size = setup.reduce_bucket_size
    assert size is not None
    bucket = _block("buffers", "reduce bucket", "reduce_bucket_size", size, dtype, "backward", STAGE_12)
    owned = _owned_gradients(model, setup, partition)
    step = _step_1_2(model, setup, partition)
    if setup.zero == 1:
        return _stage_1(model, setup, always, bucket, owned, step)
    earlier = tuple(owned) if setup.micro_batches > 1 else ()
    copy = _bucket_copy(min(total, size), dtype, STAGE_12) if ranks > 1 else []
    # The copy goes before the owned gradients come if the last flush is the only one.
    last = [(*earlier, bucket, *copy), (*earlier, bucket, *owned)]
    if total > size:
        last = [(*earlier, bucket, *copy, *owned)]
    return Holdings(
        always=tuple(always),
        forward=earlier,
        backward=(*earlier, bucket),
        step=(*owned, *step),
        flush=Flush(size * dtype.itemsize, (*copy, *owned)),
        after_backward=tuple(last),
        keeps_gradients=False,
    )


def _stage_1(model: Model, setup: Setup, always: list[Row], bucket: Row, owned: list[Row], step: list[Row]) -> Holdings:
    """All gradients stay until backward is over; then they are moved into the bucket, one bucket after the other."""
    dtype, total = setup.compute_dtype, model.num_parameters
    gradients = tuple(weight_rows(model, dtype, "gradients", "backward"))
    earlier = gradients if setup.micro_batches > 1 else ()
    assert setup.reduce_bucket_size is not None
    moved = buckets_before_exceeding(list(reversed(sizes_of(model))), setup.reduce_bucket_size)[0]
    copy = _bucket_copy(moved, dtype, STAGE_12) if setup.shards > 1 else []
    rest = [_block("gradients", "gradients not reduced yet", "parameters", total - moved, dtype, "backward", STAGE_12)]
    reducing = (*(rest if total > moved else ()), bucket, *copy, *owned)
    return Holdings(
        always=tuple(always),
        forward=(*earlier, bucket) if earlier else (),
        backward=(*earlier, bucket),
        step=(*owned, *step),
        after_backward=((*gradients, bucket), reducing),
        keeps_gradients=not earlier,
        accumulates=bool(earlier),
    )


def _bucket_copy(elements: int, dtype: DType, source: str) -> list[Row]:
    """What is all-reduced is a copy of the bucket (allreduce_bucket's flatten); one rank reduces the bucket itself."""
    name = "copy of the bucket that is reduced"
    return [_block("buffers", name, "bucket", elements, dtype, "a flush in backward", source)]


def _owned_gradients(model: Model, setup: Setup, partition: int) -> list[Row]:
    """Gradients that stay on the rank: whole ones of all parameters that touch its partition.

    In stage 1 the textbook's gradients are all of them, and these copies come on top when they are reduced.
    """
    dtype, life = setup.compute_dtype, "the first flush to the step"
    whole = straddling_elements(model, setup.shards)
    component = "buffers" if setup.zero == 1 else "gradients"
    name = "rest of the gradients that straddle the partition"
    own = _block(component, "gradients of the partition", "parameters/dp", partition, dtype, life, STAGE_12)
    if whole <= partition:
        return [own]
    return [own, _block("buffers", name, "straddling", whole - partition, dtype, life, STAGE_12)]


def _step_1_2(model: Model, setup: Setup, partition: int) -> list[Row]:
    """The larger of the two peaks of step(): a slice in fp64 for the norm; the partition joined and cast to fp32."""
    dtype, life = setup.compute_dtype, "within the step"
    name, dim = "gradients of the partition", "parameters/dp"
    joined = [_block("temporaries", f"{name}, joined", dim, partition, dtype, life, STAGE_12)]
    if dtype is not fp32:
        joined.append(_block("temporaries", f"{name} in fp32", dim, partition, fp32, life, STAGE_12))
    largest = min(partition, max(sizes_of(model)))
    norm = [_block("temporaries", "a gradient in fp64 for the norm", "largest slice", largest, fp64, life, STAGE_12)]
    return max(joined, norm, key=lambda rows: sum(row.nbytes for row in rows))


def _partitioned_states(setup: Setup, partition: int) -> list[Row]:
    flat = Parameter("flat fp32 partition", (Dim("parameters/dp", partition),), 1, False)
    source = STAGE_3 if setup.zero == 3 else STAGE_12
    return [
        _block("optimizer_states", "fp32 master", "parameters/dp", partition, fp32, "always", source),
        *(row for row in state_rows(setup, [flat], fp32) if row.shape),  # DeepSpeed counts steps in Python
    ]


def _stage_3(model: Model, setup: Setup) -> Holdings:
    dtype, ranks = setup.compute_dtype, setup.shards
    always = [
        Row("parameters", w.name, shard(w.shape, "dp", ranks), dtype, model.copies(w), basis="modelled", source=STAGE_3)
        for w in model.weight_classes
    ]
    gradients = [
        Row("gradients", w.name, shard(w.shape, "dp", ranks), dtype, model.copies(w), basis="modelled", source=STAGE_3)
        for w in model.weight_classes
    ]
    partition = sum(numel(row.shape)[0] * row.copies for row in always)
    size, most_live, in_group = setup.reduce_bucket_size, setup.max_live_parameters, setup.sub_group_size
    assert size is not None and most_live is not None and in_group is not None
    bucket = _block("buffers", "reduce bucket", "reduce_bucket_size", size, dtype, "always", STAGE_3)
    always += [
        *gradients,
        *_partitioned_states(setup, partition),
        bucket,
        *input_rows(model, fp32, setup.compute_dtype),
    ]
    small, large, largest = _by_persistence(model, setup.param_persistence_threshold or 0)
    gathered: list[Row] = []
    if ranks > 1 and small:
        gathered.append(
            _block(
                "buffers", "small parameters kept whole", "persistent", small, dtype, "forward and backward", STAGE_3
            )
        )
    live = min(large, most_live + largest)
    if ranks > 1 and live:
        gathered.append(
            _block("buffers", "gathered parameters (max_live and the last one)", "gathered", live, dtype,
                   "forward and backward", "deepspeed/runtime/zero/partitioned_param_coordinator.py")
        )  # fmt: skip
    group = max(sub_groups([-(-n // ranks) for n in sizes_of(model)], in_group))
    cast = [
        _block("temporaries", "gradients of a sub-group, joined", "sub_group", group, dtype, "within the step", STAGE_3)
    ]
    if dtype is not fp32:
        cast.append(
            _block(
                "temporaries", "gradients of a sub-group in fp32", "sub_group", group, fp32, "within the step", STAGE_3
            )
        )
    copy = _block(
        "buffers",
        "copy of the bucket that is reduced",
        "bucket",
        min(model.num_parameters, size),
        dtype,
        "a flush in backward",
        STAGE_3,
    )
    return Holdings(
        always=tuple(always),
        forward=tuple(gathered),
        backward=tuple(gathered),
        step=tuple(cast),
        flush=Flush(size * dtype.itemsize, (copy,)),
        after_backward=((copy,),),
        keeps_gradients=False,
    )


def _by_persistence(model: Model, threshold: int) -> tuple[int, int, int]:
    """Elements of parameters at most and above the persistence threshold, and of the largest parameter."""
    sizes = sizes_of(model)
    small = sum(n for n in sizes if n <= threshold)
    return small, sum(sizes) - small, max(sizes)
