"""ZeRO-3 while a step runs: modules gather their parameters, and gradients are reduce-scattered bucket by bucket.

Sources, all in deepspeed/runtime/zero: parameter_offload.py (the hooks), partitioned_param_coordinator.py (the times of
gathers, prefetches and releases), partition_parameters.py (an all-gather of several parameters has a flat buffer, from
which each is copied), stage3.py (the bucket), ../comm/coalesced_collectives.py (a reduce-scatter sends a copy).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType
from memcalc.core.noted import Begins, Ends, Event, Holds, LetsGo, Noted, Over, Ready, Visited
from memcalc.core.tensor import Sent
from memcalc.engines.deepspeed.zero3_coordinator import Coordinator, Gathered, Handle, Order, Thresholds
from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.layout.collectives import Kind
    from memcalc.tape.rewritten import Out


EXPERTS: Final = "experts' dp"
"""The axis under which a run records collectives of the ranks that have the same experts."""


GATHERS_AGAIN: Final = "DeepSpeed's ZeRO-3 gathers more in a layer's recomputation than in its forward, and torch fails"


_MODEL: Final = ("", None)
"""The place of the whole model."""


def alike_ranks(sizes: Sequence[int], ranks: int) -> int:
    """Return the fewest ranks whose step allocates the same as a step over `ranks`. Numbers that divide all sizes are
    alike.

    Parameters are gathered whole, and gradients are sent whole, so the number of ranks shows only in their padding. It
    also shows where a share of a bucket is allocated (gradients reduced in another dtype, experts), and where a
    recomputation counts ops.
    """
    together = gcd(*sizes)
    if ranks == 1 or together % ranks:
        return ranks
    return next(fewer for fewer in range(2, ranks + 1) if not together % fewer)


class Persistent(NamedTuple):
    """A parameter that is whole from the end of a step to the end of the next one, where its block is replaced."""

    parameter: int
    elements: int


class ZeRO3(NamedTuple):
    """ZeRO-3 while forward and backward run."""

    ranks: int
    dtype: DType
    thresholds: Thresholds
    bucket: int
    sent: DType
    """The dtype in which gradients are reduced."""
    experts: frozenset[int] = frozenset()
    """The parameters that are sharded over the ranks with the same experts, by their place in definition order."""
    expert_ranks: int = 1
    frozen: frozenset[int] = frozenset()
    """The parameters that require no gradient, by their place in definition order."""
    leaves_codes: bool = False
    """True if the graph keeps gathered codes as long as the loss is alive (`memcalc.engines.deepspeed.zero3_codes`)."""

    def play(self, noted: Noted, out: Out) -> None:
        """Gather and reduce. The order of modules is known from a previous step."""
        order = [event.visited for event in noted.events if isinstance(event, Begins)]
        if self.leaves_codes:
            from memcalc.engines.deepspeed.zero3_codes import play_with_codes

            play_with_codes(self, lambda to: Step(self, noted, order, to), out)
        else:
            play(Step(self, noted, order, out))


class Untraced(NamedTuple):
    """ZeRO-3 in the very first micro-batch, when the order of modules is not known yet. Modules gather one by one, and
    keep nothing (reset_step and release_sub_module in partitioned_param_coordinator.py)."""

    how: ZeRO3

    def play(self, noted: Noted, out: Out) -> None:
        """Gather the parameters of each module."""
        thresholds = self.how.thresholds._replace(max_reuse=0, persistence=0, prefetch=0)
        play(UntracedStep(self.how._replace(thresholds=thresholds), noted, (), out))


def play(step: Step) -> None:
    """Play a step from its first event to its last."""
    reach, act = step.out.reach, step.acts()
    for event in step.noted.events:
        reach(event.place)
        act[type(event)](event)


class Step:
    """One forward and backward."""

    def __init__(self, how: ZeRO3, noted: Noted, order: Order, out: Out) -> None:
        self.how, self.noted, self.out = how, noted, out
        self.whole: dict[int, object] = {}
        self.held_by_graph: dict[int, object] = {}
        """The blocks that the graph also refers to, by the number of the reference."""
        self.now: Begins | Ends | Ready | None = None
        self.sent = 0
        """The number of collectives that the run itself has sent."""
        self.sizes = noted.elements
        self.coordinator = Coordinator(
            self.sizes, order, how.thresholds, self._launch, self._arrive, self._free, how.frozen
        )
        self.bucket: list[tuple[int, object]] = []
        self.in_bucket = 0
        self.more_in_forward: dict[int, Counter[str]] = {}
        """The ops of each kind that the forward of a checkpoint has run and its recomputation has not, by
        checkpoint."""
        self.waiting: dict[int, object] = {}
        """The gradients that wait for the rest of a leaf module."""
        self.left_behind: list[object] = []
        """The blocks that the graph of the step before refers to, until forward has made a new loss."""
        modules = (event.visited for event in noted.events if isinstance(event, Begins))
        self.late = frozenset[int]().union(*(visited.within for visited in modules if visited.is_leaf))

    def acts(self) -> Mapping[type[Event], Callable[[Any], None]]:
        """Return what is done at each kind of event."""
        return {
            Begins: self.begins,
            Ends: self.ends,
            Ready: self.ready,
            Holds: self.holds,
            LetsGo: self.lets_go,
            Over: self.backward_is_over,
        }

    # --- parameters

    def begins(self, event: Begins) -> None:
        self.now, self.sent = event, event.sent
        recomputing = event.forward and event.phase == "backward"
        visited = event.visited
        self.coordinator.fetch(visited.where, visited.parameters, event.forward, recomputing=recomputing)

    def ends(self, event: Ends) -> None:
        self.now, self.sent = event, event.sent
        visited = event.visited
        if visited.is_leaf and not event.forward:
            self._reduce_leaf_module(visited)
        self.coordinator.release(visited.where, visited.parameters, event.forward, is_leaf=visited.is_leaf)
        if event.forward and visited.where == _MODEL:
            self.left_behind.clear()

    def holds(self, event: Holds) -> None:
        if event.parameter in self.whole:
            self.held_by_graph[event.number] = self.whole[event.parameter]
        elif self.how.leaves_codes and event.parameter in self.coordinator.persistent:
            self.held_by_graph[event.number] = Persistent(event.parameter, self._padded(event.parameter))

    def lets_go(self, event: LetsGo) -> None:
        self.held_by_graph.pop(event.number, None)

    def _launch(self, gathered: Gathered) -> Mapping[int, Handle | None]:
        """Begin an all-gather of the parameters of each group of ranks (all_gather_coalesced); return the handle of each."""
        handle, experts = Handle(), self.how.experts
        self._gather(tuple([i for i in gathered.parameters if i not in experts]), handle)
        if experts:
            self._gather(tuple([i for i in gathered.parameters if i in experts]), handle)
        return dict.fromkeys(gathered.parameters, handle if handle.buffers else None)

    def _gather(self, parameters: tuple[int, ...], handle: Handle) -> None:
        if not parameters:
            return
        elements = sum([self._padded(i) for i in parameters])
        if self.out.takes_sent:
            self._send("all_gather", self._phase(), parameters[0], elements)
        if self._ranks(parameters[0]) == 1:
            return
        self._run("all_gather")
        if len(parameters) == 1:
            (i,) = parameters
            self._run("slice")
            self._run("view")
            self.whole[i] = self._block("gathered parameters", elements)
        else:
            self._run("cat into a buffer")
            self._run("slice", self._ranks(parameters[0]))
            name = "all-gather buffer of several parameters"
            handle.parameters += parameters
            handle.buffers.append(self._block(name, elements))

    def _arrive(self, handle: Handle | None) -> None:
        """Wait for an all-gather: the first to wait copies all parameters out of the buffer
        (AllGatherCoalescedHandle.wait)."""
        if handle is None or handle.arrived:
            return
        handle.arrived = True
        for i in handle.parameters:
            own = self._padded(i) // self._ranks(i)
            self._run("slice", -(-self.sizes[i] // own))  # one of each rank that has a part of it
            self._run("cat")
            self._run("view")
            self.whole[i] = self._block("gathered parameters", self.sizes[i])

    def _run(self, op: str, times: int = 1) -> None:
        """Count an op of a selective checkpoint. torch raises if a recomputation runs more of an op than its forward
        did (torch/utils/checkpoint.py, _CachedTorchDispatchMode): parameters that were fetched ahead of a layer are
        gathered within its recomputation."""
        now = self.now
        if not isinstance(now, Begins) or now.within is None or now.within.module == now.visited.where:
            return  # the hooks of the layer itself are before its checkpoint
        within = now.within
        more = self.more_in_forward.setdefault(within.number, Counter())
        more[op] += -times if within.again else times
        if more[op] < 0:
            refuse("recompute", "op", f"{GATHERS_AGAIN}; allowed: none, full, or --engine fsdp2")

    def _free(self, i: int) -> None:
        self.whole.pop(i, None)

    def _ranks(self, i: int) -> int:
        return self.how.expert_ranks if i in self.how.experts else self.how.ranks

    def _padded(self, i: int) -> int:
        ranks = self._ranks(i)
        return -(-self.sizes[i] // ranks) * ranks

    def _phase(self) -> Literal["forward", "backward"]:
        return self.now.phase if isinstance(self.now, Begins) else "backward"

    def _send(self, kind: Kind, phase: str, parameter: int, elements: int) -> None:
        axis = EXPERTS if parameter in self.how.experts else "dp"
        shape = (Dim("elements", elements),)
        dtype = self.how.sent if kind == "reduce_scatter" else self.how.dtype
        self.out.send(Sent(axis, kind, "", phase, None, shape, dtype), self.sent)

    # --- gradients

    def ready(self, event: Ready) -> None:
        self.now, self.sent = event, event.sent
        self.out.reach(event.after)
        gradient = self.out.block_of_run(event.block)
        if event.parameter in self.late:
            self.waiting[event.parameter] = gradient
        else:
            self._reduce(event.parameter, gradient)

    def _reduce_leaf_module(self, visited: Visited) -> None:
        """Reduce a leaf module's gradients one by one, when the gradient of its input is there
        (reduce_leaf_module_grads)."""
        for i in sorted(visited.parameters & self.waiting.keys()):
            self._reduce(i, self.waiting.pop(i))

    def _reduce(self, i: int, gradient: object) -> None:
        """Move a gradient into the bucket if it fits (reduce_independent_p_g_buckets_and_remove_grads)."""
        size = self.sizes[i]
        if self.bucket and (self.bucket[0][0] in self.how.experts) != (i in self.how.experts):
            self._flush()
        if self.in_bucket and self.in_bucket + size > self.how.bucket:
            self._flush()
        fits = self.in_bucket + size <= self.how.bucket
        self.bucket.append((i, None if fits else gradient))
        self.in_bucket += size

    def _flush(self) -> None:
        """Reduce the bucket (__avg_scatter_grads): a padded copy in the order of the ranks; without padding the
        gradient itself. Sums over fewer ranks than dp are scaled."""
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
        self.keep_own()
        self.bucket.clear()
        self.in_bucket = 0

    def keep_own(self) -> None:
        """Do what comes after a bucket's reduction with the rank's own parts: nothing, they have their places."""

    def ends_backward(self) -> None:
        """Do what comes when backward is over."""

    def _copied(self, elements: int) -> object:
        """Return the copy that is sent; None if the gradient itself is (reduce_scatter_coalesced)."""
        if len(self.bucket) == 1 and elements == self.in_bucket:
            return None
        padding = elements - self.in_bucket
        _pads = self._of_sent("padding of the bucket", padding) if padding else None
        return self._of_sent("copy of the bucket that is reduced", elements)

    def _of_sent(self, name: str, elements: int) -> object:
        return self._block(name, elements, self.how.sent)

    def _block(self, name: str, elements: int, dtype: DType | None = None) -> object:
        return self.out.block(name, "elements", elements, dtype or self.how.dtype)

    def backward_is_over(self, event: Over) -> None:
        self.sent = event.sent
        if self.bucket:
            self._flush()
        self.ends_backward()
        self.coordinator.release_leftovers()
        self.whole.clear()


class UntracedStep(Step):
    """A step without buckets: a later step makes the copies into a bucket even so."""

    def _reduce(self, i: int, gradient: object) -> None:
        """Do nothing: the gradient is copied into the bucket."""
