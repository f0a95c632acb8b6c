"""FSDP1 over several micro-batches whose gradients stay whole until the last one: `FullyShardedDataParallel.no_sync()`.

accelerate accumulates like this, and with it HF Trainer. Autograd adds a micro-batch's flat gradient to the one that is
there, in the dtype that parameters are gathered in. FULL_SHARD frees flat parameters after every backward, SHARD_GRAD_OP
only after the last one (_should_free_in_backward in torch/distributed/fsdp/_runtime_utils.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import Dim
from memcalc.engines.fsdp1.step import Sharding, Step, Unit

if TYPE_CHECKING:
    from memcalc.families.base.module import Run


class NoSync(NamedTuple):
    """The hooks of a step's micro-batches that are run. Only the last micro-batch reduces."""

    sharding: Sharding
    micro_batches: int
    rank: int

    def start(self, run: Run) -> NoSyncStep:
        return NoSyncStep(self, run)


class NoSyncStep(Step):
    """The hooks of several forwards and backwards."""

    def __init__(self, how: NoSync, run: Run) -> None:
        super().__init__(how.sharding, run)
        self.rank = how.rank
        self.follow = how.micro_batches
        """The number of micro-batches after the running one."""

    def before_forward(self) -> None:
        self.follow -= 1
        self.last = None
        super().before_forward()

    def free_in_backward(self, unit: Unit) -> None:
        if self.sharding.reshards or not self.follow:
            unit.whole = None

    def reduce(self, unit: Unit, *, is_first: bool) -> None:
        if not self.follow:
            super().reduce(unit, is_first=is_first)
        elif is_first and self.sharding.original:
            self._show(unit)

    def _show(self, unit: Unit) -> None:
        """Make the parameters' gradients views of the flat one: each is first made like the parameter, which is a slice now
        (_use_unsharded_grad_views)."""
        sharded = self.sharding.sharded
        shapes = {weight.name: weight.shape for weight in unit.weights}
        for one in unit.flat.slices(self.rank):
            shape = shapes[one.name]
            is_as_it_was = len(shape) == 1 and shape[0].size == one.elements and sharded is self.run.dtype
            if not is_as_it_was:
                unit.allocate(Dim("elements on the rank", one.elements), "gradient of a slice", sharded, "gathered")
