"""What a process under FSDP2 allocates and frees, block by block and on which stream, at any size.

The process is that of `memcalc validate --backend fake`: torch's own `fully_shard`, autograd and optimizer over tensors that
nobody touches. torch.cpu's streams do nothing and are all alike; here those that FSDP2 makes have names, and what is allocated
under `with stream(...)` is on that stream, as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from deepspeed_events import Event, Recording, on_stream, renumbered
from records import on_record

import memcalc
from memcalc.device.allocator import Block, CachingAllocator
from memcalc.validate import fake
from memcalc.validate.comparison import rank_of

STREAMS = ("all-gather copy-in", "all-gather", "reduce-scatter", "all-reduce")
"""In the order in which FSDPCommContext.lazy_init makes them."""


class Resized(Recording):
    """Storages that are freed and refilled where they are come and go, too."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def register(self, tensor: torch.Tensor) -> None:
        before = len(self.events)
        super().register(tensor)
        if len(self.events) > before:
            self.sizes[self.events[-1].storage] = self.events[-1].nbytes

    def resize(self, tensor: torch.Tensor, nbytes: int) -> None:
        key = tensor.untyped_storage()._cdata
        super().resize(tensor, nbytes)
        if key in self._seen and nbytes != self.sizes.get(key, 0):
            if self.sizes.pop(key, 0):
                self.events.append(Event(key))
            if nbytes:
                self.sizes[key] = nbytes
                self.events.append(Event(key, nbytes, self.stream))

    def _forget(self, key: int, nbytes: int) -> None:
        """`nbytes` were there when it was made: those that are there now go."""
        super(Recording, self)._forget(key, nbytes)
        if self.sizes.pop(key, 0):
            self.events.append(Event(key))


@on_record
def recorded(report: memcalc.Report, steps: int) -> list[Event]:
    """The events of a process that does so many steps, on the rank of the report."""
    live = Resized()
    with (
        patch.object(fake, "Live", lambda: live),
        patch.object(fake, "_steps_before", lambda _: steps - 1),
        named_streams(live),
    ):
        fake._measure_rank(report, rank_of(report))
    return renumbered(live.events)


@contextlib.contextmanager
def named_streams(live: Recording) -> Iterator[None]:
    class Named(torch.cpu.Stream):
        count = 0

        def __init__(self, priority: int = -1) -> None:
            super().__init__(priority)
            self.name = STREAMS[Named.count % len(STREAMS)]
            Named.count += 1

    def stream(one: Any) -> Any:
        return on_stream(live, getattr(one, "name", "default"))

    with patch.object(torch.cpu, "Stream", Named), patch.object(torch.cpu, "stream", stream):
        yield


def played(events: list[Event], allocator: CachingAllocator | None = None) -> CachingAllocator:
    """The allocator after these events."""
    allocator, live = allocator or CachingAllocator(), dict[int, Block]()
    for event in events:
        if event.nbytes:
            live[event.storage] = allocator.allocate(event.nbytes, event.stream)
        else:
            allocator.release(live.pop(event.storage))
    return allocator
