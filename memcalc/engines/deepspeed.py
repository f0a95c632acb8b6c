"""DeepSpeed's ZeRO with the default configuration of 0.19 (`zero_optimization: {stage}`, `bf16` or `fp16` enabled or not).

What it really holds besides the textbook's 16 bytes per parameter: a reduce bucket of 5e8 elements whatever the model's
size, copies while a bucket is flushed, whole gradients of the parameters that straddle a partition's edge, and fp32 copies
of the gradients in the step. Sources: deepspeed/runtime/fp16/fused_optimizer.py (stage 0), zero/stage_1_and_2.py,
zero/stage3.py, zero/partition_parameters.py, zero/partitioned_param_coordinator.py, engine.py.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from memcalc.collectives import Collective, Kind
from memcalc.dims import Dim, numel
from memcalc.dtypes import DType, fp32
from memcalc.engines.holdings import (
    Flush,
    Holdings,
    input_rows,
    parameter_classes,
    state_rows,
    step_temporaries,
    weight_rows,
)
from memcalc.optimizers import Parameter
from memcalc.rows import Row, shard

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup import Setup

REDUCE_BUCKET: Final = 500_000_000  # elements; zero/config.py reduce_bucket_size
MAX_LIVE: Final = 1_000_000_000  # elements; stage3_max_live_parameters
MAX_REUSE: Final = 1_000_000_000  # elements; stage3_max_reuse_distance
PERSISTENCE: Final = 100_000  # elements; stage3_param_persistence_threshold
SUB_GROUP: Final = 1_000_000_000  # elements; sub_group_size
ALIGNMENT: Final = 2  # nccl_start_alignment_factor

_STAGE_0: Final = "deepspeed/runtime/fp16/fused_optimizer.py"
_STAGE_12: Final = "deepspeed/runtime/zero/stage_1_and_2.py"
_STAGE_3: Final = "deepspeed/runtime/zero/stage3.py"


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
        always.append(_block("optimizer_states", "fp32 master", "parameters", total, fp32, "always", _STAGE_0))
        always += [row for row in state_rows(setup, [flat], fp32) if row.shape]  # it counts steps in Python
        step += [
            _block("temporaries", "gradients cast to fp32", "parameters", total, fp32, "within the step", _STAGE_0),
            _block(
                "temporaries", "gradients flattened in fp32", "parameters", total, fp32, "within the step", _STAGE_0
            ),
        ]
    else:
        always += state_rows(setup, parameters, dtype)
        step += step_temporaries(setup, parameters, dtype, dtype)
    always += input_rows(model, fp32)
    accumulated = gradients if setup.micro_batches > 1 else ()
    reduced = _largest_group(model)
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
        after_backward=(*gradients, copy), keeps_gradients=not accumulated,
    )  # fmt: skip


def _largest_group(model: Model) -> int:
    """Elements of the largest group that buffered_allreduce_fallback joins: it closes once it exceeds the bucket."""
    largest = current = 0
    for size in _sizes(model):
        current += size
        largest = max(largest, current)
        if current > REDUCE_BUCKET:
            current = 0
    return largest


def _sizes(model: Model) -> list[int]:
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
    for n in _sizes(model):
        for rank in range(start // size, (start + n - 1) // size + 1):
            worst[rank] += n
        start += n
    return max(worst)


def _stages_1_2(model: Model, setup: Setup) -> Holdings:
    dtype, ranks, total = setup.compute_dtype, setup.shards, model.num_parameters
    partition = flat_elements(model, ranks) // ranks
    whole = straddling_elements(model, ranks)
    always = weight_rows(model, dtype, "parameters", "always")
    padding = flat_elements(model, ranks) - total
    if padding:
        always.append(_block("buffers", "padding of the flat weights", "padding", padding, dtype, "always", _STAGE_12))
    always += _partitioned_states(setup, partition)
    always += input_rows(model, dtype if dtype is fp32 else fp32)
    bucket = _block("buffers", "reduce bucket", "reduce_bucket_size", REDUCE_BUCKET, dtype, "backward", _STAGE_12)
    largest = min(total, REDUCE_BUCKET)
    copy = _block(
        "buffers", "copy of the bucket that is reduced", "bucket", largest, dtype, "a flush in backward", _STAGE_12
    )
    # In stage 1 the textbook's gradients are all of them; the partition's copies come on top when they are reduced.
    component = "buffers" if setup.zero == 1 else "gradients"
    owned = [
        _block(
            component, "gradients of the partition", "parameters/dp", partition, dtype, "backward to step", _STAGE_12
        )
    ]
    if whole > partition:
        owned.append(
            _block("buffers", "rest of the gradients that straddle the partition", "straddling", whole - partition,
                   dtype, "backward to step", _STAGE_12)
        )  # fmt: skip
    cast = [
        _block(
            "temporaries",
            "gradients of the partition, joined",
            "parameters/dp",
            partition,
            dtype,
            "within the step",
            _STAGE_12,
        )
    ]
    if dtype is not fp32:
        cast.append(
            _block(
                "temporaries",
                "gradients of the partition in fp32",
                "parameters/dp",
                partition,
                fp32,
                "within the step",
                _STAGE_12,
            )
        )
    all_gradients = tuple(weight_rows(model, dtype, "gradients", "backward"))
    accumulated: tuple[Row, ...] = ()
    if setup.micro_batches > 1:
        accumulated = all_gradients if setup.zero == 1 else tuple(owned)
    stage_1 = setup.zero == 1
    return Holdings(
        always=tuple(always),
        forward=(*accumulated, bucket) if stage_1 and accumulated else accumulated,
        backward=(*accumulated, bucket),
        step=(*owned, *cast),
        # Stage 1 reduces when backward is over; stage 2 whenever the bucket is full.
        flush=None if stage_1 or ranks == 1 else Flush(REDUCE_BUCKET * dtype.itemsize, (copy,)),
        after_backward=(*all_gradients, bucket, copy) if stage_1 else (*accumulated, bucket, copy),
        keeps_gradients=stage_1 and not accumulated,
    )


def _partitioned_states(setup: Setup, partition: int) -> list[Row]:
    flat = Parameter("flat fp32 partition", (Dim("parameters/dp", partition),), 1, False)
    source = _STAGE_3 if setup.zero == 3 else _STAGE_12
    return [
        _block("optimizer_states", "fp32 master", "parameters/dp", partition, fp32, "always", source),
        *(row for row in state_rows(setup, [flat], fp32) if row.shape),  # DeepSpeed counts steps in Python
    ]


def _stage_3(model: Model, setup: Setup) -> Holdings:
    dtype, ranks = setup.compute_dtype, setup.shards
    always = [
        Row(
            "parameters", w.name, shard(w.shape, "dp", ranks), dtype, model.copies(w), basis="modelled", source=_STAGE_3
        )
        for w in model.weight_classes
    ]
    gradients = [
        Row("gradients", w.name, shard(w.shape, "dp", ranks), dtype, model.copies(w), basis="modelled", source=_STAGE_3)
        for w in model.weight_classes
    ]
    partition = sum(numel(row.shape)[0] * row.copies for row in always)
    bucket = _block("buffers", "reduce bucket", "reduce_bucket_size", REDUCE_BUCKET, dtype, "always", _STAGE_3)
    always += [*gradients, *_partitioned_states(setup, partition), bucket, *input_rows(model, fp32)]
    small, large, largest = _by_persistence(model)
    gathered: list[Row] = []
    if ranks > 1 and small:
        gathered.append(
            _block(
                "buffers", "small parameters kept whole", "persistent", small, dtype, "forward and backward", _STAGE_3
            )
        )
    live = min(large, MAX_LIVE + largest)
    if ranks > 1 and live:
        gathered.append(
            _block("buffers", "gathered parameters (max_live and the last one)", "gathered", live, dtype,
                   "forward and backward", "deepspeed/runtime/zero/partitioned_param_coordinator.py")
        )  # fmt: skip
    group = max(_sub_groups([numel(r.shape)[0] for r in always[: len(model.weight_classes)] for _ in range(r.copies)]))
    cast = [
        _block(
            "temporaries", "gradients of a sub-group, joined", "sub_group", group, dtype, "within the step", _STAGE_3
        )
    ]
    if dtype is not fp32:
        cast.append(
            _block(
                "temporaries", "gradients of a sub-group in fp32", "sub_group", group, fp32, "within the step", _STAGE_3
            )
        )
    copy = _block(
        "buffers",
        "copy of the bucket that is reduced",
        "bucket",
        min(model.num_parameters, REDUCE_BUCKET),
        dtype,
        "a flush in backward",
        _STAGE_3,
    )
    return Holdings(
        always=tuple(always),
        forward=tuple(gathered),
        backward=tuple(gathered),
        step=tuple(cast),
        flush=Flush(REDUCE_BUCKET * dtype.itemsize, (copy,)),
        after_backward=(copy,),
        keeps_gradients=False,
    )


def _by_persistence(model: Model) -> tuple[int, int, int]:
    """Elements of parameters at most and above the persistence threshold, and of the largest parameter."""
    sizes = _sizes(model)
    small = sum(n for n in sizes if n <= PERSISTENCE)
    return small, sum(sizes) - small, max(sizes)


def _sub_groups(partitions: list[int]) -> list[int]:
    """Elements of the sub-groups that the step takes one at a time."""
    out: list[int] = []
    current = 0
    for n in partitions:
        current += n
        if current >= SUB_GROUP:
            out.append(current)
            current = 0
    return [*out, current] if current or not out else out


# --- communication


def collectives(model: Model, setup: Setup) -> list[Collective]:
    if setup.dp == 1:
        return []
    if setup.zero == 3:
        return _stage_3_collectives(model, setup)
    dtype, dp, m = setup.compute_dtype, setup.dp, setup.micro_batches
    e = dtype.itemsize
    total = model.num_parameters
    if setup.zero == 0:
        calls = _groups_after_exceeding(model)
        return [
            _all_reduce("gradients", dtype, dp, calls, total * e, f"parameters·{e} B", "deepspeed/runtime/engine.py")
        ]
    reductions = m if setup.zero == 2 else 1
    calls = len(_buckets_before_exceeding(_sizes(model)))
    flat = flat_elements(model, dp)
    name, payload = "gradient buckets (whole, not reduced to their owners)", reductions * total * e
    formula = f"{reductions}·parameters·{e} B"
    gathered = f"padded parameters·{e} B = {flat * e} B"
    return [
        _all_reduce(name, dtype, dp, reductions * calls, payload, formula, _STAGE_12),
        *_scalars(setup, _STAGE_12),
        Collective(
            "dp", "all_gather", "updated weights", "step", dtype.name, dp, 1, flat * e, gathered,
            by_layer=True, source=_STAGE_12,
        ),
    ]  # fmt: skip


def _all_reduce(name: str, dtype: DType, dp: int, calls: int, payload: int, formula: str, source: str) -> Collective:
    return Collective(
        "dp",
        "all_reduce",
        name,
        "backward",
        dtype.name,
        dp,
        calls,
        payload,
        f"{formula} = {payload} B",
        by_layer=True,
        source=source,
    )


def _scalars(setup: Setup, source: str) -> list[Collective]:
    out = [Collective("dp", "all_reduce", "gradient norm", "step", "fp32", setup.dp, 1, 4, "1·4 B", source=source)]
    if setup.compute_dtype is not fp32:
        out.insert(
            0, Collective("dp", "all_reduce", "overflow check", "step", "uint8", setup.dp, 1, 1, "1·1 B", source=source)
        )
    return out


def _groups_after_exceeding(model: Model) -> int:
    calls = current = 0
    for n in _sizes(model):
        current += n
        if current > REDUCE_BUCKET:
            calls, current = calls + 1, 0
    return calls + (1 if current else 0)


def _buckets_before_exceeding(sizes: list[int]) -> list[int]:
    out: list[int] = []
    current = 0
    for n in reversed(sizes):
        if current and current + n > REDUCE_BUCKET:
            out.append(current)
            current = 0
        current += n
    return [*out, current]


def _stage_3_collectives(model: Model, setup: Setup) -> list[Collective]:
    dtype, dp, m = setup.compute_dtype, setup.dp, setup.micro_batches
    e = dtype.itemsize
    sizes = _sizes(model)
    padded = [-(-n // dp) * dp for n in sizes]
    large = [p for n, p in zip(sizes, padded, strict=True) if n > PERSISTENCE]
    again = large[: len(large) - _retained([n for n in sizes if n > PERSISTENCE])]
    small = [p for n, p in zip(sizes, padded, strict=True) if n <= PERSISTENCE]
    out = [
        Collective("dp", "all_gather", "parameters", "forward", dtype.name, dp, m * len(large), m * sum(large) * e,
                   f"{m}·{sum(large)}·{e} B", by_layer=True, source=_STAGE_3),
    ]  # fmt: skip
    if again:
        out.append(
            Collective("dp", "all_gather", "parameters released since forward", "backward", dtype.name, dp,
                       m * len(again), m * sum(again) * e, f"{m}·{sum(again)}·{e} B", by_layer=True, source=_STAGE_3)
        )  # fmt: skip
    flushes = len(_buckets_before_exceeding(sizes))
    out.append(
        Collective("dp", "reduce_scatter", "gradient buckets", "backward", dtype.name, dp, m * flushes,
                   m * sum(padded) * e, f"{m}·{sum(padded)}·{e} B", by_layer=True, source=_STAGE_3)
    )  # fmt: skip
    groups = len(_sub_groups([p // dp for p in padded]))
    out.append(
        Collective(
            "dp",
            "all_reduce",
            "gradient norm",
            "step",
            "fp64",
            dp,
            groups,
            8 * groups,
            f"{groups}·8 B",
            source=_STAGE_3,
        )
    )
    if dtype.name == "fp16":
        out.append(
            Collective("dp", "all_reduce", "overflow check", "step", "uint8", dp, 1, 1, "1·1 B", source=_STAGE_3)
        )
    if small:
        out.append(
            Collective("dp", "all_gather", "small parameters after the update", "step", dtype.name, dp, len(small),
                       sum(small) * e, f"{sum(small)}·{e} B", source=_STAGE_3)
        )  # fmt: skip
    return out


def _retained(sizes: list[int]) -> int:
    """How many of the last parameters are still gathered when backward comes to them: those it reuses soon enough."""
    after = kept = 0
    for n in reversed(sizes):
        if 2 * after >= MAX_REUSE:
            break
        kept += 1
        after += n
    return kept


def textbook(model: Model, setup: Setup) -> list[Collective]:
    """Rajbhandari et al. 2020 (arXiv 1910.02054) §7: 2Φ for stages 0 to 2, 3Φ for stage 3, each counted once."""
    if setup.dp == 1:
        return []
    dtype, dp, m, total = setup.compute_dtype, setup.dp, setup.micro_batches, model.num_parameters
    source = "arXiv 1910.02054, section 7"
    payload = total * dtype.itemsize
    formula = f"parameters·{dtype.itemsize} B"

    def one(kind: Kind, name: str, phase: str, times: int) -> Collective:
        return Collective(
            "dp", kind, name, phase, dtype.name, dp, times, times * payload, f"{times}·{formula}", source=source
        )  # type: ignore[arg-type]

    if setup.zero == 0:
        return []
    out = [one("reduce_scatter", "gradients", "backward", m if setup.zero > 1 else 1)]
    if setup.zero < 3:
        return [*out, one("all_gather", "updated weights", "step", 1)]
    return [one("all_gather", "parameters", "forward", m), one("all_gather", "parameters", "backward", m), *out]
