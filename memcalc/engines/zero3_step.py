"""ZeRO-3 while a step runs: modules gather their parameters, and gradients are reduce-scattered bucket by bucket.

Sources, all in deepspeed/runtime/zero: parameter_offload.py (the hooks), partitioned_param_coordinator.py (what is gathered,
prefetched and released when), partition_parameters.py (an all-gather of several parameters has a flat buffer, from which
each is copied), stage3.py (the bucket), ../comm/coalesced_collectives.py (what is reduce-scattered is a copy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from memcalc.autograd import Leaf
from memcalc.dims import Dim, numel
from memcalc.dtypes import DType
from memcalc.engines.visits import Visit, Visits
from memcalc.engines.zero3_coordinator import Coordinator, Gathered, Order, Thresholds
from memcalc.families.module import Module, Run
from memcalc.tensor import Sent, Tensor, new_tensor


class ZeRO3(NamedTuple):
    """What a run under ZeRO-3 depends on."""

    ranks: int
    dtype: DType
    thresholds: Thresholds
    bucket: int
    order: Order | None = None
    """Which parameters each module has, as an earlier step has recorded it; None: this run records."""

    def start(self, run: Run) -> Step | Recorder:
        return Recorder(run) if self.order is None else Step(self, run, self.order)

    def prepared(self, record: Callable[[ZeRO3], Any]) -> ZeRO3:
        """What is kept depends on what comes next, layer or not."""
        recorder: Recorder = record(self)
        return self._replace(order=tuple(recorder.order))


class _Hooks:
    """What a run calls: the model is a module too."""

    def __init__(self, run: Run, visits: Visits) -> None:
        self.run = run
        self.visits = visits
        run.memory.visitor = visits

    def before_forward(self) -> None:
        self.visits.enter("", None)

    def layer(self, forward: Any, m: Module, *args: Any) -> Any:
        return forward(m, *args)

    def after_forward(self, loss: Tensor) -> Tensor:
        self.visits.leave(done=True)
        return loss

    def after_backward(self) -> None: ...

    def backward_is_over(self) -> None: ...


class Recorder(_Hooks):
    """The first steps: which module begins when, and nothing else."""

    def __init__(self, run: Run) -> None:
        self.order: list[frozenset[int]] = []
        super().__init__(run, Visits(run, self._begins, self._ends))

    def _begins(self, visit: Visit, forward: bool) -> None:
        self.order.append(visit.parameters)

    def _ends(self, visit: Visit, forward: bool) -> None: ...


class Handle:
    """An all-gather under way: its buffer lives until the last of its parameters is asked for."""

    __slots__ = ("arrived", "buffer", "gathered")

    def __init__(self, gathered: Gathered, buffer: Tensor) -> None:
        self.gathered = gathered
        self.buffer: Tensor = buffer
        self.arrived = False


class Step(_Hooks):
    """The hooks of one forward and backward."""

    def __init__(self, how: ZeRO3, run: Run, order: Order) -> None:
        super().__init__(run, Visits(run, self._begins, self._ends))
        self.how = how
        self.sizes = [numel(weight.shape)[0] for weight in run.weights.values()]
        self.whole: dict[int, Tensor] = {}
        self.coordinator = Coordinator(self.sizes, order, how.thresholds, self._launch, self._arrive, self._free)
        self.bucket: list[tuple[int, Tensor | None]] = []
        self.in_bucket = 0
        for i, weight in enumerate(run.weights.values()):
            if isinstance(weight.node, Leaf):
                self._hook(i, weight.node)

    # --- parameters

    def _begins(self, visit: Visit, forward: bool) -> None:
        self.coordinator.fetch(visit.where, visit.parameters, forward)

    def _ends(self, visit: Visit, forward: bool) -> None:
        self.coordinator.release(visit.where, visit.parameters, forward)

    def _launch(self, gathered: Gathered) -> Handle | None:
        elements = sum(self._padded(i) for i in gathered.parameters)
        memory = self.run.memory
        dim = Dim("gathered", elements)
        memory.sent.append(Sent("dp", "all_gather", "", memory.phase, None, (dim,), self.how.dtype))
        if self.how.ranks == 1:
            return None
        if len(gathered.parameters) == 1:
            (i,) = gathered.parameters
            self.whole[i] = self._block("gathered parameters", elements)
            return None
        return Handle(gathered, self._block("all-gather buffer of several parameters", elements))

    def _arrive(self, handle: Handle | None) -> None:
        """AllGatherCoalescedHandle.wait: the first that waits copies all of them out of the buffer."""
        if handle is None or handle.arrived:
            return
        handle.arrived = True
        for i in handle.gathered.parameters:
            self.whole[i] = self._block("gathered parameters", self.sizes[i])

    def _free(self, i: int) -> None:
        self.whole.pop(i, None)

    def _padded(self, i: int) -> int:
        return -(-self.sizes[i] // self.how.ranks) * self.how.ranks

    # --- gradients

    def _hook(self, i: int, leaf: Leaf) -> None:
        def ready(gradient: Tensor) -> None:
            leaf.grad = None
            self.run.memory.relabel(gradient.storage, leaf.shape, "gathered", "gradient not reduced yet", None)
            self._reduce(i, gradient)

        leaf.ready = ready

    def _reduce(self, i: int, gradient: Tensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: a gradient moves into the bucket, if it fits."""
        size = self.sizes[i]
        if self.in_bucket and self.in_bucket + size > self.how.bucket:
            self._flush()
        fits = self.in_bucket + size <= self.how.bucket
        self.bucket.append((i, None if fits else gradient))
        self.in_bucket += size

    def _flush(self) -> None:
        """reduce_scatter_coalesced: a copy in the order of the ranks, padded; one that needs no padding is taken as it is."""
        elements = sum(self._padded(i) for i, _ in self.bucket)
        memory = self.run.memory
        memory.sent.append(
            Sent("dp", "reduce_scatter", "", "backward", None, (Dim("bucket", elements),), self.how.dtype)
        )
        as_it_is = len(self.bucket) == 1 and elements == self.in_bucket
        if not as_it_is:
            padding = elements - self.in_bucket
            _pads = self._block("padding of the bucket", padding) if padding else None
            _copy = self._block("copy of the bucket that is reduced", elements)
        self.bucket.clear()
        self.in_bucket = 0

    def _block(self, name: str, elements: int) -> Tensor:
        memory = self.run.memory
        layer, scope = memory.layer, memory.scope
        memory.layer, memory.scope = None, ""
        try:
            return new_tensor(memory, (Dim("elements", elements),), self.how.dtype, name, component="gathered")
        finally:
            memory.layer, memory.scope = layer, scope

    def backward_is_over(self) -> None:
        if self.bucket:
            self._flush()
        self.coordinator.release_leftovers()
        self.whole.clear()
