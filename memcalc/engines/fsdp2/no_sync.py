"""FSDP2 over several micro-batches whose gradients stay whole until the last one: `set_requires_gradient_sync(False)`.

accelerate accumulates like this under FSDP2 (accelerator.py, `no_sync`), and with it HF Trainer, and so does Lightning
(fabric/strategies/model_parallel.py, `_FSDPNoSync`). Nothing is reduced before the last micro-batch's backward.
Parameters are still resharded after every backward (FSDPParamGroup.post_backward in
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.engines.fsdp2.stages import WaitingUnit
from memcalc.engines.fsdp2.step import ExpertUnit, Sharding, Step, Unit

if TYPE_CHECKING:
    from memcalc.core.dims import Dim
    from memcalc.families.base.module import Run
    from memcalc.tape.runs import Trace


class NoSync(NamedTuple):
    """The hooks of a step's micro-batches that are run. Only the last micro-batch reduces."""

    sharding: Sharding
    micro_batches: int

    def start(self, run: Run) -> NoSyncStep:
        return NoSyncStep(self.sharding, run, self.micro_batches)

    @property
    def alike(self) -> NoSync:
        """Return the hooks with the sharding's `alike`. Their run differs only in sizes."""
        return self._replace(sharding=self.sharding.alike)

    def resized(self, run: Trace) -> Trace:
        """Return the run of `alike` with the sizes of this sharding."""
        return self.sharding.resized(run)

    def sized(self, dim: Dim) -> Dim:
        """Return a dim of the run of `alike` as this sharding has it."""
        return self.sharding.sized(dim)


class WaitingExperts(WaitingUnit, ExpertUnit):
    """The experts of a rank in one layer, whose gradients wait."""

    __slots__ = ()


class NoSyncStep(Step):
    """The hooks of several forwards and backwards."""

    Unit = WaitingUnit
    ExpertUnit = WaitingExperts

    def __init__(self, sharding: Sharding, run: Run, micro_batches: int) -> None:
        super().__init__(sharding, run)
        self.follow = micro_batches
        """The number of micro-batches after the running one."""

    def before_forward(self) -> None:
        self.follow -= 1
        self.last = None
        self.reduced.clear()
        super().before_forward()

    def _reduce(self, unit: Unit) -> None:
        assert isinstance(unit, WaitingUnit)
        unit.add()
        if self.follow:
            self.reduced.add(unit)
            unit.whole = None
            unit.begin_sums()
            return
        sent = self.run.memory.sent
        before = len(sent)
        super()._reduce(unit)
        self.run.sent_once += sent[before:]
        del sent[before:]
