"""From the tensors of a rank's step to what tools show of its GPU: `allocated`, `reserved` and `device`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from memcalc.device import shown as devices

if TYPE_CHECKING:
    from memcalc.core.rows import Item
    from memcalc.device.allocator import CachingAllocator
    from memcalc.device.fragmentation import Assumed
    from memcalc.device.observer import Observer
    from memcalc.device.replay import Prepared, Replay
    from memcalc.engines.rank import Rank
    from memcalc.inputs.gpu import GPU
    from memcalc.setup.setup import Setup


class OnDevice:
    """A rank's step on a GPU. `allocated`, `reserved` and `device` are each the number before plus rows."""

    model: Any
    setup: Setup
    gpu: GPU | None
    rank: Rank
    peak: int
    items: Any
    _with_room: Replay | None = None

    def with_setup(self, setup: Setup) -> OnDevice:
        """Return the same model's step with another setup."""
        raise NotImplementedError

    @property
    def states_only(self) -> bool:
        """Return True for a bare number of parameters (`--params`): its activations are not known."""
        return self.setup.seq_len is None

    @property
    def is_of_step(self) -> bool:
        """Return True if the peak is in a step, and not before it. Only a step is played through the allocator."""
        return True

    @cached_property
    def _prepared(self) -> Prepared | None:
        if not self.is_of_step:
            return None
        from memcalc.device.replay import prepared
        from memcalc.tape.unrolled import NotPeriodic

        try:
            return prepared(self.rank, self.setup)
        except NotPeriodic:
            return None

    def play(self, allocator: CachingAllocator) -> Replay | None:
        """Play the run's allocations through an allocator; None if their order is not known. Raise OutOfMemory if the
        allocator's limit is too low."""
        return None if self._prepared is None else self._prepared.play(allocator, self.workspaces)

    def record(self, allocator: CachingAllocator, observer: Observer) -> Replay:
        """Play the run through an allocator while an observer listens. The order of the run's allocations has to be known."""
        assert self._prepared is not None
        return self._prepared.play(allocator, self.workspaces, observer)

    @property
    def is_played(self) -> bool:
        """Return True if the order of the run's allocations is known."""
        return self._prepared is not None

    @cached_property
    def played(self) -> Replay | None:
        """Return the run through an allocator without a limit; None if the order of its allocations is not known."""
        from memcalc.device.allocator import CachingAllocator

        return self._with_room or self.play(CachingAllocator())

    def played_within(self, limit: int) -> Replay | None:
        """Return the run through an allocator that may reserve `limit` bytes; None if the run is out of memory or not played."""
        if limit not in self._within:
            self._within[limit] = self._play_within(limit)
        return self._within[limit]

    @cached_property
    def _within(self) -> dict[int, Replay | None]:
        """Return the cache of runs that were played, by limit in bytes."""
        return {}

    def _play_within(self, limit: int) -> Replay | None:
        from memcalc.device.allocator import CachingAllocator, OutOfMemory
        from memcalc.device.replay import MOST_STEPS

        try:
            run = self.play(CachingAllocator(limit))
        except OutOfMemory:
            return None
        if run is not None and not run.retries and run.steps <= MOST_STEPS:
            self._with_room = run  # with more room it does the same
        return run

    @property
    def workspaces(self) -> devices.Workspaces:
        return devices.workspaces_of(self.gpu, self._kernels)

    @property
    def _kernels(self) -> devices.Kernels:
        return devices.kernels_of(self.setup, self.model)

    @cached_property
    def _counted(self) -> list[Item]:
        return devices.allocator_items(self.items, self.gpu, self._kernels)

    @cached_property
    def overheads(self) -> list[Item]:
        """Return the rows of `allocated`, `reserved` and `device` that are not tensors."""
        allocator, allocated = list(self._counted), self.counted
        if self.played is not None:
            allocator.append(devices.whole_blocks_item(allocated, self.played))
            allocated += allocator[-1].nbytes
        reserved = devices.reserved_items(allocated, self.played, self.setup.engine, lambda: self.assumed(allocated))
        return [*allocator, *reserved, *self.outside]

    @property
    def outside(self) -> list[Item]:
        """Return the rows of what a process holds outside torch: the CUDA context and NCCL."""
        return devices.device_items(self.setup.gpus, self.gpu)

    @property
    def counted(self) -> int:
        """Return the bytes of `allocated` that are known without a replay: the peak's tensors, their rounding, workspaces."""
        return self.peak + sum(item.nbytes for item in self._counted)

    def assumed(self, allocated: int) -> Assumed:
        """Return the fragmentation to assume if the run is not played; `allocated` is in bytes."""
        from memcalc.device.fragmentation import assumed

        return assumed(self, allocated)

    def _with(self, *components: str) -> int:
        return self.peak + sum(item.nbytes for item in self.overheads if item.component in components)

    @property
    def allocated(self) -> int:
        """Return what torch.cuda.max_memory_allocated would show, in bytes."""
        return self._with("allocator")

    @property
    def reserved(self) -> int:
        """Return what torch.cuda.max_memory_reserved would show on a GPU with room, in bytes. The fragmentation is measured if
        the engine has recorded runs, else played, else assumed."""
        return self._with("allocator", "reserved")

    @property
    def device(self) -> int:
        """Return what nvidia-smi would show for the process, in bytes."""
        return self._with("allocator", "reserved", "device")

    @property
    def margin(self) -> int:
        """Return by how many bytes `device` may be too low, from the errors on recorded or published runs (docs/accuracy.md)."""
        return devices.margin(self.device, self.setup.engine)
