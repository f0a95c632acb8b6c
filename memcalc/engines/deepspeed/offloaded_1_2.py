"""DeepSpeed's ZeRO-1 and ZeRO-2 with the optimizer on the host (`offload_optimizer: {device: cpu}`).

The GPU keeps the flat weights and a block for the largest gradient. Each reduced gradient of the rank's partition goes to the
host at once: its norm is computed in fp64 and kept, then it is cast and copied. The host has the partition in fp32, its
gradient, a 16-bit copy on its way back, all pinned, and the moments of DeepSpeedCPUAdam, which runs there. Sources:
deepspeed/runtime/zero/stage_1_and_2.py (copy_grads_in_partition, async_accumulate_grad_in_cpu_via_gpu, step),
deepspeed/ops/adam/cpu_adam.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dtypes import DType, fp32, fp64
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import Holdings, Order, input_rows, weight_rows
from memcalc.engines.deepspeed.all_reduces import Copies
from memcalc.engines.deepspeed.notes import NoteGradients
from memcalc.engines.deepspeed.offloaded_order import order_of
from memcalc.engines.deepspeed.zero1_reduction import buckets_in_order
from memcalc.engines.deepspeed.zero2_step import Reduction, ZeRO1, ZeRO2
from memcalc.engines.deepspeed.zero_layout import (
    ENGINE,
    STAGE_12,
    Owned,
    Slices,
    buckets_before_exceeding,
    flat,
    flat_elements,
    groups_of,
    largest_trained,
    partitions,
    ready_order,
    reduced_in_order,
    sent_dtype,
    sizes_of,
    slices_of,
    whole_of,
)
from memcalc.engines.deepspeed.zero_partitions import block, nbytes_of
from memcalc.offload.host import HostRow

if TYPE_CHECKING:
    from memcalc.core.noted import Noted, Ready
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.tape.rewritten import Out

CPU_ADAM: Final = "deepspeed/ops/adam/cpu_adam.py"
_NUMBER: Final = fp64.itemsize


def holdings(model: Model, setup: Setup) -> Holdings:
    """Return what the rank with the highest peak holds on the GPU, and in `others` the ranks that can have more in
    backward."""
    always = _always(model, setup)
    return (_stage_1 if setup.zero == 1 else _stage_2)(model, setup, always)


def _always(model: Model, setup: Setup) -> list[Row]:
    dtype, ranks = setup.compute_dtype, setup.shards
    rows = weight_rows(model, dtype, "parameters", "always")
    padding = flat_elements(model, ranks) - sum(group.starts[-1] for group in groups_of(model, ranks))
    if padding:
        rows.append(block("buffers", "padding of the flat weights", "padding", padding, dtype, "always", STAGE_12))
    name = "block for a gradient from the host"
    rows.append(block("buffers", name, "largest", largest_trained(model, setup.shards), dtype, "always", STAGE_12))
    return [*rows, *input_rows(model, setup, fp32, dtype)]


def _scaled_loss(model: Model, setup: Setup) -> Row:
    row = block("buffers", "the loss, scaled", "numbers", 2, fp32, "backward", ENGINE)
    return row._replace(dtype=model.program.loss_in(setup.compute_dtype, fp32))


def step_rows(owned: Owned) -> list[Row]:
    """Return the rows of the step: the norms of the gradients, and their sum."""
    norms = sum(part.slices for part in owned)
    life = "until the step is over"
    return [
        block("temporaries", "norms of gradients", "numbers", norms, fp64, life, STAGE_12),
        block("temporaries", "the norm that is sent", "numbers", 1, fp32, life, STAGE_12),
    ]


# --- stage 2


class ZeRO2Offloaded(NamedTuple):
    """ZeRO-2 while the last backward of a step runs, for one rank."""

    plain: ZeRO2
    slices: tuple[tuple[int, int], ...]

    def play(self, noted: Noted, out: Out) -> None:
        """Reduce the gradients that are ready."""
        reduction = Leaving(self.plain, out, dict(self.slices))
        reduction.play(noted)


class Leaving(Reduction):
    """The bucket and the norms of the gradients that have left for the host."""

    def __init__(self, how: ZeRO2, out: Out, slices: Slices) -> None:
        super().__init__(how, out)
        self.slices = slices
        self.norms: list[object] = []

    def take_large(self, event: Ready, size: int) -> object:
        """Return the copy of a gradient larger than the bucket (`clone`): the original goes."""
        return self.out.block("a gradient larger than the bucket", "elements", size, self.how.dtype)

    def backward_is_over(self) -> None:
        self.flush()
        self.buckets = ()
        self.norms.clear()  # the step's rows have these

    def keep_own(self) -> None:
        """Compute the norm of each gradient of the rank's own, and send it to the host."""
        for place in self.waiting:
            elements = self.slices.get(place)
            if elements is None:
                continue
            _in_fp64 = self.out.block("a gradient in fp64 for its norm", "slice", elements, fp64)
            self.norms.append(self.out.block("norm of a gradient", "numbers", 1, fp64))
            del _in_fp64
            if self.how.dtype is not fp32:
                self.out.block("a gradient in fp32", "slice", elements, fp32)


def _stage_2(model: Model, setup: Setup, always: list[Row]) -> Holdings:
    size = setup.reduce_bucket_size
    assert size is not None
    made: list[Holdings] = []
    for owned in _can_have_most(model, setup):
        plain = ZeRO2(
            setup.compute_dtype, size, bool(setup.overlap_comm), flat(model, setup.shards), owned, sent_dtype(setup)
        )
        over = ZeRO2Offloaded(plain, tuple(slices_of(model, setup, owned).items()))
        made.append(
            Holdings(
                tuple(always),
                backward=(_scaled_loss(model, setup),),
                step=tuple(_largest_step(model, setup)),
                keeps_gradients=False,
                hooks=NoteGradients(),
                over=over,
                order=order_of(model, setup, input_rows(model, setup, fp32, setup.compute_dtype), owned),
            )
        )
    first, *others = made
    return first._replace(others=tuple(others))


def _largest_step(model: Model, setup: Setup) -> list[Row]:
    return max((step_rows(owned) for owned in dict.fromkeys(partitions(model, setup.shards))), key=nbytes_of)


def _can_have_most(model: Model, setup: Setup) -> list[Owned]:
    """Return the partitions of the ranks that no other rank exceeds in every reduction of a bucket."""
    layout, sizes, order = flat(model, setup.shards), sizes_of(model), ready_order(model)
    assert setup.reduce_bucket_size is not None
    buckets = [
        [layout.order[order[k]] for k in bucket]
        for bucket in buckets_before_exceeding([sizes[i] for i in order], setup.reduce_bucket_size)
    ]
    found: dict[tuple[int, ...], Owned] = {}
    for owned in dict.fromkeys(partitions(model, setup.shards)):
        found.setdefault(_marks(buckets, slices_of(model, setup, owned)), owned)
    return [
        owned
        for marks, owned in found.items()
        if not any(other != marks and all(a >= b for a, b in zip(other, marks, strict=True)) for other in found)
    ]


def _marks(buckets: list[list[int]], slices: Slices) -> tuple[int, ...]:
    """Return for each bucket the most bytes of norms and of a gradient in fp64, and the norms' bytes after it."""
    out, norms = list[int](), 0
    for places in buckets:
        most = norms
        for elements in (slices[place] for place in places if place in slices):
            norms += _NUMBER
            most = max(most, norms + elements * fp64.itemsize)
        out += [most, norms]
    return tuple(out)


# --- stage 1


class Leaves(NamedTuple):
    """The bytes of a moment of the reduction after backward, beside the bucket."""

    waiting: int
    """The elements of gradients that are where backward has left them."""
    copies: Copies = Copies(0, 0)
    in_fp64: int = 0
    norms: int = 0
    cloned: int = 0
    """The elements of the copy of a gradient larger than the bucket, while the original is there."""

    def nbytes(self, dtype: DType, sent: DType) -> int:
        own = (self.in_fp64 + self.norms) * fp64.itemsize
        return (self.waiting + self.cloned) * dtype.itemsize + self.copies.nbytes(dtype, sent) + own


def _leaving(model: Model, setup: Setup, owned: Owned) -> Iterator[Leaves]:
    """Yield the moments of a rank's reduction. A gradient in the bucket is a view of it. A larger one is copied, and its
    copy stays until the gradient has left for the host; on other ranks until all are reduced."""
    layout, sizes, most = flat(model, setup.shards), sizes_of(model), setup.reduce_bucket_size
    assert most is not None
    dtype, sent, slices = setup.compute_dtype, sent_dtype(setup), slices_of(model, setup, owned)
    waiting, norms = sum(sizes[i] for i in reduced_in_order(model, layout)), 0
    for bucket in buckets_in_order(model, layout, most):
        places = [layout.order[i] for i in bucket]
        large = [i for i in bucket if sizes[i] > most]
        yield Leaves(waiting, norms=norms, cloned=max((sizes[i] for i in large), default=0))
        waiting -= sum(sizes[i] for i in bucket if sizes[i] <= most)
        yield Leaves(waiting, layout.copies(places, most, dtype, sent), norms=norms)
        for i, place in zip(bucket, places, strict=True):
            if place in slices:
                norms += 1
                yield Leaves(waiting, in_fp64=slices[place], norms=norms)
                waiting -= sizes[i] if i in large else 0


def _stage_1(model: Model, setup: Setup, always: list[Row]) -> Holdings:
    """Return what stage 1 holds. Gradients stay until backward is over; then they are moved bucket by bucket."""
    dtype, sent, size = setup.compute_dtype, sent_dtype(setup), setup.reduce_bucket_size
    assert size is not None
    gradients = tuple(weight_rows(model, dtype, "gradients", "backward"))
    bucket = block("buffers", "reduce bucket", "reduce_bucket_size", size, dtype, "backward", STAGE_12)
    earlier = gradients if setup.micro_batches > 1 else ()
    every = dict.fromkeys(partitions(model, setup.shards))
    moments = ((owned, one) for owned in every for one in _leaving(model, setup, owned))
    owned, most = max(moments, key=lambda moment: moment[1].nbytes(dtype, sent))
    how = ZeRO1(dtype, size)
    scaled = _scaled_loss(model, setup)
    return Holdings(
        tuple(always),
        forward=(*earlier, bucket) if earlier else (),
        backward=(*earlier, *([bucket] if earlier else []), scaled),
        step=tuple(_largest_step(model, setup)),
        after_backward=((*gradients, bucket, scaled), (bucket, scaled, *_rows_of(most, dtype, sent))),
        keeps_gradients=not earlier,
        accumulates=bool(earlier),
        hooks=None if earlier else how,
        order=_order_1(model, setup, owned, how),
    )


def _order_1(model: Model, setup: Setup, owned: Owned, how: ZeRO1) -> Order | None:
    order = order_of(model, setup, input_rows(model, setup, fp32, setup.compute_dtype), owned)
    return None if order is None else order._replace(first=how)


def _rows_of(one: Leaves, dtype: DType, sent: DType) -> list[Row]:
    life, flush = "backward", "a flush in backward"
    rows = [
        block("gradients", "gradients not reduced yet", "parameters", one.waiting, dtype, life, STAGE_12),
        block("buffers", "a gradient larger than the bucket, copied", "elements", one.cloned, dtype, flush, STAGE_12),
        block("buffers", "copy of the bucket that is reduced", "bucket", one.copies.joined, dtype, flush, STAGE_12),
        block("buffers", "the bucket in the dtype that is sent", "bucket", one.copies.cast, sent, flush, STAGE_12),
        block("buffers", "a gradient in fp64 for its norm", "slice", one.in_fp64, fp64, flush, STAGE_12),
        block("buffers", "norms of gradients", "numbers", one.norms, fp64, "until the step is over", STAGE_12),
    ]
    return [row for row in rows if row.nbytes]


def have_most(model: Model, setup: Setup) -> list[Owned]:
    """Return the partitions of the ranks that have most in a phase."""
    every = list(dict.fromkeys(partitions(model, setup.shards)))
    in_step = max(every, key=lambda owned: nbytes_of(step_rows(owned)))
    if setup.zero == 2:
        return [in_step, *_can_have_most(model, setup)]
    dtype, sent = setup.compute_dtype, sent_dtype(setup)
    return [in_step, max(every, key=lambda own: max(m.nbytes(dtype, sent) for m in _leaving(model, setup, own)))]


# --- the host


def on_host(model: Model, setup: Setup) -> list[HostRow]:
    """Return what the ranks of the fullest node keep on the host between steps."""
    ranks = min(setup.gpus, setup.gpus_per_node)
    owned = partitions(model, setup.shards)
    nodes = [owned[first : first + ranks] for first in range(0, len(owned), ranks)]
    node = max(nodes, key=lambda here: sum(whole_of(one) for one in here))
    parts = tuple(part.size for one in node for part in one)
    dtype, of = setup.compute_dtype, "parameters/dp"
    rows = [
        HostRow("pinned", "fp32 partition of the weights", of, parts, fp32, "always", STAGE_12),
        HostRow("pinned", "gradients in fp32", of, parts, fp32, "always", STAGE_12),
        HostRow("pinned", "updated weights on their way to the GPU", of, parts, dtype, "always", STAGE_12),
        HostRow(
            "pinned",
            "block for a gradient",
            "largest",
            (largest_trained(model, setup.shards),) * len(node),
            dtype,
            "always",
            STAGE_12,
        ),
        HostRow("paged", "exp_avg", of, parts, fp32, "always", CPU_ADAM),
        HostRow("paged", "exp_avg_sq", of, parts, fp32, "always", CPU_ADAM),
        HostRow("paged", "the last norm", "numbers", (1,) * len(node), fp32, "always", STAGE_12),
    ]
    if setup.zero == 2 and setup.micro_batches > 1:
        rows.append(
            HostRow(
                "pinned",
                "sums of gradients",
                "parameters",
                tuple(_whole_sizes(model, setup, node)),
                dtype,
                "always",
                STAGE_12,
            )
        )
    return rows


def _whole_sizes(model: Model, setup: Setup, node: list[Owned]) -> Iterator[int]:
    """Yield the elements of each parameter that touches a rank's partitions, for each of these ranks."""
    groups = groups_of(model, setup.shards)
    for owned in node:
        for group, part in zip(groups, owned, strict=True):
            for place in range(part.first - group.first, part.end - group.first):
                yield group.starts[place + 1] - group.starts[place]
