"""ZeRO-3 while a step runs: modules gather their parameters, and gradients are reduce-scattered bucket by bucket.

Sources, all in deepspeed/runtime/zero: parameter_offload.py (the hooks), partitioned_param_coordinator.py (what is gathered,
prefetched and released when), partition_parameters.py (an all-gather of several parameters has a flat buffer, from which
each is copied), stage3.py (the bucket), ../comm/coalesced_collectives.py (what is reduce-scattered is a copy).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from memcalc.autograd import Checkpoint, Leaf, Recomputation
from memcalc.dims import Dim, numel
from memcalc.dtypes import DType
from memcalc.engines.visits import Visit, Visits, Where
from memcalc.engines.zero3_coordinator import Begun, Coordinator, Gathered, Order, Thresholds
from memcalc.engines.zero3_linear import zero3_linear
from memcalc.families.module import Module, Run
from memcalc.inputs.options import refuse
from memcalc.ops.matmul import linear
from memcalc.tensor import Sent, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.collectives import Kind


EXPERTS: Final = "experts' dp"
"""What a run notes as the axis of the ranks that have the same experts."""


GATHERS_AGAIN: Final = (
    "DeepSpeed's ZeRO-3 gathers more in a layer's recomputation than in its forward, where torch raises"
)


def alike_ranks(sizes: Sequence[int], ranks: int) -> int:
    """The fewest ranks whose step allocates what a step over `ranks` does: those that divide all sizes are alike.

    Parameters are gathered whole, and gradients are sent whole: the number of ranks shows in their padding alone. It shows
    besides where a share of a bucket is allocated (gradients reduced in another dtype, experts), and where a recomputation
    counts ops.
    """
    together = gcd(*sizes)
    if ranks == 1 or together % ranks:
        return ranks
    return next(fewer for fewer in range(2, ranks + 1) if not together % fewer)


class ZeRO3(NamedTuple):
    """This is what a run under ZeRO-3 depends on."""

    ranks: int
    dtype: DType
    thresholds: Thresholds
    bucket: int
    sent: DType
    """What gradients are reduced in."""
    experts: frozenset[int] = frozenset()
    """Parameters that are sharded over the ranks with the same experts, by their place in definition order."""
    expert_ranks: int = 1
    leaves: frozenset[Where] = frozenset()
    """Modules that are gathered whole, and reduced when their backward is over."""
    order: Order | None = None
    """Which parameters each module has, as an earlier step has recorded it; None: this run records."""

    def start(self, run: Run) -> Step | Recorder:
        return Recorder(self, run) if self.order is None else Step(self, run, self.order)

    def prepared(self, record: Callable[[ZeRO3], Any]) -> ZeRO3:
        """The choice of what is kept depends on what comes next, layer or not."""
        recorder: Recorder = record(self)
        return self._replace(order=tuple(recorder.order))


class Untraced(NamedTuple):
    """The very first micro-batch, while it is not known what comes next: modules gather one by one, and keep nothing
    (reset_step and release_sub_module in partitioned_param_coordinator.py)."""

    how: ZeRO3

    def start(self, run: Run) -> UntracedStep:
        thresholds = self.how.thresholds._replace(max_reuse=0, persistence=0, prefetch=0)
        return UntracedStep(self.how._replace(thresholds=thresholds), run)

    def prepared(self, record: object) -> None:
        """All layers are alike."""


class _Hooks:
    """This is what a run calls: the model is a module too."""

    def __init__(self, run: Run, visits: Visits) -> None:
        self.run = run
        self.visits = visits
        run.memory.visitor = visits
        run.memory.kernels = {**run.memory.kernels, linear: zero3_linear}

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

    def __init__(self, how: ZeRO3, run: Run) -> None:
        self.order: list[Begun] = []
        super().__init__(run, Visits(run, how.leaves, self._begins, self._ends))

    def _begins(self, visit: Visit, forward: bool) -> None:
        self.order.append(Begun(visit.parameters, visit.within, visit.is_leaf))

    def _ends(self, visit: Visit, forward: bool) -> None: ...


class Handle:
    """All-gathers under way: their buffers live until the last of their parameters is asked for."""

    __slots__ = ("arrived", "buffers", "parameters")

    def __init__(self) -> None:
        self.parameters: list[int] = []
        """Those that are in a buffer with others."""
        self.buffers: list[Tensor] = []
        self.arrived = False


class Step(_Hooks):
    """The hooks of one forward and backward."""

    def __init__(self, how: ZeRO3, run: Run, order: Order) -> None:
        self.whole: dict[int, Tensor] = {}
        super().__init__(run, Visits(run, how.leaves, self._begins, self._ends, self.whole.get))
        self.how = how
        self.sizes = [numel(weight.shape)[0] for weight in run.weights.values()]
        self.coordinator = Coordinator(self.sizes, order, how.thresholds, self._launch, self._arrive, self._free)
        self.bucket: list[tuple[int, Tensor | None]] = []
        self.in_bucket = 0
        self.more_in_forward: WeakKeyDictionary[Checkpoint, Counter[str]] = WeakKeyDictionary()
        """Of each checkpoint that keeps results, how many ops of a kind its forward ran that its recomputation has not."""
        self.beginning: Where = ("", None)
        self.waiting: dict[int, Leaf] = {}
        """Whose gradients wait for the rest of a leaf module."""
        late = frozenset[int]().union(*(self.visits.within[where] for where in how.leaves & self.visits.within.keys()))
        for i, weight in enumerate(run.weights.values()):
            if isinstance(weight.node, Leaf):
                self._hook(i, weight.node, late=i in late)

    # --- parameters

    def _begins(self, visit: Visit, forward: bool) -> None:
        self.beginning = visit.where
        self.coordinator.fetch(visit.where, visit.parameters, forward)

    def _ends(self, visit: Visit, forward: bool) -> None:
        if visit.is_leaf and not forward:
            self._reduce_leaf_module(visit)
        self.coordinator.release(visit.where, visit.parameters, forward, is_leaf=visit.is_leaf)

    def _launch(self, gathered: Gathered) -> Handle | None:
        """all_gather_coalesced: parameters of each group of ranks by themselves."""
        experts = tuple(i for i in gathered.parameters if i in self.how.experts)
        handle = Handle()
        self._gather(tuple(i for i in gathered.parameters if i not in self.how.experts), handle)
        self._gather(experts, handle)
        return handle if handle.buffers else None

    def _gather(self, parameters: tuple[int, ...], handle: Handle) -> None:
        if not parameters:
            return
        elements = sum(self._padded(i) for i in parameters)
        self._send("all_gather", self.run.memory.phase, parameters[0], elements)
        if self._ranks(parameters[0]) == 1:
            return
        self._run("all_gather")
        if len(parameters) == 1:
            (i,) = parameters
            self._run("slice")
            self._run("view")
            self.whole[i] = self._block("gathered parameters", elements, layer=self._layer_of(i))
        else:
            self._run("cat into a buffer")
            self._run("slice", self._ranks(parameters[0]))
            name = "all-gather buffer of several parameters"
            handle.parameters += parameters
            handle.buffers.append(self._block(name, elements, layer=self._layer_of(parameters[0])))

    def _arrive(self, handle: Handle | None) -> None:
        """AllGatherCoalescedHandle.wait: the first that waits copies all of them out of the buffer."""
        if handle is None or handle.arrived:
            return
        handle.arrived = True
        for i in handle.parameters:
            own = self._padded(i) // self._ranks(i)
            self._run("slice", -(-self.sizes[i] // own))  # one of each rank that has any of it
            self._run("cat")
            self._run("view")
            self.whole[i] = self._block("gathered parameters", self.sizes[i], layer=self._layer_of(i))

    def _run(self, op: str, times: int = 1) -> None:
        """Selective checkpointing raises where a recomputation has more of an op than its forward had
        (torch/utils/checkpoint.py, _CachedTorchDispatchMode): what was fetched ahead of a layer is gathered within it."""
        within = self.run.memory.checkpoint
        frame = within.frame if isinstance(within, Recomputation) else within
        if not isinstance(frame, Checkpoint) or frame.context is None:
            return
        m = frame.args[0]
        if isinstance(m, Module) and (m.path, m.layer) == self.beginning:
            return  # the hooks of the layer itself are before its checkpoint
        more = self.more_in_forward.setdefault(frame, Counter())
        more[op] += times if frame is within else -times
        if more[op] < 0:
            refuse("recompute", "op", f"{GATHERS_AGAIN}; allowed: none, full, or --engine fsdp2")

    def _free(self, i: int) -> None:
        self.whole.pop(i, None)

    def _ranks(self, i: int) -> int:
        return self.how.expert_ranks if i in self.how.experts else self.how.ranks

    def _padded(self, i: int) -> int:
        ranks = self._ranks(i)
        return -(-self.sizes[i] // ranks) * ranks

    def _send(self, kind: Kind, phase: str, parameter: int, elements: int) -> None:
        axis = EXPERTS if parameter in self.how.experts else "dp"
        shape = (Dim("elements", elements),)
        dtype = self.how.sent if kind == "reduce_scatter" else self.how.dtype
        self.run.memory.sent.append(Sent(axis, kind, "", phase, None, shape, dtype))

    # --- gradients

    def _hook(self, i: int, leaf: Leaf, *, late: bool) -> None:
        def ready(gradient: Tensor) -> None:
            self.run.memory.relabel(gradient.storage, leaf.shape, "gathered", "gradient not reduced yet", None)
            if late:
                self.waiting[i] = leaf
            else:
                leaf.grad = None
                self._reduce(i, gradient)

        leaf.ready = ready

    def _reduce_leaf_module(self, visit: Visit) -> None:
        """reduce_leaf_module_grads: one by one, when the gradient of what the module was given is there."""
        for i in sorted(visit.parameters & self.waiting.keys()):
            leaf = self.waiting.pop(i)
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            self._reduce(i, gradient)

    def _reduce(self, i: int, gradient: Tensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: a gradient moves into the bucket, if it fits."""
        size = self.sizes[i]
        if self.bucket and (self.bucket[0][0] in self.how.experts) != (i in self.how.experts):
            self._flush()
        if self.in_bucket and self.in_bucket + size > self.how.bucket:
            self._flush()
        fits = self.in_bucket + size <= self.how.bucket
        self.bucket.append((i, None if fits else gradient))
        self.in_bucket += size

    def _flush(self) -> None:
        """__avg_scatter_grads: a copy in the order of the ranks, padded; one that needs no padding is taken as it is. What is
        summed over fewer ranks than dp is scaled."""
        elements = sum(self._padded(i) for i, _ in self.bucket)
        self._send("reduce_scatter", "backward", self.bucket[0][0], elements)
        casts = self.how.sent is not self.how.dtype
        _casts = [
            self._of_sent("gradient in the dtype that is sent", self.sizes[i])
            for i, g in self.bucket
            if casts and g is not None
        ]
        _copy = self._copied(elements)
        if casts:
            own = [self._padded(i) // self._ranks(i) for i, _ in self.bucket]
            _parts = [self._block("reduced gradients in their own dtype", n) for n in own]
        if self.bucket[0][0] in self.how.experts:
            ranks = self.how.expert_ranks
            parts = sum(-(-self.sizes[i] // ranks) for i, _ in self.bucket)
            _scaled = self._block("gradients of experts, averaged over dp", parts)
        self.bucket.clear()
        self.in_bucket = 0

    def _copied(self, elements: int) -> Tensor | None:
        """reduce_scatter_coalesced: what is sent, where it is a copy."""
        if len(self.bucket) == 1 and elements == self.in_bucket:
            return None
        padding = elements - self.in_bucket
        _pads = self._of_sent("padding of the bucket", padding) if padding else None
        return self._of_sent("copy of the bucket that is reduced", elements)

    def _of_sent(self, name: str, elements: int) -> Tensor:
        return self._block(name, elements, self.how.sent)

    def _block(self, name: str, elements: int, dtype: DType | None = None, layer: int | None = None) -> Tensor:
        memory = self.run.memory
        before = memory.layer, memory.scope
        memory.layer, memory.scope = layer, ""
        try:
            return new_tensor(memory, (Dim("elements", elements),), dtype or self.how.dtype, name, component="gathered")
        finally:
            memory.layer, memory.scope = before

    def _layer_of(self, i: int) -> int | None:
        """The layer that a gathered parameter counts as: none, as no two of them need have the same around them."""
        return None

    def backward_is_over(self) -> None:
        if self.bucket:
            self._flush()
        self.coordinator.release_leftovers()
        self.whole.clear()


class UntracedStep(Step):
    """Without buckets, whose copies a later step makes all the same: they end in the middle of layers."""

    def __init__(self, how: ZeRO3, run: Run) -> None:
        self.layers = [layer for _, layer in run.weights]
        super().__init__(how, run, ())

    def _layer_of(self, i: int) -> int | None:
        return self.layers[i]

    def _reduce(self, i: int, gradient: Tensor) -> None:
        """It is copied into the bucket."""
