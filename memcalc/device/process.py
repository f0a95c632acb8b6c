"""What a process does with the allocator: forwards, backwards and optimizer steps that are written out block by block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from memcalc.device.allocator import Block, CachingAllocator
from memcalc.device.shown import Workspaces
from memcalc.engines.base.script import DEFAULT, Event, Scripts
from memcalc.megatron.between_stages import Kind


class Log(NamedTuple):
    """A micro-batch or an optimizer's step: blocks by number, as in Unrolled, with their bytes and streams."""

    events: Sequence[int]
    sizes: Sequence[int]
    streams: Sequence[str]
    backward: int = 0
    gradients: tuple[int, ...] = ()
    stays: Mapping[int, str] = {}
    """Blocks that backward leaves behind, and what they are called then."""


class Action(NamedTuple):
    """A forward or a backward of a micro-batch of some chunk of the model."""

    kind: Kind
    chunk: int
    log: Log
    between: int = 0


class Process:
    """This is what a process does with the allocator."""

    def __init__(self, allocator: CachingAllocator, workspaces: Workspaces) -> None:
        self.allocator = allocator
        self.workspaces: dict[Kind, tuple[int, ...]] = workspaces._asdict()  # type: ignore[assignment]
        """Those that are not there yet: forward's thread has a cuBLAS handle, autograd's another."""
        self.gradients: list[Block] = []
        self.between: list[Block] = []
        self.left: dict[int, list[Block]] = {}
        """What a chunk's last backward has left besides: the log of the next forward has it again."""

    def hold(self, sizes: Iterable[int]) -> list[Block]:
        """Allocate for good, or until the caller frees it."""
        return [self.allocator.allocate(nbytes, DEFAULT) for nbytes in sizes]

    def have_between(self, count: int, nbytes: int) -> None:
        """So many hidden states and gradients between stages: the oldest go, new ones come."""
        self.free(self.between[: max(0, len(self.between) - count)])
        self.between = [*self.between[-count:], *self.hold([nbytes] * (count - len(self.between)))] if count else []

    def run(self, actions: Iterable[Action], between: int) -> None:
        """Forwards, and of each chunk the backwards of those that have waited longest. `between`: bytes of one tensor."""
        waiting: dict[int, list[dict[int, Block]]] = {}
        for kind, chunk, log, count in actions:
            self.have_between(count, between)
            self.hold(self.workspaces.pop(kind, ()))
            forwards = waiting.setdefault(chunk, [])
            if kind == "forward":
                self.free(self.left.pop(chunk, ()))
                self.backward_is_over()
                forwards.append(self._play(log, 0, log.backward, {}))
                continue
            self.backward_begins()
            live = self._play(log, log.backward, len(log.events), forwards.pop(0))
            self.take_over(log, live)
            self.free(self.left.pop(chunk, ()))
            self.left[chunk] = list(live.values())

    def backward_begins(self) -> None: ...

    def backward_is_over(self) -> None: ...

    def take_over(self, log: Log, live: dict[int, Block]) -> None:
        """What a backward leaves behind."""
        self.gradients += [live.pop(i) for i in log.gradients if i in live]

    def update(self, casts: Sequence[int], updates: Sequence[Log]) -> None:
        """The optimizer's step, after which all gradients go."""
        made = self.hold(casts)
        for log in updates:
            made += self._play(log, 0, len(log.events), {}).values()
        self.free((*made, *self.gradients, *chain.from_iterable(self.left.values())))
        self.gradients, self.left = [], {}

    def free(self, blocks: Iterable[Block]) -> None:
        """In any order: what is free in the end is the same."""
        for block in blocks:
            self.allocator.release(block)

    def _play(self, log: Log, start: int, end: int, live: dict[int, Block]) -> dict[int, Block]:
        """Part of a log; what is alive after it."""
        allocate, release = self.allocator.allocate, self.allocator.release
        events, sizes, streams = log.events, log.sizes, log.streams
        for i in events[start:end]:
            if i >= 0:
                live[i] = allocate(sizes[i], streams[i])
            else:
                release(live.pop(~i))
        return live


class ScriptedProcess(Process):
    """One whose engine tells by name what it allocates and frees."""

    def __init__(self, allocator: CachingAllocator, workspaces: Workspaces, scripts: Scripts) -> None:
        super().__init__(allocator, workspaces)
        self.scripts = scripts
        self.named: dict[Hashable, Block] = {}

    def follow(self, events: Iterable[Event]) -> None:
        for block, nbytes, stream in events:
            if nbytes is not None:
                self.named[block] = self.allocator.allocate(nbytes, stream)
            elif block is not None:
                self.allocator.release(self.named.pop(block))
            else:
                self.allocator.empty_cache()

    def backward_begins(self) -> None:
        self.follow(self.scripts.backward)

    def backward_is_over(self) -> None:
        self.follow(Event(event.block) for event in self.scripts.backward if event.block in self.named)

    def take_over(self, log: Log, live: dict[int, Block]) -> None:
        gradients = [live.pop(i) for i in log.gradients if i in live]
        self.named |= dict(zip(self.scripts.gradients, gradients, strict=bool(gradients)))
        for i, name in log.stays.items():
            if name in self.named:
                self.allocator.release(live.pop(i))
            else:
                self.named[name] = live.pop(i)
