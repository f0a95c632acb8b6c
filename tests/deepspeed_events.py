"""What DeepSpeed's own engine allocates and frees in a whole process, block by block and on which stream, at any size.

The process is that of `memcalc validate --backend fake`: CPU tensors that nobody touches, an accelerator with CUDA's answers.
Here its streams have names. What is on the CPU with a GPU, too, is told apart: the model as the caller makes it, and the buffer
that `defragment` of ZeRO-3 moves all shards into, which comes back to the GPU when the cache has been emptied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from records import on_record

import memcalc
from memcalc.device.allocator import Block, CachingAllocator
from memcalc.validate import deepspeed, fake
from memcalc.validate.live import Live

STREAMS = {"1": "all-gather", "2": "reduce and partition"}
"""Of stage 3, in the order in which it makes them."""


class Event(NamedTuple):
    """A storage comes or, with no bytes, goes; or what is free is given back to the device."""

    storage: int
    nbytes: int = 0
    stream: str = ""


def renumbered(events: list[Event]) -> list[Event]:
    """The same with storages numbered in the order in which they come: an address is another one in every run. What goes
    that never came, as it was cleared, is left out."""
    numbers: dict[int, int] = {}
    out: list[Event] = []
    for event in events:
        if event.nbytes:
            numbers[event.storage] = len(out) + 1
        if event == EMPTY_CACHE:
            out.append(event)
        elif event.storage in numbers:
            out.append(event._replace(storage=numbers[event.storage]))
    return out


EMPTY_CACHE = Event(0)
ELSEWHERE = "nowhere on the device"
"""The stream of copies on the CPU."""


class Recording(Live):
    """Live bytes that also says what comes and goes, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.stream = "default"

    def register(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = storage._cdata in self._seen
        super().register(tensor)
        if not known and storage._cdata in self._seen and storage.nbytes():  # no bytes are no block
            self.events.append(Event(storage._cdata, storage.nbytes(), self.stream))

    def _forget(self, key: int, nbytes: int) -> None:
        super()._forget(key, nbytes)
        if nbytes:
            self.events.append(Event(key))


@on_record
def recorded(report: memcalc.Report, rank: int, steps: int, *, roomy: bool = True) -> list[Event]:
    """The events of a process on one rank of the report's setup. `roomy`: the device has memory for weights twice."""
    deepspeed.load()
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3

    live = Recording()
    to_the_cpu, cast, defragment = torch.Tensor.cpu, DeepSpeedEngine._cast_module_mixed_precision, stage3.defragment

    def casts(*args: Any) -> Any:
        live.events.clear()  # weights are cast on the CPU; from here on what is made of each is what is moved to the GPU
        return cast(*args)

    def copied_to_the_cpu(tensor: torch.Tensor) -> torch.Tensor:
        with on_stream(live, ELSEWHERE):
            return to_the_cpu(tensor).clone()

    def through_the_cpu(tensors: Any) -> torch.Tensor:
        with on_stream(live, "CPU"):
            return defragment(tensors)

    with (
        patch.object(fake, "Live", lambda: live),
        patch.object(fake, "_steps_before", lambda _: steps - 1),
        patch.object(DeepSpeedEngine, "_cast_module_mixed_precision", casts),
        patch.object(deepspeed, "like_cuda", _with_streams(live, deepspeed.like_cuda, 2**60 if roomy else 0)),
        patch.object(torch.Tensor, "cpu", copied_to_the_cpu),
        patch.object(stage3, "defragment", through_the_cpu),
    ):
        fake._measure_rank(report, rank)
    return renumbered(live.events)


@contextlib.contextmanager
def on_stream(live: Recording, name: str) -> Iterator[None]:
    before, live.stream = live.stream, name
    try:
        yield
    finally:
        live.stream = before


def _with_streams(live: Recording, like_cuda: Any, memory: int) -> Any:
    def accelerator() -> Any:
        own: Any = type(like_cuda())

        class Named(own.Stream):
            count = 0

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                Named.count += 1
                self.name = STREAMS[str(Named.count)]

        class WithStreams(own):
            Stream = Named

            def stream(self, stream: Any) -> Any:
                return on_stream(live, getattr(stream, "name", "default"))

            def available_memory(self, device_index: Any = None) -> int:
                return memory

            def empty_cache(self) -> None:
                live.events.append(EMPTY_CACHE)

        return WithStreams()

    return accelerator


def played(events: list[Event]) -> CachingAllocator:
    """The allocator after these events. What came before the cache was emptied by `defragment` does not count."""
    allocator, live, waiting = CachingAllocator(), dict[int, Block](), list[Event]()
    for event in events:
        if event == EMPTY_CACHE:
            allocator.empty_cache()
            if waiting:
                allocator.most_reserved = allocator.reserved
            for one in waiting:
                live[one.storage] = allocator.allocate(one.nbytes, "default")
            waiting = []
        elif event.nbytes and event.stream == "CPU":
            waiting.append(event)
        elif event.nbytes and event.stream != ELSEWHERE:
            live[event.storage] = allocator.allocate(event.nbytes, event.stream)
        elif event.storage in live:
            allocator.release(live.pop(event.storage))
    return allocator
