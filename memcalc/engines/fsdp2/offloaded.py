"""FSDP2 with `CPUOffloadPolicy(pin_memory=True)`: shards, their gradients and the optimizer are on the host.

Before each all-gather the shards of a unit are copied to the GPU one by one, and each is cast there. A reduced gradient's shard
is copied to pinned memory when it is there. The optimizer's tensors are the host's, so its step runs on the CPU. Sources, all in
torch/distributed/fsdp/_fully_shard: _fsdp_param.py (_init_sharded_param, all_gather_inputs), _fsdp_param_group.py
(wait_for_unshard), _fsdp_collectives.py (foreach_all_gather, foreach_reduce).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from memcalc.core.dims import numel
from memcalc.core.dtypes import DType, fp32
from memcalc.engines.base.holdings import ENOUGH_MICRO_BATCHES, Holdings, input_rows
from memcalc.engines.fsdp2.backward_units import elements_of_blocks
from memcalc.engines.fsdp2.engine import scale_rows, states_and_step
from memcalc.engines.fsdp2.no_sync import NoSyncStep
from memcalc.engines.fsdp2.sharded_part import frozen_dtype, shape_in_unit, sharded_dtype
from memcalc.engines.fsdp2.stages import WaitingUnit
from memcalc.engines.fsdp2.step import GATHERED, Sharding, Step, Unit
from memcalc.offload.host import HostRow
from memcalc.offload.transfers import Transfer

if TYPE_CHECKING:
    from memcalc.core.dims import Dim
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Run, Weight
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.tape.runs import Trace

_COPIED: Final = "shard, copied from the host"
_PARAM: Final = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py"
_COLLECTIVES: Final = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
_ADAM: Final = "torch/optim/adam.py"


class UnitFromHost(Unit):
    """A unit whose shards are on the host."""

    __slots__ = ()

    def unshard(self) -> None:
        if self.gathering is not None or self.whole is not None or self.sharding.ranks == 1:
            return
        _inputs = [
            self._from_host(name, self._dim(f"shape/{self.sharding.over}", [shape], is_shard=True), stored)
            for (name, shape), stored in zip(self.weights, self.stored, strict=True)
        ]
        self.gathering = self._block(GATHERED, self.run.dtype, self.shapes)

    def _copies(self) -> list[Tensor]:
        """Return the parameters of one rank: each comes from the host, is cast, then copied. The last cast stays until all
        are done."""
        if self.sharding.ranks > 1:
            return super()._copies()
        _all_gather_input: Tensor | None = None
        copies: list[Tensor] = []
        for (name, shape), stored in zip(self.weights, self.stored, strict=True):
            elements = self._dim("elements", [shape])
            _all_gather_input = self._from_host(name, elements, stored)
            copies.append(self._of(name, elements, "gathered parameters"))
        return copies

    def _from_host(self, parameter: str, elements: Dim, stored: DType) -> Tensor:
        """Return a shard, kept in the dtype `stored`, on the GPU in the dtype that is gathered."""
        copied = self._allocate(elements, _COPIED, stored, "gathered", scope=parameter)
        if self.run.dtype is stored:
            return copied
        return self._of(parameter, elements, "shard, cast to be gathered")


class WaitingUnitFromHost(UnitFromHost, WaitingUnit):
    """A unit whose shards are on the host, and whose gradients wait for the last micro-batch."""

    __slots__ = ()


class StepFromHost(Step):
    """The hooks of one forward and backward. Reduced gradients leave for the host."""

    Unit = UnitFromHost


class NoSyncStepFromHost(NoSyncStep):
    """The hooks of several forwards and backwards. Reduced gradients leave for the host."""

    Unit = WaitingUnitFromHost


class Offloaded(NamedTuple):
    """The hooks of a step whose shards are on the host. `sharding.accumulating` is true: no gradient stays on the GPU."""

    sharding: Sharding
    micro_batches: int

    def start(self, run: Run) -> Step:
        if self.micro_batches == 1:
            return StepFromHost(self.sharding, run)
        return NoSyncStepFromHost(self.sharding, run, self.micro_batches)

    @property
    def alike(self) -> Offloaded:
        """Return the hooks with the sharding's `alike`. Their run differs only in sizes."""
        return self._replace(sharding=self.sharding.alike)

    def resized(self, run: Trace) -> Trace:
        """Return the run of `alike` with the sizes of this sharding."""
        return self.sharding.resized(run)

    def sized(self, dim: Dim) -> Dim:
        """Return a dim of the run of `alike` as this sharding has it."""
        return self.sharding.sized(dim)


def on_gpu(model: Model, setup: Setup) -> Holdings:
    """Return what a rank holds on the GPU: the batch, the loss, the buffers, and what the hooks make."""
    on_paper = min(setup.micro_batches, ENOUGH_MICRO_BATCHES) if setup.keeps_whole_gradients else 1
    sharding = states_and_step(model, setup)[2]._replace(accumulating=True)
    always = [*scale_rows(model), *input_rows(model, setup, frozen_dtype(setup), setup.compute_dtype)]
    return Holdings(tuple(always), hooks=Offloaded(sharding, on_paper), micro_batches=on_paper)


def on_host(model: Model, setup: Setup) -> list[HostRow]:
    """Return what the first node's ranks keep on the host. Every shard of a weight is a block of its own; torch pads the
    weight's shard, and nothing else."""
    dtype, ranks = sharded_dtype(setup), range(min(setup.gpus, setup.gpus_per_node))
    padded, trained, blocks = dict[DType, list[int]](), list[int](), 0
    for w in model.weight_classes:
        each = _shards(w, setup)
        padded.setdefault(_kept_in(model, setup, w), []).extend([max(each)] * (model.copies(w) * len(ranks)))
        trained += [each[rank % setup.shards] for rank in ranks] * model.trained(w)
        blocks += model.trained(w) * len(ranks)
    states = "exp_avg", "exp_avg_sq"
    of, pinned = f"weight/{'dp' if setup.replicas == 1 else 'shard group'}", tuple(n for n in trained if n)
    return [
        *(HostRow("pinned", "weights", of, tuple(sizes), kept, "always", _PARAM) for kept, sizes in padded.items()),
        HostRow("pinned", "gradients", of, pinned, dtype, "backward to step", _COLLECTIVES),
        *(HostRow("paged", name, of, pinned, dtype, "always", _ADAM) for name in states),
        HostRow("paged", "steps of the optimizer", "numbers", (1,) * blocks, fp32, "always", _ADAM),
    ]


def transfers(model: Model, setup: Setup, run: Trace, on_paper: int) -> list[Transfer]:
    """Return what a rank copies in a step. The run has `on_paper` micro-batches; gradients leave once for each reduction."""
    dtype, many = sharded_dtype(setup), setup.micro_batches
    reductions = 1 if setup.keeps_whole_gradients else many
    phases: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    reduced = sum(_shards(w, setup)[0] * model.trained(w) for w in model.weight_classes)
    return [
        *(
            Transfer("shards", phase, "to the GPU", copied // on_paper, many, kept, _PARAM)
            for phase in phases
            for kept, copied in elements_of_blocks(run, _COPIED, phase).items()
        ),
        Transfer("gradients", "backward", "to the host", reduced, reductions, dtype, _COLLECTIVES),
    ]


def _kept_in(model: Model, setup: Setup, weight: Weight) -> DType:
    """Return the dtype of a weight's shards."""
    if weight.packing is not None:
        return weight.packing.stored(weight.shape)[0].dtype
    return sharded_dtype(setup) if model.trainable(weight) else frozen_dtype(setup)


def _shards(weight: Weight, setup: Setup) -> list[int]:
    """Return the elements of every rank's shard of a weight (torch.chunk along the first dim)."""
    shape = shape_in_unit(weight.packing, weight.shape)
    assert shape is not None, "codes in uint8 are refused"
    first, *rest = shape
    each, left = -(-first.size // setup.shards), numel(tuple(rest))[0]
    return [max(0, min(each, first.size - rank * each)) * left for rank in range(setup.shards)]
