"""ZeRO-1 and ZeRO-2 while backward runs: the reduce bucket is allocated with the first gradient. Under ZeRO-2 each
gradient moves into the bucket, and a full bucket is all-reduced.

Source: deepspeed/runtime/zero/stage_1_and_2.py (setup_buckets, reduce_independent_p_g_buckets_and_remove_grads,
reduce_ipg_grads, copy_grads_in_partition). With `overlap_comm` there are two buckets, which take turns. The all-reduced
tensor is a copy of the bucket if it goes to several ranks. The first gradient of the rank's own partition allocates room
for all of them, which stays until the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.autograd import Leaf
from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType
from memcalc.core.noted import Noted, Over, Ready
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.engines.deepspeed.all_reduces import Copies
from memcalc.engines.deepspeed.notes import NoHooks
from memcalc.engines.deepspeed.zero_layout import Flat, Owned, unreached_of, whole_of
from memcalc.families.base.module import Run

SECOND_BUCKET: Final = "reduce bucket that backward fills"
"""The name of the second bucket."""

if TYPE_CHECKING:
    from memcalc.tape.rewritten import Out


class ZeRO1(NamedTuple):
    """The parameters of a run under ZeRO-1."""

    dtype: DType
    bucket: int

    def start(self, run: Run) -> BucketComes:
        return BucketComes(run, self.dtype, self.bucket)


class ZeRO2(NamedTuple):
    """ZeRO-2 while backward runs, for one rank."""

    dtype: DType
    bucket: int
    overlaps: bool
    """True if there is a second bucket, which backward fills while the first is reduced (`overlap_comm`)."""
    flat: Flat
    partitions: Owned
    """The rank's partitions."""
    sent: DType
    """The dtype in which gradients are all-reduced."""

    def play(self, noted: Noted, out: Out) -> None:
        """Reduce the gradients that are ready."""
        Reduction(self, out).play(noted)


class BucketComes(NoHooks):
    """The hooks of one backward of ZeRO-1."""

    def __init__(self, run: Run, dtype: DType, size: int) -> None:
        self.run, self.dtype, self.size = run, dtype, size
        self.buffer: Tensor | None = None
        for weight in run.weights.values():
            if isinstance(weight.node, Leaf):
                weight.node.ready = self._ready

    def backward_is_over(self) -> None:
        self.buffer = None  # later buffers are the engine's rows

    def _ready(self, gradient: Tensor) -> None:
        """Allocate the bucket, if it is not there, after a gradient has been accumulated. The bucket belongs to no
        layer."""
        if self.buffer is not None:
            return
        memory = self.run.memory
        layer, scope = memory.layer, memory.scope
        memory.layer, memory.scope = None, ""
        try:
            shape = (Dim("reduce_bucket_size", self.size),)
            self.buffer = new_tensor(memory, shape, self.dtype, "reduce bucket", component="gathered")
        finally:
            memory.layer, memory.scope = layer, scope


class Reduction:
    """The bucket, its reduced gradients, and the rank's kept ones, between the events of a run."""

    def __init__(self, how: ZeRO2, out: Out) -> None:
        self.out, self.how = out, how
        self.buckets: tuple[object, ...] = ()
        self.waiting: list[int] = []
        """The parameters in the bucket, by their place in the order of the groups."""
        self.large: object = None
        """A gradient larger than the bucket, which stays where it is until it is reduced."""
        self.filled = 0
        self.owned: object = None
        self.reached = 0
        """The furthest place in the run that an event has come at."""

    def play(self, noted: Noted) -> None:
        for event in noted.events:
            if isinstance(event, Ready):
                self.ready(event, noted.elements[event.parameter])
            elif isinstance(event, Over):
                self._reach(event.place)
                self.backward_is_over()
            elif event.place > self.reached:
                self.reached = event.place

    def _reach(self, place: int) -> None:
        """Let the run go on up to the furthest of the places that have come. This is done where something is allocated or
        freed, not at every event."""
        self.reached = max(self.reached, place)
        self.out.reach(self.reached)

    def ready(self, event: Ready, size: int) -> None:
        """Take the gradient of a parameter of `size` elements."""
        out, most = self.out, self.how.bucket
        if not self.buckets:
            self._reach(event.place)
            names = ("reduce bucket", SECOND_BUCKET)[: 1 + self.how.overlaps]
            self.buckets = tuple(out.block(name, "reduce_bucket_size", most, self.how.dtype) for name in names)
        self.reached = max(self.reached, event.place, event.after)
        if self.filled + size > most:
            out.reach(self.reached)
            self.flush()
        if size > most:
            out.reach(self.reached)
            self.large = self.take_large(event, size)
        self.waiting.append(self.how.flat.order[event.parameter])
        self.filled += size

    def take_large(self, event: Ready, size: int) -> object:
        """Return what holds a gradient of `size` elements that the bucket has no room for."""
        return self.out.block_of_run(event.block)

    def backward_is_over(self) -> None:
        self.flush()
        elements, name = unreached_of(self.how.partitions), "zeros for what gets no gradient"
        _zeros = self.out.block(name, "parameters", elements, self.how.dtype) if elements else None
        self.owned, self.buckets = None, ()  # the step's rows have these

    def flush(self) -> None:
        """Reduce the bucket."""
        self._copy(self.how.flat.copies(self.waiting, self.how.bucket, self.how.dtype, self.how.sent))
        self.keep_own()
        self.large = None
        self.waiting.clear()
        self.filled = 0

    def keep_own(self) -> None:
        """Allocate room for the rank's own gradients, if the bucket has the first of them."""
        if self.owned is None and any(part.touches(sorted(self.waiting)) for part in self.how.partitions):
            name = "gradients of the partition, and of what straddles it"
            self.owned = self.out.block(name, "whole gradients", whole_of(self.how.partitions), self.how.dtype)

    def _copy(self, copies: Copies) -> None:
        """Allocate the joined and cast copies of an all-reduce. Both are freed when it is over."""
        out, dtype, sent = self.out, self.how.dtype, self.how.sent
        _joined = copies.joined and out.block("copy of the bucket that is reduced", "bucket", copies.joined, dtype)
        _cast = copies.cast and out.block("the bucket in the dtype that is sent", "bucket", copies.cast, sent)
