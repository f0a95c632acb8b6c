"""torch's DistributedDataParallel (torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp).

Buckets are a second full copy of the gradients in their dtype, allocated when the reducer is built and kept. Gradients
are copied into them, all-reduced in place and copied back. The module's buffers are broadcast before the first forward
of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim, numel
from memcalc.core.rows import Row
from memcalc.engines import none as plain
from memcalc.engines.base.holdings import Flush, Holdings, trained_dtype
from memcalc.layout.collectives import Collective
from memcalc.layout.layer_kinds import LaterShares, elements_of, shares_of
from memcalc.tape.profile import gradient_order, gradients_in_order
from memcalc.units import MIB

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.engines.base.comm_hooks import Bucket
    from memcalc.families.base.module import Weight
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

FIRST_BUCKET: Final = MIB  # kDefaultFirstBucketBytes, reducer.hpp
BROADCAST_BUCKET: Final = 250 * MIB  # broadcast_bucket_size, distributed.py
BUCKET_CAP: Final = 25 * MIB  # bucket_cap_mb's default, distributed.py
_SOURCE: Final = "torch/csrc/distributed/c10d/reducer.cpp"


def gradient_sizes(model: Model, itemsize: int, autocast: DType | None = None) -> list[int]:
    """Return the bytes of every gradient in the order in which backward has it ready, which is the order of the rebuilt
    buckets."""
    key = ("gradient order", autocast)
    if key not in model.profiles:
        model.profiles[key] = gradient_order(model.program, autocast)
    return [elements * itemsize for _, elements in model.profiles[key]]


def own_buckets(model: Model, setup: Setup) -> dict[DType, list[int]]:
    """Return the bytes of every bucket by the dtype of its gradients: one bucket has one dtype, and each dtype limits of its
    own (compute_bucket_assignment_by_size). That of the last gradient is the last."""
    key, common = ("gradient order", setup.autocast_dtype), trained_dtype(model, setup)
    if key not in model.profiles:
        model.profiles[key] = gradient_order(model.program, setup.autocast_dtype)
    own = {w.name: w.dtype or setup.compute_dtype for w in model.weight_classes} if setup.keeps_adapter_dtype else {}
    sizes: dict[DType, list[int]] = {}
    last = common
    for name, elements in model.profiles[key]:
        last = own.get(name, common)
        sizes.setdefault(last, []).append(elements * last.itemsize)
    found = {dtype: buckets(each) for dtype, each in sizes.items()}
    return {**{dtype: each for dtype, each in found.items() if dtype != last}, last: found.get(last, [])}


def buckets(sizes: Iterable[int], first: int = FIRST_BUCKET, cap: int = BUCKET_CAP) -> list[int]:
    """Return the bytes of every bucket. A bucket closes with the gradient that reaches its limit
    (compute_bucket_assignment_by_size)."""
    out: list[int] = []
    current, limit = 0, first
    for size in sizes:
        current += size
        if current >= limit:
            out.append(current)
            current, limit = 0, cap
    return [*out, current] if current else out


def hooked(model: Model, setup: Setup) -> tuple[list[Bucket], list[int]]:
    """Return the buckets under the setup's communication hook, and the number of gradients up to the end of each."""
    from memcalc.engines.base.comm_hooks import under_hook

    dtype, key = trained_dtype(model, setup), ("gradients in order", setup.autocast_dtype)
    if key not in model.profiles:
        model.profiles[key] = gradients_in_order(model.program, setup.autocast_dtype)
    gradients: list[Shape] = [shape for _, shape in model.profiles[key]]
    sizes = [numel(shape)[0] * dtype.itemsize for shape in gradients]
    ends = _ends(sizes, buckets(sizes))
    shapes = [tuple(dim.size for dim in shape) for shape in gradients]
    return [under_hook(setup, dtype, shapes[a:b]) for a, b in pairwise([0, *ends])], ends


def _ends(sizes: list[int], grouped: list[int]) -> list[int]:
    """Return the number of gradients that have been counted when each bucket closes."""
    counted = [*accumulate(sizes)]
    return [bisect_left(counted, nbytes) + 1 for nbytes in accumulate(grouped)]


def holdings(model: Model, setup: Setup) -> Holdings:
    held = _without_hook(model, setup)
    if setup.comm_hook is None:
        return held
    from memcalc.engines.base.comm_hooks import HookedBuckets, largest, rows_of
    from memcalc.engines.deepspeed.notes import NoteKeptGradients

    found, ends = hooked(model, setup)
    dtype = trained_dtype(model, setup)
    if not any(bucket.passing or bucket.states for bucket in found):
        return held
    *always, row = held.always
    whole = sum(bucket.whole for bucket in found)
    if whole * dtype.itemsize != row.nbytes:
        name = "DDP buckets (gradient_as_bucket_view=False), padded to squares"
        row = row._replace(name=name, shape=(Dim("squares", whole),))
    held = held._replace(always=(*always, row, *rows_of(found, dtype)), order=None)
    if model.program.source:
        first, *_ = buckets(gradient_sizes(model, dtype.itemsize, setup.autocast_dtype))
        return held._replace(flush=Flush(first, largest(found)))
    over = HookedBuckets(tuple(ends), tuple(bucket.passing for bucket in found), held.keeps_gradients)
    return held._replace(hooks=NoteKeptGradients(), over=over)


def _without_hook(model: Model, setup: Setup) -> Holdings:
    held = plain.holdings(model, setup)
    rows = _whole(model, setup)
    assert held.order is not None

    def rebuilt() -> tuple[Row, ...]:
        found = own_buckets(model, setup)
        return tuple(block for row in rows for block in _blocks(row, found[row.dtype]))

    order = held.order._replace(replaced=rows, replacing=rebuilt)
    return held._replace(always=(*held.always, *rows), order=order)


def _whole(model: Model, setup: Setup) -> tuple[Row, ...]:
    """Return the rows of the first buckets, of all gradients of a dtype."""
    name = "DDP buckets (gradient_as_bucket_view=False)"

    def row(elements: int, dtype: DType) -> Row:
        return Row("buffers", name, (Dim("parameters", elements),), dtype, basis="modelled", source=_SOURCE)

    if not has_two_dtypes(model, setup):
        return (row(model.trainable_parameters, trained_dtype(model, setup)),)
    return tuple(row(sum(sizes) // dtype.itemsize, dtype) for dtype, sizes in own_buckets(model, setup).items())


def has_two_dtypes(model: Model, setup: Setup) -> bool:
    """Tell whether adapters of a dtype of their own train beside other weights."""
    if not setup.keeps_adapter_dtype:
        return False
    return len({w.dtype or setup.compute_dtype for w in model.weight_classes if model.trained(w)}) > 1


def _blocks(row: Row, sizes: Iterable[int]) -> tuple[Row, ...]:
    """Return a row for each bucket, given their bytes.

    The reducer is built with one bucket of all parameters, as it need not look for unused ones (_BucketCapacityConfig in
    distributed.py). When the second step begins, it replaces it by buckets of the gradients in the order in which backward
    had them ready (Reducer::rebuild_buckets).
    """
    return tuple(row._replace(shape=(Dim("bucket", size // row.dtype.itemsize),)) for size in sizes)


def collectives(model: Model, setup: Setup) -> list[Collective]:
    if setup.dp == 1:
        return []
    if setup.comm_hook is not None and setup.compression_phase != "warmup":
        from memcalc.engines.base.comm_hooks import sent_by

        return [*sent_by(hooked(model, setup)[0], setup, _reductions(setup)), *_buffers(model, setup)]
    found = own_buckets(model, setup)
    *_, last = found
    out = [_reduced(model, setup, dtype, sizes, is_last=dtype == last) for dtype, sizes in found.items()]
    return [*out, *_buffers(model, setup)]


def _reduced(model: Model, setup: Setup, dtype: DType, sizes: list[int], *, is_last: bool) -> Collective:
    """Return the all-reduces of the buckets of a dtype. The last of all has no backward to hide behind."""
    times, elements = _reductions(setup), sum(sizes) // dtype.itemsize
    formula = f"parameters·{dtype.itemsize} B = {elements}·{dtype.itemsize} B"
    of = dtype if has_two_dtypes(model, setup) else None
    return Collective(
        "dp", "all_reduce", "gradient buckets", "backward", dtype.name, setup.dp, times * len(sizes), times * sum(sizes),
        _times(times, formula),
        shares=LaterShares(lambda: shares_of(model.program.weights(), sent=partial(_trained, model, setup, of))),
        source=_SOURCE, overlap="backward", tail=times * sizes[-1] if is_last else 0,
    )  # fmt: skip


def _buffers(model: Model, setup: Setup) -> list[Collective]:
    """Return the broadcasts before every forward whose gradients are reduced (require_forward_param_sync in
    distributed.py).

    Buffers of one dtype are joined to calls of up to 250 MiB (_sync_module_states of csrc/distributed/c10d/comm.cpp).
    """
    held: Counter[DType] = Counter()
    times = _reductions(setup)
    for buffer in model.program.buffers():
        if buffer.registered:
            held[buffer.dtype or setup.compute_dtype] += numel(buffer.shape)[0]
    out: list[Collective] = []
    for dtype, elements in held.items():
        nbytes = elements * dtype.itemsize
        calls, formula = -(-nbytes // BROADCAST_BUCKET), f"buffers·{dtype.itemsize} B = {nbytes} B"
        source = "torch/nn/parallel/distributed.py _sync_buffers"
        out.append(
            Collective(
                "dp",
                "broadcast",
                "module buffers",
                "forward",
                dtype.name,
                setup.dp,
                times * calls,
                times * nbytes,
                _times(times, formula),
                source=source,
            )
        )
    return out


def _reductions(setup: Setup) -> int:
    """Return how often a step reduces its gradients."""
    return 1 if setup.keeps_whole_gradients else setup.micro_batches


def _times(times: int, formula: str) -> str:
    return formula if times == 1 else "= ".join(f"{times}·{part}" for part in formula.split("= "))


def _trained(model: Model, setup: Setup, dtype: DType | None, weight: Weight) -> int:
    """Return the elements that DDP has a place for, of all or of one dtype. It leaves out weights that require no gradient
    (_build_params_for_reducer)."""
    if dtype is not None and (weight.dtype or setup.compute_dtype) != dtype:
        return 0
    return elements_of(weight) if model.program.wants_gradient(weight) else 0


def textbook(model: Model, setup: Setup) -> list[Collective]:
    return []
