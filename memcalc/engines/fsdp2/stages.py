"""FSDP2 around the stages of a pipeline: gradients stay whole until the last micro-batch.

A stage tells its units not to reduce and not to reshard after a backward (backward_maybe_with_nosync in
torch/distributed/pipelining/stage.py), and reduces them all when the step's last backward is done
(perform_reduce_grad). Until then the gradients of every micro-batch are added up unsharded, in the dtype that they are
reduced in (FSDPParam.to_accumulated_grad_if_needed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.core.ops.elementwise import recording
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.engines.fsdp2.step import Sharding, Step, Unit

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.core.autograd import Leaf
    from memcalc.core.tensor import Storage
    from memcalc.families.base.module import Run


class WaitingUnit(Unit):
    """A unit whose gradients are added up until the step's last backward is done."""

    __slots__ = ("added_up",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.added_up: dict[Leaf, Tensor] = {}

    def accumulate(self) -> None:
        """Run post_backward without a reduction."""
        self.add()
        self.begin_sums()

    def add(self) -> None:
        """Add backward's gradients to existing sums (accumulate_unsharded_grad_if_needed)."""
        for leaf in self.added_up:
            leaf.grad = None

    def begin_sums(self) -> None:
        """Make sums of the gradients without one, in the dtype that they are reduced in
        (to_accumulated_grad_if_needed)."""
        if self.sharding.reduced is self.run.dtype:
            return  # autograd adds to the parameters' own
        for leaf in self.leaves:
            if leaf.grad is not None:
                unsharded_grad, leaf.grad = leaf.grad, None
                self.added_up[leaf] = self._whole_gradient(leaf, unsharded_grad)
                del unsharded_grad

    def take_gradients(self) -> list[Tensor]:
        if not self.added_up:
            return super().take_gradients()
        self.add()
        parallel = self.run.tensor_parallel
        gradients: list[Tensor] = []
        for leaf in list(self.added_up):
            added_up = self.added_up.pop(leaf)
            gradients.append(added_up if parallel is None else parallel.own_part(leaf, added_up))
        return gradients

    def _whole_gradient(self, leaf: Leaf, grad: Tensor) -> Tensor:
        memory = self.run.memory
        layer, scope = memory.layer, memory.scope
        memory.layer, memory.scope = self.layer, ""
        try:
            name = f"{leaf.scope}: added up, unsharded"
            return new_tensor(memory, grad.shape, self.sharding.reduced, name, component="gradients")
        finally:
            memory.layer, memory.scope = layer, scope


class StageStep(Step):
    """The hooks of all micro-batches of one stage."""

    Unit = WaitingUnit

    def __init__(self, sharding: Sharding, run: Run) -> None:
        super().__init__(sharding, run)
        self.unsharding = False
        """True while an UNSHARD has not been waited for."""
        self.waiting = [unit for unit in self.units.values() if isinstance(unit, WaitingUnit)]

    def before_stage(self, given: Tensor) -> Tensor:
        """Run the root's hooks around the input of a stage."""
        self.last = None
        self.before_forward()
        if not self.root.leaves or not recording(given):
            return given
        return self._before_backward_ends(self.root, (given,))[0]

    def before_stage_of_several(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the root's hooks around a stage's several inputs."""
        self.last = None
        self.before_forward()
        if not self.root.leaves:
            return given
        return tuple(self._before_backward_ends(self.root, given))

    def after_backward(self) -> None:
        for unit in self.waiting:
            if unit not in self.reduced:
                unit.accumulate()
        self.reduced.clear()

    def _reduce(self, unit: Unit) -> None:
        self.reduced.add(unit)
        assert isinstance(unit, WaitingUnit)
        unit.accumulate()

    def reduce_all(self) -> None:
        """Reduce unit after unit, the root's first (perform_reduce_grad)."""
        for unit in self._one_by_one():
            output = unit.reduce(self.reduce_scatter_inputs)
            if output is not None:
                self.gradients.append(output)
        for unit in self.units.values():
            unit.all_reduced = None
            unit.gathering = None  # a frozen layer was gathered for nothing (finalize_backward)
        self.reduce_scatter_inputs.clear()

    def unshard_all(self) -> None:
        """Run an UNSHARD of the runtime: gather all units without waiting."""
        for unit in self._one_by_one():
            unit.unshard()
        self.unsharding = True

    def wait_for_all(self) -> None:
        """Wait for all units, as the first action after an UNSHARD does (_assert_unsharded)."""
        if self.unsharding:
            for unit in self._one_by_one():
                unit.wait_for_unshard()
        self.unsharding = False

    def reshard_all(self) -> None:
        """Run a RESHARD of the runtime."""
        for unit in self._one_by_one():
            unit.whole = None

    def held(self) -> tuple[list[Storage | None], Hashable]:
        """Return the blocks that the hooks hold between the actions of a schedule, None in a place without one, and what else
        decides what the next action does."""
        held: list[Tensor | None] = [self.copied_out]
        for unit in self.units.values():
            held += [unit.gathering, unit.all_reduced, *(unit.whole or [None] * len(unit.weights))]
            held += [leaf.grad for leaf in unit.leaves]
            if isinstance(unit, WaitingUnit):
                held += [unit.added_up.get(leaf) for leaf in unit.leaves]
        held += [*self.reduce_scatter_inputs, None, *self.gradients]
        numbers: dict[Unit | None, int] = {unit: i for i, unit in enumerate(self.units.values())}
        rest = (
            self.unsharding,
            numbers.get(self.last),
            numbers.get(self.recomputed),
            tuple(sorted(numbers[unit] for unit in self.reduced)),
            tuple([numbers.get(unit.before) for unit in self.units.values()]),
            len(self.reduce_scatter_inputs),
            len(held),
        )
        return [None if one is None else one.storage for one in held], rest

    def _one_by_one(self) -> Iterator[Unit]:
        """Yield all units, each in its own segment of the log."""
        memory = self.run.memory
        for unit in self.units.values():
            memory.enter(memory.phase, unit.layer)
            yield unit
        memory.enter(memory.phase, None)
