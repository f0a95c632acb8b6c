"""ZeRO-1 and ZeRO-2 while backward runs: the reduce bucket comes with the first gradient. Under ZeRO-2 each gradient moves
into it, and a full bucket is all-reduced.

Source: deepspeed/runtime/zero/stage_1_and_2.py (setup_buckets, reduce_independent_p_g_buckets_and_remove_grads,
reduce_ipg_grads, copy_grads_in_partition). What is all-reduced is a copy of the bucket where it goes to several ranks. The
first gradient of the rank's own partition allocates room for all of them, which stays until the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from memcalc.autograd import Leaf
from memcalc.dims import Dim, numel
from memcalc.dtypes import DType
from memcalc.engines.zero_layout import Copies, Flat, Owned, copied, unreached_of, whole_of
from memcalc.families.module import Module, Run
from memcalc.rewritten import GradientsReady, Rewriting
from memcalc.tensor import StorageRow, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.runs import Trace


class ZeRO1(NamedTuple):
    """What a run under ZeRO-1 depends on."""

    dtype: DType
    bucket: int

    def start(self, run: Run) -> BucketComes:
        return BucketComes(run, self.dtype, self.bucket)

    def prepared(self, record: object) -> None:
        """All layers are alike."""


class NoHooks:
    """Hooks that do nothing."""

    def before_forward(self) -> None: ...

    def layer(self, forward: Callable[..., object], m: Module, *args: object) -> object:
        return forward(m, *args)

    def after_forward(self, loss: Tensor) -> Tensor:
        return loss

    def after_backward(self) -> None: ...

    def backward_is_over(self) -> None: ...


class NoteGradients(NamedTuple):
    """A run in which each gradient goes as soon as it is ready, and that notes when that is."""

    def start(self, run: Run) -> Notes:
        return Notes(run)

    def prepared(self, record: object) -> NoteGradients:
        """A bucket ends in the middle of a layer: no layer stands for others."""
        return self


class Notes(NoHooks):
    """The hooks of one backward."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.order: list[int] = []
        self.elements: list[int] = []
        self.places: list[int] = []
        for i, weight in enumerate(run.weights.values()):
            if isinstance(weight.node, Leaf):
                self._hook(i, weight.node)

    def _hook(self, i: int, leaf: Leaf) -> None:
        def ready(gradient: Tensor) -> None:
            leaf.grad = None
            memory = self.run.memory
            self.order.append(i)
            self.elements.append(numel(leaf.shape)[0])
            self.places.append(len(memory.log))
            memory.relabel(gradient.storage, leaf.shape, "gathered", "gradient not reduced yet", None)

        leaf.ready = ready

    def backward_is_over(self) -> None:
        self.run.ready = GradientsReady(
            tuple(self.order), tuple(self.elements), tuple(self.places), len(self.run.memory.log)
        )


class ZeRO2(NamedTuple):
    """ZeRO-2 while backward runs, for one rank."""

    dtype: DType
    bucket: int
    flat: Flat
    own: Owned
    """The rank's own."""
    sent: DType
    """What gradients are all-reduced in."""

    def play(self, run: Trace) -> Trace:
        """The run with the reduction of its gradients in it."""
        noted = run.ready
        assert noted is not None
        out = Reduction(self, run)
        for i, size, place in zip(noted.order, noted.elements, noted.places, strict=True):
            out.ready(i, size, place)
        out.copy(noted.over)
        out.backward_is_over()
        return out.finished()


class BucketComes(NoHooks):
    """The hooks of one backward of ZeRO-1."""

    def __init__(self, run: Run, dtype: DType, size: int) -> None:
        self.run, self.dtype, self.size = run, dtype, size
        self.buffer: Tensor | None = None
        for weight in run.weights.values():
            if isinstance(weight.node, Leaf):
                weight.node.ready = self._ready

    def backward_is_over(self) -> None:
        self.buffer = None  # what follows is the engine's rows

    def _ready(self, gradient: Tensor) -> None:
        """A gradient has been accumulated: the bucket belongs to no layer."""
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


class Reduction(Rewriting):
    """The bucket, what of it is reduced, and what the rank keeps, between the events of a run."""

    def __init__(self, how: ZeRO2, run: Trace) -> None:
        super().__init__(run)
        self.how = how
        self.bucket: int | None = None
        self.waiting: list[int] = []
        """Parameters by their place in the order of the groups."""
        self.large: int | None = None
        """A gradient larger than the bucket, which stays where it is until it is reduced."""
        self.filled = 0
        self.owned: int | None = None

    def ready(self, i: int, size: int, place: int) -> None:
        """The gradient of a parameter of that size is there: at `place`, where it is no gradient of autograd's any more."""
        self.copy(place)
        if self.bucket is None:
            self.bucket = self._block("reduce bucket", "reduce_bucket_size", self.how.bucket)
        self.copy(place + 2)  # what was a gradient goes on under the next number
        if self.filled + size > self.how.bucket:
            self._flush()
        if size > self.how.bucket:
            self.large = self.run.log[place + 1]
            self.hold(self.large)
        self.waiting.append(self.how.flat.order[i])
        self.filled += size

    def backward_is_over(self) -> None:
        self._flush()
        elements = unreached_of(self.how.own)
        zeros = self._block("zeros for what gets no gradient", "parameters", elements) if elements else None
        for block in (self.owned, self.bucket, zeros):  # the first two are rows of the step
            if block is not None:
                self.free(block)

    def _flush(self) -> None:
        self._copy(copied(self.how.flat.all_reduces(self.waiting, self.how.bucket), self.how.dtype, self.how.sent))
        if self.owned is None and any(part.touches(sorted(self.waiting)) for part in self.how.own):
            name = "gradients of the partition, and of what straddles it"
            self.owned = self._block(name, "whole gradients", whole_of(self.how.own))
        if self.large is not None:
            self.let_go(self.large)
            self.large = None
        self.waiting.clear()
        self.filled = 0

    def _copy(self, copies: Copies) -> None:
        """Allocate what an all-reduce joins and casts; both go when it is over."""
        blocks: list[int] = []
        if copies.joined:
            blocks.append(self._block("copy of the bucket that is reduced", "bucket", copies.joined))
        if copies.cast:
            name = "the bucket in the dtype that is sent"
            blocks.append(self._block(name, "bucket", copies.cast, self.how.sent))
        for block in blocks:
            self.free(block)

    def _block(self, name: str, dim: str, elements: int, dtype: DType | None = None) -> int:
        """A block that belongs to no layer, of the gradients' dtype unless another is given."""
        shape = (Dim(dim, elements),)
        return self.allocate(StorageRow(shape, dtype or self.how.dtype, "gathered", "", name, None))
