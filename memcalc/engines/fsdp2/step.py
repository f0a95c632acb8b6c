"""FSDP2 while a step runs: units are gathered before they are used, and reduced when their backward is done.

A unit is a layer, or everything outside the layers (the root): `fully_shard` over each layer, then over the model.
Under expert parallelism a layer's experts are a unit too, on the ranks that have the same experts (`fully_shard` over
them first, transformers/distributed/fsdp.py). Sources, all in torch/distributed/fsdp/_fully_shard: _fsdp_state.py (the
hooks), _fsdp_param_group.py (unshard, wait_for_unshard, post_backward, _backward_prefetch), _fsdp_collectives.py
(foreach_all_gather, foreach_reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.autograd import Leaf, Node, no_kernel
from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import DType
from memcalc.core.ops.elementwise import cast, recording
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.engines.fsdp2.sharded_part import shape_in_unit
from memcalc.engines.fsdp2.sizes import ShardedDim, resized, sized
from memcalc.families.base.module import Module, Run

if TYPE_CHECKING:
    from memcalc.tape.runs import Trace

GATHERED: Final = "all-gather result"
"""The name of the block that a unit's parameters are gathered in."""
REDUCED: Final = "reduce-scatter input"
"""The name of the block that a unit's gradients are reduced from."""
COPY_IN: Final = "all-gather copy-in"
STREAMS: Final = {
    "shard, cast to be gathered": COPY_IN,
    "all-gather result": COPY_IN,
    "reduced gradients": "reduce-scatter",
    "gradients, divided": "reduce-scatter",
    "sharded gradients": "reduce-scatter",
}
"""The stream of FSDP2 that a block is allocated on, by its name in the run (foreach_all_gather, foreach_reduce)."""


class ExpertUnits(NamedTuple):
    """The experts of a rank, which are units of their own."""

    path: str
    """The path of their module in a layer."""
    ranks: int
    """The number of GPUs that one shard of the experts spans."""


class Sharding(NamedTuple):
    """The way in which a model is sharded; a run under FSDP2 depends on it."""

    ranks: int
    """The number of GPUs that one shard spans."""
    reshards: bool
    """True if a layer's gathered parameters are freed when its forward is done (`reshard_after_forward`)."""
    sharded: DType
    """The dtype of the shards, and of the gradients that the optimizer sees."""
    reduced: DType
    """The dtype in which gradients are reduced."""
    accumulating: bool
    """True if an earlier micro-batch left gradients."""
    replicas: int = 1
    """The number of such groups of ranks whose gradient shards are all-reduced (hybrid sharding)."""
    experts: ExpertUnits | None = None
    """The units of experts; None if experts are in their layers' units."""
    over: str = "dp"
    """The divisor in the names of shards."""
    frozen: DType | None = None
    """The dtype of the shards of frozen weights; None: that of all others."""

    def start(self, run: Run) -> Step:
        return Step(self, run)

    @property
    def alike(self) -> Sharding:
        """Return the sharding with the fewest ranks among those whose runs differ only in sizes."""
        experts = self.experts and self.experts._replace(ranks=min(self.experts.ranks, 2))
        return self._replace(ranks=min(self.ranks, 2), replicas=min(self.replicas, 2), experts=experts)

    def resized(self, run: Trace) -> Trace:
        """Return the run of a similar sharding, with this one's sizes."""
        return resized(run, self.sized)

    def sized(self, dim: Dim) -> Dim:
        """Return a dim of a similar sharding as this one has it."""
        return sized(dim, self.ranks, self.experts.ranks if self.experts is not None else self.ranks)

    def unit_at(self, path: str, layer: int | None) -> tuple[str, int | None]:
        """Return the unit that a module or a weight at `path` is in: the path of its stack or of its experts, and its
        layer."""
        if self.experts is not None and f"{path}.".startswith(f"{self.experts.path}."):
            return self.experts.path, layer
        return _stack_and_layer(path, layer)


_ROOT: Final = ("", None)


def _stack_and_layer(path: str, layer: int | None) -> tuple[str, int | None]:
    """Return the layer that a path is in: its stack's path and its number."""
    return _ROOT if layer is None else (path.split("*")[0], layer)


class Unit:
    """Parameters that are gathered together, and whose gradients are reduced together (FSDPParamGroup)."""

    __slots__ = (
        "all_reduced",
        "before",
        "gathering",
        "layer",
        "leaves",
        "name",
        "run",
        "shapes",
        "sharding",
        "stored",
        "trained",
        "weights",
        "whole",
    )

    def __init__(self, sharding: Sharding, run: Run, layer: int | None, weights: Sequence[Tensor]) -> None:
        self.sharding, self.run, self.layer = sharding, run, layer
        self.name = "outside the layers" if layer is None else weights[0].name.split("*")[0] + "*"
        held = [(weight, shape_in_unit(run.packing_of(weight), weight.shape)) for weight in weights]
        self.weights = [(weight.name, shape) for weight, shape in held if shape is not None]
        self.shapes = [shape for _, shape in self.weights]
        self.stored = [self._stored(weight) for weight, shape in held if shape is not None]
        """For each weight the dtype of its shard. It is cast before it is gathered, if that is not the run's."""
        self.leaves = [weight.node for weight in weights if isinstance(weight.node, Leaf)]
        self.trained = [leaf.shape for leaf in self.leaves]
        self.gathering: Tensor | None = None
        """The result of an all-gather that nobody has waited for."""
        self.whole: list[Tensor] | None = None
        """The gathered parameters, each a separate block (FSDPParam.all_gather_outputs)."""
        self.all_reduced: Tensor | None = None
        """The tensor of the replicas' all-reduce. It is kept to the end of backward, so that no other block reuses its
        memory before."""
        self.before: Unit | None = None
        """The unit whose forward was done before this unit's."""

    def unshard(self) -> None:
        """Gather the parameters, unless that is done or under way (foreach_all_gather)."""
        if self.gathering is not None or self.whole is not None or self.sharding.ranks == 1:
            return
        shapes = [shape for shape, dtype in zip(self.shapes, self.stored, strict=True) if dtype is not self.run.dtype]
        if shapes:
            _inputs = self._shard("shard, cast to be gathered", self.run.dtype, shapes)
        self.gathering = self._block(GATHERED, self.run.dtype, self.shapes)

    def wait_for_unshard(self) -> Tensor | None:
        """Copy the parameters out of the all-gather's result, and return the result."""
        if self.whole is None:
            self.whole = self._copies()
        result, self.gathering = self.gathering, None
        return result

    def _copies(self) -> list[Tensor]:
        """Return the parameters as the model uses them.

        On one rank nothing is gathered: each shard is cast, then copied, and the last cast stays until all are done.
        """
        _all_gather_input: Tensor | None = None
        copies: list[Tensor] = []
        for (name, shape), stored in zip(self.weights, self.stored, strict=True):
            elements = self._dim("elements", [shape])
            if stored is not self.run.dtype and self.sharding.ranks == 1:
                _all_gather_input = self._of(name, elements, "shard, cast to be copied")
            copies.append(self._of(name, elements, "gathered parameters"))
        return copies

    def _stored(self, weight: Tensor) -> DType:
        """Return the dtype of a weight's shard."""
        trains = isinstance(weight.node, Leaf)
        return self.sharding.sharded if trains else self.sharding.frozen or self.sharding.sharded

    def _of(self, parameter: str, elements: Dim, name: str) -> Tensor:
        """Allocate a block of one parameter."""
        return self._allocate(elements, name, self.run.dtype, "gathered", scope=parameter)

    def reduce(self, inputs: list[Tensor]) -> Tensor | None:
        """Run post_backward: free the gathered parameters, and turn the gradients into a shard of their sum.

        `inputs` holds the input of the last reduce-scatter until the next one comes.
        """
        gradients = self.take_gradients()
        self.whole = None
        inputs.clear()
        if not gradients:
            return None
        inputs.append(self._block(REDUCED, self.sharding.reduced, self.trained))
        unsharded_grad = gradients[-1] if self.sharding.ranks > 1 else None  # foreach_reduce's loop variable
        gradients.clear()
        component = "gathered" if self.sharding.accumulating else "gradients"
        if self.sharding.reduced is self.sharding.sharded:
            reduced = output = self._shard("sharded gradients", self.sharding.sharded, self.trained, component)
            self.divide()
        else:
            reduced = self._shard("reduced gradients", self.sharding.reduced, self.trained)
            self.divide()
            output = self._shard("sharded gradients", self.sharding.sharded, self.trained, component)
        if self.sharding.replicas > 1:
            self.all_reduced = reduced
        del unsharded_grad
        return output

    def divide(self) -> None:
        """Divide the sum of the ranks' gradients. Nothing is allocated: the reduction itself computes the mean."""

    def take_gradients(self) -> list[Tensor]:
        """Return the gradients of the parameters, and release them from the parameters."""
        parallel = self.run.tensor_parallel
        gradients: list[Tensor] = []
        for leaf in self.leaves:
            if leaf.grad is not None:
                gradients.append(leaf.grad if parallel is None else parallel.own_part(leaf, leaf.grad))
                leaf.grad = None
        return gradients

    def _block(self, name: str, dtype: DType, shapes: list[Shape]) -> Tensor:
        return self._allocate(self._dim("unit", shapes), name, dtype, "gathered")

    def _shard(self, name: str, dtype: DType, shapes: list[Shape], component: str = "gathered") -> Tensor:
        part = self._dim(f"unit/{self.sharding.over}", shapes, is_shard=True)
        return self._allocate(part, name, dtype, component)

    def _dim(self, name: str, parameters: list[Shape], *, is_shard: bool = False) -> ShardedDim:
        return ShardedDim(
            name, parameters, self.sharding.ranks, is_shard=is_shard, experts=isinstance(self, ExpertUnit)
        )

    def _allocate(self, dim: Dim, name: str, dtype: DType, component: str, scope: str = "") -> Tensor:
        memory = self.run.memory
        layer, before = memory.layer, memory.scope
        memory.layer, memory.scope = self.layer, scope or self.name
        try:
            return new_tensor(memory, (dim,), dtype, name, component=component)
        finally:
            memory.layer, memory.scope = layer, before


class ExpertUnit(Unit):
    """The experts of a rank in one layer. Their gradients are divided by dp, which is not the number of ranks that
    reduced them."""

    __slots__ = ()

    def __init__(self, sharding: Sharding, run: Run, layer: int | None, weights: Sequence[Tensor]) -> None:
        assert sharding.experts is not None
        super().__init__(sharding._replace(ranks=sharding.experts.ranks, over="edp"), run, layer, weights)
        self.name = sharding.experts.path

    def divide(self) -> None:
        """Divide the gradients. Over one rank that is done out of place (gradient_divide_factor in foreach_reduce)."""
        if self.sharding.ranks == 1:
            _quotient = self._block("gradients, divided", self.sharding.reduced, self.trained)


class Step:
    """The hooks of one forward and backward (FSDPState)."""

    Unit: type[Unit] = Unit
    ExpertUnit: type[ExpertUnit] = ExpertUnit

    def __init__(self, sharding: Sharding, run: Run) -> None:
        self.sharding = sharding
        self.run = run
        run.buffer_dtype = sharding.frozen or sharding.sharded
        weights: dict[tuple[str, int | None], list[Tensor]] = {_ROOT: []}
        for (name, layer), weight in run.weights.items():
            weights.setdefault(sharding.unit_at(name, layer), []).append(weight)
        self.units = {key: self._kind(key[0])(sharding, run, key[1], own) for key, own in weights.items()}
        self.root = self.units[_ROOT]
        self.last: Unit | None = None
        """The unit whose forward was done last."""
        self.copied_out: Tensor | None = None
        """The last all-gather's result, kept in forward so that the next one does not overwrite it."""
        self.recomputed: Unit | None = None
        """The experts in a recomputed layer. FSDP2 takes their forward for one of a whole model (iter_forward_root)."""
        self.reduce_scatter_inputs: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.reduced: set[Unit] = set()

    def _kind(self, path: str) -> type[Unit]:
        experts = self.sharding.experts
        return self.ExpertUnit if experts is not None and path == experts.path else self.Unit

    # --- called by a run

    def before_forward(self) -> None:
        self._before_forward(self.root)

    def layer(self, forward: Callable[..., Any], m: Module, *args: Any) -> Any:
        """Run the forward of a layer or of its experts between its hooks.

        A recomputation runs the layer's forward again, and finds its parameters gathered. The experts' hooks are inside
        it.
        """
        args = self._cast(args)
        unit = self.units[self.sharding.unit_at(m.path, m.layer)]
        self._before_forward(unit)
        outputs = forward(m, *self._before_backward_ends(unit, args))
        if self.run.memory.phase == "forward":  # FSDPParamGroup.post_forward
            if self.sharding.reshards:
                unit.whole = None
            self._forward_is_done(unit)
        elif self.recomputed is unit:
            self.recomputed = self.copied_out = None
        return self._before_backward_begins(unit, outputs)

    def after_forward(self, loss: Tensor) -> Tensor:
        self._forward_is_done(self.root)
        loss = self._before_backward_begins(self.root, loss)
        self.copied_out = None
        return loss

    def after_backward(self) -> None:
        """Reduce the gradients of the root, and of layers whose input requires no gradient
        (_root_post_backward_final_callback)."""
        self.run.memory.enter("backward", None)
        for unit in self.units.values():
            if unit not in self.reduced:
                self._reduce(unit)
            unit.all_reduced = None
            unit.gathering = None  # the layer before the last one to run was gathered for nothing (finalize_backward)
        self.reduce_scatter_inputs.clear()

    def backward_is_over(self) -> None: ...

    # --- hooks

    def _cast(self, given: Any) -> Any:
        """Cast a layer's inputs to the dtype of its gathered parameters, if there is a policy
        (_cast_forward_inputs)."""
        if self.run.dtype is self.sharding.sharded:
            return given
        if isinstance(given, tuple):
            return tuple(self._cast(one) for one in given)  # pyright: ignore[reportUnknownVariableType]
        is_float = isinstance(given, Tensor) and given.dtype.is_floating_point
        return cast(given, self.run.dtype, "cast for the layer") if is_float else given

    def _before_forward(self, unit: Unit) -> None:
        if unit.whole is not None:
            return
        if self.run.memory.phase == "backward":
            self.recomputed = unit
        unit.unshard()
        _prev_all_gather_state = self.copied_out  # a variable of wait_for_unshard, until that returns
        self.copied_out = unit.wait_for_unshard()

    def _forward_is_done(self, unit: Unit) -> None:
        unit.before, self.last = self.last, unit

    def _before_backward_begins(self, unit: Unit, outputs: Any) -> Any:
        """Hook every output that requires a gradient: gather the parameters for the backward, and prefetch those of the
        next one."""

        @no_kernel
        def gathers_parameters(_: Node, grads: list[Tensor]) -> list[Tensor]:
            if unit not in self.reduced:
                unit.unshard()
                unit.wait_for_unshard()
                if unit.before is not None:
                    unit.before.unshard()
            return grads

        def hooked(output: Any) -> Any:
            if not isinstance(output, Tensor) or not recording(output):
                return output
            return _like(output, Node(output.memory, gathers_parameters, (output,)))

        return tuple(map(hooked, outputs)) if isinstance(outputs, tuple) else hooked(outputs)  # pyright: ignore[reportUnknownArgumentType]

    def _before_backward_ends(self, unit: Unit, args: tuple[Any, ...]) -> list[Any]:
        """Hook the inputs: the hook runs when the gradients of all inputs have come (RegisterPostBackwardFunction)."""

        @no_kernel
        def reduces_gradients(_: Node, grads: list[Tensor]) -> list[Tensor]:
            self._reduce(unit)
            return grads

        inputs = [arg for arg in args if isinstance(arg, Tensor) and recording(arg)]
        if not inputs:
            return list(args)
        node = Node(self.run.memory, reduces_gradients, inputs, outputs=len(inputs))
        outputs = iter([_like(tensor, node, i) for i, tensor in enumerate(inputs)])
        return [next(outputs) if any(arg is tensor for tensor in inputs) else arg for arg in args]

    def _reduce(self, unit: Unit) -> None:
        self.reduced.add(unit)
        output = unit.reduce(self.reduce_scatter_inputs)
        if output is not None and not self.sharding.accumulating:
            self.gradients.append(output)


def _like(tensor: Tensor, node: Node, output: int = 0) -> Tensor:
    return Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype, node, output)
