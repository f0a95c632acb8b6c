"""DeepSpeed's ZeRO with the configuration of 0.19 (`zero_optimization: {stage}`, `bf16` or `fp16` enabled or not).

Besides the textbook's 16 bytes per parameter it holds a reduce bucket (5e8 elements by default, whatever the model's
size), copies while a bucket is flushed, whole gradients of the parameters that straddle a partition's edge, and fp32
copies of the gradients in the step. The blocks of forward and backward are in zero2_step.py and zero3_step.py. Sources:
deepspeed/runtime/fp16/fused_optimizer.py (stage 0), zero/stage_1_and_2.py, zero/stage3.py,
zero/partition_parameters.py, zero/partitioned_param_coordinator.py, engine.py.

The branches are those of CUDA (accelerator/cuda_accelerator.py: streams, nothing synchronized). They allocate and send
what the CPU accelerator's do; there `FusedAdam` is a separate kernel, and all-reduces may use shared memory.
`overlap_comm` is off in stage 1, and in stage 2 by default. In stage 3 it is on: its streams change when bytes can be reused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import DType, boolean, fp32, fp64
from memcalc.core.ops.matmul import linear
from memcalc.core.rows import Row, shard
from memcalc.engines.base.holdings import Flush, Holdings, input_rows, state_rows, step_temporaries, weight_rows
from memcalc.engines.deepspeed import extended
from memcalc.engines.deepspeed.collectives import collectives, textbook
from memcalc.engines.deepspeed.notes import NoteGradients, NoteModules
from memcalc.engines.deepspeed.order import order_of
from memcalc.engines.deepspeed.sub_groups import persistent, sub_groups_of
from memcalc.engines.deepspeed.zero3_leaves import leaf_modules
from memcalc.engines.deepspeed.zero3_linear import zero3_linear
from memcalc.engines.deepspeed.zero3_step import Untraced, ZeRO3, alike_ranks
from memcalc.engines.deepspeed.zero_layout import (
    COORDINATOR,
    ENGINE,
    FUSED_ADAM,
    STAGE_0,
    STAGE_3,
    STAGE_12,
    Owned,
    can_have_most,
    flat,
    flat_elements,
    frozen,
    gradient_elements_of,
    groups_of,
    inside_of,
    over,
    own_elements,
    partitions,
    sent_dtype,
    sizes_of,
    straddling_elements,
    thresholds_of,
    unreached,
    whole_of,
)
from memcalc.engines.deepspeed.zero_optimizer import has_fused_adam, temporaries_of_step, with_own_optimizer
from memcalc.engines.deepspeed.zero_partitions import (
    block,
    flat_states,
    nbytes_of,
    owned_gradients,
    partitioned_states,
    step_of,
    zeros_of,
)
from memcalc.engines.deepspeed.zero_ranks import joined_after_exceeding, kinds_of
from memcalc.kernels import loss_in
from memcalc.optimizers import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

__all__ = ["collectives", "holdings", "textbook"]


def holdings(model: Model, setup: Setup) -> Holdings:
    """Return what a rank holds. Weights are cast, buffers stay as loaded (engine.py, _cast_module_mixed_precision)."""
    stages = {0: _stage_0, 3: _stage_3}
    stage = extended.stages_1_2 if setup.offloads and setup.zero < 3 else stages.get(setup.zero, _stages_1_2)
    held = with_own_optimizer(model, setup, stage(model, setup))
    return held._replace(buffer_dtype=fp32, others=tuple(one._replace(buffer_dtype=fp32) for one in held.others))


def _stage_0(model: Model, setup: Setup) -> Holdings:
    dtype, total = setup.compute_dtype, sum(group.starts[-1] for group in groups_of(model, setup.averaging))
    autograds = tuple(weight_rows(model, dtype, "gradients", "backward to step"))
    gradients = (*autograds, *_zeros_0(model, dtype))
    always = weight_rows(model, dtype, "parameters", "always")
    parameters = [
        Parameter(w.name, w.shape, copies, w.layer is not None and len(w.shape) == 2)
        for w in model.weight_classes
        if (copies := model.trainable(w))
    ]
    step = list(gradients)
    if setup.has_master_weights:
        flat = Parameter("flat fp32 weights", (Dim("parameters", total),), 1, False)
        always.append(block("optimizer_states", "fp32 master", "parameters", total, fp32, "always", STAGE_0))
        always += [row for row in state_rows(setup, [flat], fp32) if row.shape]  # FusedAdam counts steps in Python
        step = max(_casts(model, setup, step), key=nbytes_of)
        if setup.tp * setup.cp > 1:
            from memcalc.engines.deepspeed.masked_norm import kept_ranges, masked_norm

            always.append(kept_ranges(model))
            step = max(step, masked_norm(model), key=nbytes_of)
    else:
        always += [row for row in state_rows(setup, parameters, dtype) if row.shape]
        step += step_temporaries(setup.optimizer, setup.optimizer_implementation, parameters, dtype, dtype)
    always += _around(model, setup)
    accumulated = autograds if setup.micro_batches > 1 else ()
    reduced = max(n for kind in kinds_of(model, setup.averaging) for n in joined_after_exceeding(kind.sizes))
    copy = block("buffers", "all-reduce copy of gradients", "bucket", reduced, dtype, "end of backward", ENGINE)
    scaled, sent = _scaled_loss(model, setup, 1), sent_dtype(setup)
    copies = [copy]
    if sent is not dtype:
        name, life = "the copy in the dtype that is sent", "end of backward"
        copies.append(block("buffers", name, "bucket", reduced, sent, life, ENGINE))
    return Holdings(
        tuple(always), accumulated, (*accumulated, scaled), tuple(step),
        after_backward=((*gradients, *copies, scaled),), keeps_gradients=not accumulated, accumulates=bool(accumulated),
        order=order_of(model, setup, _around(model, setup)),
    )  # fmt: skip


def _zeros_0(model: Model, dtype: DType) -> list[Row]:
    """Return the gradients made for weights that have none (engine.py, _get_gradients_for_reduction)."""
    sizes = sizes_of(model)
    elements, life = sum(sizes[i] for i in unreached(model)), "end of backward to step"
    zeros = block("gradients", "zeros for what gets no gradient", "parameters", elements, dtype, life, ENGINE)
    return [zeros] if elements else []


def _casts(model: Model, setup: Setup, gradients: list[Row]) -> Iterator[list[Row]]:
    """Yield the moments of FP16_Optimizer.step: group by group gradients are cast, joined, and freed."""
    dtype, life = setup.compute_dtype, "within the step"
    sizes = [group.starts[-1] for group in groups_of(model, setup.averaging)]
    for i, own in enumerate(sizes):
        left = [block("gradients", "gradients not cast yet", "parameters", sum(sizes[i:]), dtype, life, STAGE_0)]
        flattened = sum(sizes[: i + 1])
        yield [
            *(left if i else gradients),
            block("temporaries", "gradients cast to fp32", "parameters", own, fp32, life, STAGE_0),
            block("temporaries", "gradients flattened in fp32", "parameters", flattened, fp32, life, STAGE_0),
        ]


def _numbers(count: int, what: str, life: str, source: str) -> Row:
    """Return a row of `count` tensors of one number each, 4 bytes."""
    return block("buffers", what, "numbers", count, fp32, life, source)


def _around(model: Model, setup: Setup) -> list[Row]:
    """Return the rows besides weights and states."""
    return [*_kept_numbers(setup), *input_rows(model, setup, fp32, setup.compute_dtype)]


def _kept_numbers(setup: Setup) -> list[Row]:
    """Return the rows of FusedAdam's overflow flag (ops/adam/fused_adam.py) and of ZeRO's norm of the last step."""
    out: list[Row] = []
    if has_fused_adam(setup):
        out.append(_numbers(1, "FusedAdam's overflow flag", "always", FUSED_ADAM))
    if setup.zero in (1, 2):
        out.append(_numbers(1, "the last norm", "always", STAGE_12))
    if setup.zero == 3:
        out.append(block("buffers", "the last norm", "numbers", 1, fp64, "always", STAGE_3))
        out.append(block("buffers", "whether a gradient overflowed", "numbers", 1, boolean, "always", STAGE_3))
    return out


def _stages_1_2(model: Model, setup: Setup) -> Holdings:
    dtype, ranks = setup.compute_dtype, setup.shards
    always = weight_rows(model, dtype, "parameters", "always")
    padding = flat_elements(model, ranks) - sum(group.starts[-1] for group in groups_of(model, ranks))
    if padding:
        always.append(block("buffers", "padding of the flat weights", "padding", padding, dtype, "always", STAGE_12))
    always += [*partitioned_states(setup, model, ranks), *_around(model, setup)]
    size = setup.reduce_bucket_size
    assert size is not None
    bucket = block("buffers", "reduce bucket", "reduce_bucket_size", size, dtype, "backward", STAGE_12)
    from memcalc.engines.deepspeed.zero2_step import SECOND_BUCKET

    second = (bucket._replace(name=SECOND_BUCKET),) if setup.overlap_comm else ()
    step = max((step_of(owned, setup) for owned in dict.fromkeys(partitions(model, ranks))), key=nbytes_of)
    if setup.zero == 1:
        return _stage_1(model, setup, always, bucket, step)
    if model.program.source:
        return _unvisited_2(model, setup, always, (bucket, *second), step)
    held = Holdings(
        always=tuple(always),
        forward=tuple(_accumulated_2(setup, max(partitions(model, ranks), key=gradient_elements_of))),
        step=tuple(step),
        keeps_gradients=False,
    )
    first, *others = (_stage_2_of(held, model, setup, own) for own in can_have_most(model, ranks, size))
    return first._replace(others=tuple(others))


def _stage_2_of(held: Holdings, model: Model, setup: Setup, own: Owned) -> Holdings:
    """Return what the rank with these partitions holds."""
    size = setup.reduce_bucket_size
    assert size is not None
    accumulated = _accumulated_2(setup, own)
    from memcalc.engines.deepspeed.zero2_step import ZeRO2

    over = ZeRO2(setup.compute_dtype, size, bool(setup.overlap_comm), flat(model, setup.shards), own, sent_dtype(setup))
    order = order_of(model, setup, _around(model, setup), own)
    backward = (*accumulated, _scaled_loss(model, setup, 2))
    return held._replace(backward=backward, hooks=NoteGradients(), over=over, order=order)


def _accumulated_2(setup: Setup, own: Owned) -> list[Row]:
    """Return the gradients that earlier micro-batches have left on a rank with these partitions."""
    if setup.micro_batches == 1:
        return []
    gradients = owned_gradients(setup, whole_of(own), inside_of(own))
    return [*gradients, *zeros_of(own, setup.compute_dtype)]


def _unvisited_2(model: Model, setup: Setup, always: list[Row], buckets: tuple[Row, ...], step: list[Row]) -> Holdings:
    """Return what a traced model holds. Gradients are not seen singly: the last reduction counts, and any before."""
    dtype, ranks, total, size = setup.compute_dtype, setup.shards, model.trainable_parameters, setup.reduce_bucket_size
    assert size is not None
    owned = owned_gradients(setup, straddling_elements(model, ranks), own_elements(model, ranks))
    earlier = tuple(owned) if setup.micro_batches > 1 else ()
    from memcalc.engines.deepspeed.zero1_reduction import bucket_copy

    copy = bucket_copy(min(total, size), dtype) if ranks > 1 else []
    scaled = _scaled_loss(model, setup, 2)
    # The copy is freed before the owned gradients are allocated if the last flush is the only one.
    last = [(*earlier, *buckets, scaled, *copy), (*earlier, *buckets, scaled, *owned)]
    if total > size:
        last = [(*earlier, *buckets, scaled, *copy, *owned)]
    return Holdings(
        always=tuple(always),
        forward=earlier,
        backward=(*earlier, *buckets, scaled),
        step=tuple(step),
        flush=Flush(size * dtype.itemsize, (*copy, *owned)),
        after_backward=tuple(last),
        keeps_gradients=False,
    )


def _stage_1(model: Model, setup: Setup, always: list[Row], bucket: Row, step: list[Row]) -> Holdings:
    """Return what stage 1 holds. Gradients stay until backward is over; then they are moved bucket by bucket.

    The bucket is allocated with the first gradient of a step and freed when all are reduced.
    """
    gradients = tuple(weight_rows(model, setup.compute_dtype, "gradients", "backward"))
    earlier = gradients if setup.micro_batches > 1 else ()
    from memcalc.engines.deepspeed.zero1_reduction import most_while_reducing, rows_of

    own, most = most_while_reducing(model, setup)
    reducing = rows_of(setup, most, own_elements(model, setup.shards))
    assert setup.reduce_bucket_size is not None
    from memcalc.engines.deepspeed.zero2_step import ZeRO1

    comes_later, how = not earlier and not model.program.source, ZeRO1(setup.compute_dtype, setup.reduce_bucket_size)
    held = (bucket,) if not comes_later else ()
    return Holdings(
        always=tuple(always),
        forward=(*earlier, bucket) if earlier else (),
        backward=(*earlier, *held, _scaled_loss(model, setup, 2)),
        step=tuple(step),
        after_backward=(
            (*gradients, bucket, _scaled_loss(model, setup, 2)),
            (bucket, _scaled_loss(model, setup, 2), *reducing),
        ),
        keeps_gradients=not earlier,
        accumulates=bool(earlier),
        hooks=how if comes_later else None,
        order=order_of(model, setup, _around(model, setup), own, how),
    )


def _scaled_loss(model: Model, setup: Setup, count: int) -> Row:
    """Return the loss over accumulation steps, and times the loss scale (engine.py, backward; base_optimizer.py)."""
    row = _numbers(count, "the loss, scaled", "backward", ENGINE)
    return row._replace(dtype=loss_in(setup.cross_entropy, model.program, setup.compute_dtype, fp32))


def _stage_3(model: Model, setup: Setup) -> Holdings:
    dtype, ranks = setup.compute_dtype, setup.shards
    always = _shards(model, setup, "parameters")
    if setup.quantize != "none":
        from memcalc.engines.deepspeed.zero3_scales import scales_of

        always += scales_of(model)
    gradients = _shards(model, setup, "gradients")
    partition = sum(numel(row.shape)[0] * row.copies for row in gradients)
    size = setup.reduce_bucket_size
    assert size is not None
    always += [
        *gradients,
        *flat_states(setup, partition, STAGE_3),
        block("buffers", "reduce bucket", "reduce_bucket_size", size, sent_dtype(setup), "always", STAGE_3),
        *_around(model, setup),
    ]
    thresholds = thresholds_of(setup)
    small = sum(sum(padded) for of, padded in persistent(model, setup).items() if of > 1)
    life = "from the end of a step to the next one"
    kept = [block("buffers", "small parameters kept whole", "persistent", small, dtype, life, STAGE_3)] if small else []
    held = Holdings(
        always=tuple(always),
        forward=tuple(kept),
        backward=(*kept, _scaled_loss(model, setup, 2)),
        step=tuple(max(_steps_of_stage_3(model, setup, kept), key=nbytes_of)),
        keeps_gradients=False,
    )
    if model.program.source:
        return _unvisited(model, setup, held)
    groups = groups_of(model, ranks)
    experts = frozenset(i for group in groups[1:] for i in group.places)
    sent, leaves = sent_dtype(setup), leaf_modules(model)
    shares_show = experts or sent is not dtype or setup.recompute == "op"
    alike = ranks if shares_show else alike_ranks(sizes_of(model), ranks)
    expert_ranks = groups[-1].ranks if experts else 1
    over = ZeRO3(
        alike, dtype, thresholds, size, sent, experts, expert_ranks, frozen(model), bool(setup.quantize_storage)
    )
    hooked = held._replace(hooks=NoteModules(leaves, ((linear, zero3_linear),)))
    if setup.offloads or setup.is_zero_plus_plus:
        return extended.stage_3(model, setup, hooked, kept, over._replace(ranks=ranks))
    return hooked._replace(over=over, order=order_of(model, setup, _around(model, setup), untraced=Untraced(over)))


def _shards(model: Model, setup: Setup, component: Literal["parameters", "gradients"]) -> list[Row]:
    """Return a rank's part of every weight, or of those that require a gradient."""
    ranks, ep = setup.shards, model.program.expert_parallel
    shapes = {
        w: shard(w.shape, "(dp/ep)", ranks // ep)
        if ep > 1 and w.component == "experts"
        else shard(w.stored_shape, over(setup), ranks)
        for w in model.weight_classes
    }
    copies = model.copies if component == "parameters" else model.trainable
    return [
        Row(component, w.name, shape, setup.compute_dtype, copies(w), basis="modelled", source=STAGE_3)
        for w, shape in shapes.items()
        if copies(w)
    ]


def _steps_of_stage_3(model: Model, setup: Setup, kept: list[Row]) -> Iterator[list[Row]]:
    """Yield the moments of a step: a part in fp64 for the norm, joined gradients (also in fp32), whole weights."""
    dtype, in_group, life = setup.compute_dtype, setup.sub_group_size, "within the step"
    assert in_group is not None
    groups = sub_groups_of(model, setup)
    parts = [n for group in groups for n in group.parts]
    norms = max(
        before + own + 1 for before, group in enumerate(groups) for own, n in enumerate(group.parts) if n == max(parts)
    )  # of the earlier groups, and of its own gradients
    yield [
        block("temporaries", "a gradient in fp64 for the norm", "largest", max(parts), fp64, life, STAGE_3),
        block("temporaries", "norms", "numbers", norms, fp64, life, STAGE_3),
    ]
    numbers = block("temporaries", "norms of the sub-groups", "numbers", len(groups) + 2, fp64, life, STAGE_3)
    group = max(sum(group.parts) for group in groups)
    joined = [block("temporaries", "gradients of a sub-group, joined", "sub_group", group, dtype, life, STAGE_3)]
    name = "gradients of a sub-group in fp32"
    cast = [block("temporaries", name, "sub_group", group, fp32, life, STAGE_3)] if dtype is not fp32 else []
    yield [*joined, *cast, numbers]
    step = temporaries_of_step(setup.optimizer, setup.optimizer_implementation, "sub_group", group)
    yield [*(cast or joined), *step, numbers]
    yield [*kept, numbers]


def _unvisited(model: Model, setup: Setup, held: Holdings) -> Holdings:
    """Return what a traced model holds. Modules are not seen: `max_live_parameters` and the largest are gathered."""
    dtype, size, most_live = setup.compute_dtype, setup.reduce_bucket_size, setup.max_live_parameters
    assert size is not None and most_live is not None
    _, large, largest = _by_persistence(model, setup.param_persistence_threshold or 0)
    live = min(large, most_live + largest)
    name, life = "gathered parameters (max_live and the last one)", "forward and backward"
    gathered = [block("buffers", name, "gathered", live, dtype, life, COORDINATOR)] if setup.shards > 1 and live else []
    flushed = min(model.trainable_parameters, size)
    copy = block("buffers", "copy of the bucket that is reduced", "bucket", flushed, dtype, "a flush", STAGE_3)
    return held._replace(
        forward=(*held.forward, *gathered),
        backward=(*held.backward, *gathered),
        flush=Flush(size * dtype.itemsize, (copy,)),
        after_backward=((*held.forward, copy),),
    )


def _by_persistence(model: Model, threshold: int) -> tuple[int, int, int]:
    """Return the elements of parameters up to and above the persistence threshold, and of the largest parameter."""
    sizes = sizes_of(model)
    small = sum(n for n in sizes if n <= threshold)
    return small, sum(sizes) - small, max(sizes)
