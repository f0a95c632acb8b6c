"""FSDP1 while a step runs: a unit's flat parameter is gathered before it is used, and its gradient reduced when it is whole.

A unit is a layer, or everything outside the layers (the root). Autograd sees the unit's parameters as views of its flat
parameter: their gradients wait until all of them are there, and are then copied into one flat gradient. Sources, all in
torch/distributed/fsdp: _runtime_utils.py (the hooks, _reduce_grad, _prefetch_handle), _flat_param.py (pre_unshard,
unshard, _use_unsharded_views); torch/csrc/autograd/FunctionsManual.cpp (split_with_sizes_backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.autograd import Leaf, Node, no_kernel
from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType
from memcalc.core.ops.elementwise import recording
from memcalc.core.tensor import Tensor, contiguous_strides, is_contiguous, new_tensor
from memcalc.engines.fsdp1.flat import ROOT, Flat, flat_of, stack_and_layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.families.base.module import Module, Run

GATHERED: Final = "unsharded flat parameter"
"""The name of the block that a unit's parameters are gathered in (_full_param_padded)."""
CAST: Final = "shard, cast to be gathered"
"""The name of the 16-bit copy of a shard (_mp_shard)."""
REDUCE_INPUT: Final = "flat gradient, cast to be reduced"
PADDED: Final = "flat gradient, padded to be reduced"
STREAMS: Final = {
    CAST: "pre-unshard",
    GATHERED: "unshard",
    REDUCE_INPUT: "post-backward",
    PADDED: "post-backward",
    "reduced gradients": "post-backward",
    "sharded gradients": "post-backward",
}
"""The stream of FSDP1 that a block is allocated on, by its name in the run (_init_streams)."""


class Sharding(NamedTuple):
    """The way in which a model is sharded; a run under FSDP1 depends on it."""

    ranks: int
    """The number of GPUs that one shard spans."""
    reshards: bool
    """True if a layer's flat parameter is freed when its forward is done (FULL_SHARD)."""
    sharded: DType
    """The dtype of the shards, and of the gradients that the optimizer sees."""
    reduced: DType
    """The dtype in which gradients are reduced."""
    accumulating: bool
    """True if an earlier micro-batch left gradients."""
    replicas: int = 1
    """The number of such groups of ranks whose gradient shards are all-reduced (hybrid sharding)."""
    over: str = "dp"
    """The divisor in the names of shards."""
    original: bool = True
    """True if the optimizer sees the original parameters (`use_orig_params`)."""
    backward_prefetch: str = "pre"
    """The time at which the unit of the next backward is gathered: "pre" (before a unit's own backward), "post" (once its
    own flat parameter is freed), "none"."""
    forward_prefetch: bool = False
    """True if the unit of the next forward is gathered before a unit's own forward."""

    def start(self, run: Run) -> Step:
        return Step(self, run)


class Unit:
    """A flat parameter, with what FSDP1 has allocated for it (FlatParamHandle)."""

    __slots__ = (
        "after",
        "before",
        "begun",
        "flat",
        "layer",
        "leaf",
        "name",
        "prefetched",
        "run",
        "sharding",
        "weights",
        "whole",
    )

    def __init__(self, sharding: Sharding, run: Run, layer: int | None, weights: Sequence[Tensor]) -> None:
        self.sharding, self.run, self.layer, self.weights = sharding, run, layer, weights
        self.name = "outside the layers" if layer is None else weights[0].name.split("*")[0] + "*"
        named = [(weight.name, weight.shape) for weight in weights]
        self.flat: Flat = flat_of(named, sharding.ranks, run.dtype.itemsize, original=sharding.original)
        self.leaf = Leaf(run.memory, f"{self.name}: flat gradient", (self._unpadded_dim(),), layer)
        self.whole: Tensor | None = None
        self.before: Unit | None = None
        """The unit whose forward was done before this unit's."""
        self.after: Unit | None = None
        """The unit whose forward begins after this unit's has begun."""
        self.begun = False
        """True once the unit's backward has begun (_ran_pre_backward_hook)."""
        self.prefetched = False
        """True if the unit has been gathered before its forward began."""

    def unshard(self) -> None:
        """Gather the flat parameter, unless it is there."""
        if self.whole is not None:
            return
        _mp_shard = self._shard(CAST, self.run.dtype) if self.run.dtype is not self.sharding.sharded else None
        self.whole = self.allocate(self._whole_dim(), GATHERED, self.run.dtype, "gathered")

    def begin(self) -> None:
        """Prepare a forward."""
        self.begun = False
        self.unshard()
        self._use_views()

    def _use_views(self) -> None:
        """Make the parameters views of the flat parameter that autograd tracks (_use_unsharded_views)."""
        memory, whole = self.run.memory, self.whole
        assert whole is not None
        parts = [(Dim("elements", part.elements),) for part in self.flat.parts]
        flat = Tensor(whole.storage, (self._unpadded_dim(),), (1,), whole.dtype, self.leaf)

        @no_kernel
        def split_with_sizes_backward(_: Node, grads: list[Tensor]) -> list[Tensor]:
            return [self._joined(grads, parts)]

        split = self._of_unit(Node(memory, split_with_sizes_backward, (flat,), outputs=len(parts)))
        weights = iter(self.weights)
        for i, part in enumerate(self.flat.parts):
            if part.name:
                view = Tensor(whole.storage, parts[i], (1,), whole.dtype, split, i)
                weight = next(weights)
                weight.node = self._of_unit(Node(memory, view_backward, (view,)))
                weight.output = 0

    def _of_unit(self, node: Node) -> Node:
        node.layer, node.scope = self.layer, self.name
        return node

    def _joined(self, grads: Sequence[Tensor | None], parts: Sequence[tuple[Dim]]) -> Tensor:
        """Return the flat gradient. Padding has no gradient: it gets zeros."""
        _zeros = [
            self.allocate(part[0], "zeros for padding", self.run.dtype, "gathered")
            for part, grad in zip(parts, grads, strict=True)
            if grad is None
        ]
        return self.allocate(self._unpadded_dim(), "flat gradient", self.run.dtype, "gathered")

    def reduce(self) -> Tensor:
        """Turn the flat gradient into a shard of the ranks' sum (_reduce_grad). The caller holds the gradient of this
        micro-batch."""
        _autograd_computed_grad, self.leaf.grad = self.leaf.grad, None
        sharding = self.sharding
        _unsharded_grad = _padded_unsharded_grad = None
        if sharding.reduced is not self.run.dtype:
            _unsharded_grad = self.allocate(self._unpadded_dim(), REDUCE_INPUT, sharding.reduced, "gathered")
        if self.flat.elements > self.flat.unpadded:
            _padded_unsharded_grad = self.allocate(self._whole_dim(), PADDED, sharding.reduced, "gathered")
        component = "gathered" if sharding.accumulating else "gradients"
        if sharding.reduced is sharding.sharded:
            return self._shard("sharded gradients", sharding.sharded, component)
        _low_prec_grad_data = self._shard("reduced gradients", sharding.reduced)
        return self._shard("sharded gradients", sharding.sharded, component)

    def _whole_dim(self) -> Dim:
        return Dim("unit", self.flat.elements)

    def _unpadded_dim(self) -> Dim:
        return Dim("unit", self.flat.unpadded)

    def _shard(self, name: str, dtype: DType, component: str = "gathered") -> Tensor:
        return self.allocate(Dim(f"unit/{self.sharding.over}", self.flat.shard), name, dtype, component)

    def allocate(self, dim: Dim, name: str, dtype: DType, component: str) -> Tensor:
        memory = self.run.memory
        layer, before = memory.layer, memory.scope
        memory.layer, memory.scope = self.layer, self.name
        try:
            return new_tensor(memory, (dim,), dtype, name, component=component)
        finally:
            memory.layer, memory.scope = layer, before


@no_kernel
def view_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Return the gradient of a parameter as a part of the flat one: a view if it is contiguous, else a copy."""
    grad, (flat, dtype) = grads[0], node.metadata[0]
    if not is_contiguous(grad):
        grad = new_tensor(grad.memory, flat, dtype, "gradient as a part of the flat one")
    return [Tensor(grad.storage, flat, contiguous_strides(flat), grad.dtype)]


class Step:
    """The hooks of one forward and backward."""

    def __init__(self, sharding: Sharding, run: Run) -> None:
        self.sharding = sharding
        self.run = run
        weights: dict[tuple[str, int | None], list[Tensor]] = {ROOT: []}
        for (name, layer), weight in run.weights.items():
            weights.setdefault(stack_and_layer(name, layer), []).append(weight)
        self.units = {key: Unit(sharding, run, key[1], own) for key, own in weights.items() if own}
        self.root = self.units[ROOT]
        self.last: Unit | None = None
        """The unit whose forward was done last."""
        self.gradients: list[Tensor] = []
        for unit, following in pairwise(self.units.values()):
            unit.after = following
        for unit in self.units.values():
            unit.leaf.ready = self._post_backward(unit)

    # --- called by a run

    def before_forward(self) -> None:
        self._before_forward(self.root)

    def layer(self, forward: Callable[..., Any], m: Module, *args: Any) -> Any:
        """Run a layer's forward, or its checkpoint, between its hooks. Its inputs keep their dtypes (cast_forward_inputs is
        off)."""
        unit = self.units[stack_and_layer(m.path, m.layer)]
        self._before_forward(unit)
        outputs = forward(m, *args)
        if self.sharding.reshards:
            unit.whole = None
        self._forward_is_done(unit)
        return self._before_backward_begins(unit, outputs)

    def after_forward(self, loss: Tensor) -> Tensor:
        self._forward_is_done(self.root)
        return self._before_backward_begins(self.root, loss)

    def after_backward(self) -> None:
        self.run.memory.enter("backward", None)

    def backward_is_over(self) -> None: ...

    # --- hooks

    def _before_forward(self, unit: Unit) -> None:
        """Gather a unit and, if asked, the next one, whose parameters autograd then tracks from here on
        (_pre_forward_unshard)."""
        if not unit.prefetched:
            unit.begin()
        unit.prefetched = False
        if self.sharding.forward_prefetch and unit.after is not None:
            unit.after.begin()
            unit.after.prefetched = True

    def _forward_is_done(self, unit: Unit) -> None:
        unit.before, self.last = self.last, unit

    def _before_backward_begins(self, unit: Unit, outputs: Any) -> Any:
        """Hook every output that requires a gradient: gather the flat parameter, and prefetch that of the unit before
        (_pre_backward_hook)."""

        @no_kernel
        def gathers_parameters(_: Node, grads: list[Tensor]) -> list[Tensor]:
            if not unit.begun:
                unit.begun = True
                unit.unshard()
                if self.sharding.backward_prefetch == "pre":
                    _prefetch(unit.before)
            return grads

        def hooked(output: Any) -> Any:
            if not isinstance(output, Tensor) or not recording(output):
                return output
            node = Node(output.memory, gathers_parameters, (output,))
            return Tensor(output.storage, output.shape, output.strides, output.dtype, node)

        return tuple(map(hooked, outputs)) if isinstance(outputs, tuple) else hooked(outputs)  # pyright: ignore[reportUnknownArgumentType]

    def free_in_backward(self, unit: Unit) -> None:
        """Free the flat parameter (_should_free_in_backward)."""
        unit.whole = None

    def reduce(self, unit: Unit, *, is_first: bool) -> None:
        """Reduce a unit's flat gradient. It is a sum unless it `is_first`."""
        output = unit.reduce()
        if not self.sharding.accumulating:
            self.gradients.append(output)

    def _post_backward(self, unit: Unit) -> Callable[[Tensor], None]:
        """Return the hook behind the flat gradient's accumulator (_post_backward_hook)."""

        def hook(gradient: Tensor) -> None:
            self.free_in_backward(unit)
            if self.sharding.backward_prefetch == "post":
                _prefetch(unit.before)
            self.reduce(unit, is_first=unit.leaf.grad is gradient)

        return hook


def _prefetch(unit: Unit | None) -> None:
    """Gather a unit whose backward has not begun (_get_handle_to_prefetch)."""
    if unit is not None and not unit.begun:
        unit.unshard()
