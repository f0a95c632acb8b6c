"""ZeRO-1 and ZeRO-2 while backward runs: the reduce bucket comes with the first gradient. Under ZeRO-2 each gradient moves
into it, and a full bucket is all-reduced.

Source: deepspeed/runtime/zero/stage_1_and_2.py (setup_buckets, reduce_independent_p_g_buckets_and_remove_grads,
reduce_ipg_grads, copy_grads_in_partition). What is all-reduced is a copy of the bucket where it goes to several ranks. The
first gradient of the rank's own partition allocates room for all of them, which stays until the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memcalc.autograd import Leaf
from memcalc.dims import Dim, numel
from memcalc.dtypes import DType
from memcalc.engines.zero_layout import Copies, Flat, Owned, copied, unreached_of, whole_of
from memcalc.families.module import Module, Run
from memcalc.tensor import Tensor, new_tensor


class ZeRO1(NamedTuple):
    """What a run under ZeRO-1 depends on."""

    dtype: DType
    bucket: int

    def start(self, run: Run) -> BucketComes:
        return BucketComes(run, self.dtype, self.bucket)

    def prepared(self, record: object) -> None:
        """All layers are alike."""


class ZeRO2(NamedTuple):
    """What a run under ZeRO-2 depends on."""

    dtype: DType
    bucket: int
    flat: Flat
    own: Owned
    """The rank's own."""
    sent: DType
    """What gradients are all-reduced in."""

    def start(self, run: Run) -> Reduction:
        return Reduction(self, run)

    def prepared(self, record: object) -> ZeRO2:
        """A bucket ends in the middle of a layer: the layers are not alike."""
        return self


class BucketComes:
    """The hooks of one backward."""

    def __init__(self, run: Run, dtype: DType, size: int) -> None:
        self.run, self.dtype, self.size = run, dtype, size
        self.buffer: Tensor | None = None
        for i, weight in enumerate(run.weights.values()):
            if isinstance(weight.node, Leaf):
                self._hook(i, weight.node)

    def before_forward(self) -> None: ...

    def layer(self, forward: Callable[..., object], m: Module, *args: object) -> object:
        return forward(m, *args)

    def after_forward(self, loss: Tensor) -> Tensor:
        return loss

    def after_backward(self) -> None: ...

    def backward_is_over(self) -> None:
        self.buffer = None  # what follows is the engine's rows

    def _hook(self, i: int, leaf: Leaf) -> None:
        def ready(gradient: Tensor) -> None:
            if self.buffer is None:
                self.buffer = self.block("reduce bucket", "reduce_bucket_size", self.size)
            self.ready(i, leaf, gradient)

        leaf.ready = ready

    def ready(self, i: int, leaf: Leaf, gradient: Tensor) -> None:
        """The gradient of a parameter has been accumulated."""

    def block(self, name: str, dim: str, elements: int, dtype: DType | None = None) -> Tensor:
        """Allocate a block that belongs to no layer, of the gradients' dtype unless another is given."""
        memory = self.run.memory
        layer, scope = memory.layer, memory.scope
        memory.layer, memory.scope = None, ""
        try:
            return new_tensor(memory, (Dim(dim, elements),), dtype or self.dtype, name, component="gathered")
        finally:
            memory.layer, memory.scope = layer, scope


class Reduction(BucketComes):
    """The same, and gradients are reduced."""

    def __init__(self, how: ZeRO2, run: Run) -> None:
        super().__init__(run, how.dtype, how.bucket)
        self.how = how
        self.sizes = [numel(weight.shape)[0] for weight in run.weights.values()]
        self.waiting: list[int] = []
        """Parameters by their place in the order of the groups."""
        self.large: Tensor | None = None
        """A gradient larger than the bucket, which stays where it is until it is reduced."""
        self.filled = 0
        self.owned: Tensor | None = None

    def ready(self, i: int, leaf: Leaf, gradient: Tensor) -> None:
        leaf.grad = None
        self.run.memory.relabel(gradient.storage, leaf.shape, "gathered", "gradient not reduced yet", None)
        if self.filled + self.sizes[i] > self.size:
            self._flush()
        self.large = gradient if self.sizes[i] > self.size else None
        self.waiting.append(self.how.flat.order[i])
        self.filled += self.sizes[i]

    def backward_is_over(self) -> None:
        self._flush()
        if zeros := unreached_of(self.how.own):
            _zeros = self.block("zeros for what gets no gradient", "parameters", zeros)
        self.owned = None  # a row of the step
        super().backward_is_over()

    def _flush(self) -> None:
        copies = copied(self.how.flat.all_reduces(self.waiting, self.size), self.dtype, self.how.sent)
        self._copy(copies)
        if self.owned is None and any(part.first <= i < part.end for part in self.how.own for i in self.waiting):
            name = "gradients of the partition, and of what straddles it"
            self.owned = self.block(name, "whole gradients", whole_of(self.how.own))
        self.large = None
        self.waiting.clear()
        self.filled = 0

    def _copy(self, copies: Copies) -> None:
        if copies.joined:
            _joined = self.block("copy of the bucket that is reduced", "bucket", copies.joined)
        if copies.cast:
            _cast = self.block("the bucket in the dtype that is sent", "bucket", copies.cast, self.how.sent)
