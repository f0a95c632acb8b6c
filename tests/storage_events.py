"""Every storage that a run makes and frees, in order and with its stream; and what the caching allocator makes of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from fsdp2_oracle import RankMode

from memcalc.device.allocator import Block, CachingAllocator
from memcalc.device.shown import HANDLES


class Event(NamedTuple):
    """An allocation of `nbytes` on a stream, or with none the free of a storage."""

    storage: int
    nbytes: int
    stream: str


def renumbered(events: Sequence[Event]) -> list[Event]:
    """The same with storages numbered from 1 in the order in which they come: an address is another one in every run."""
    numbers: dict[int, int] = {}
    out: list[Event] = []
    for made, event in enumerate(events, 1):
        if event.nbytes:
            numbers[event.storage] = made
        out.append(event._replace(storage=numbers[event.storage]))
    return out


class EventMode(RankMode):
    """Records what comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.stream = "default"
        self.sizes: dict[int, int] = {}
        self.propagating = False

    def register(self, tensor: torch.Tensor) -> int:
        nbytes = 0 if self.propagating else super().register(tensor)
        if nbytes:
            self._comes(tensor.untyped_storage()._cdata, nbytes)
        return nbytes

    def resize(self, tensor: torch.Tensor, nbytes: int) -> None:
        key = tensor.untyped_storage()._cdata
        super().resize(tensor, nbytes)
        if key in self._seen and nbytes != self.sizes.get(key, 0):
            self._goes(key)
            self._comes(key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        super()._forget(key, self.sizes.get(key, 0))
        self._goes(key)

    def _comes(self, key: int, nbytes: int) -> None:
        if nbytes:
            self.sizes[key] = nbytes
            self.events.append(Event(key, nbytes, self.stream))

    def _goes(self, key: int) -> None:
        if self.sizes.pop(key, 0):
            self.events.append(Event(key, 0, ""))


def played(events: Sequence[Event], workspace: int) -> CachingAllocator:
    """The caching allocator after these allocations and frees. `workspace`: bytes of cuBLAS's, of which each handle has one."""
    allocator = CachingAllocator()
    for _ in range(HANDLES):
        allocator.allocate(workspace, "default")
    live: dict[int, Block] = {}
    for storage, nbytes, stream in events:
        if nbytes:
            live[storage] = allocator.allocate(nbytes, stream)
        else:
            allocator.release(live.pop(storage))
    return allocator
