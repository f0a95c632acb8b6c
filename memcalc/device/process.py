"""A process that plays forwards, backwards and optimizer steps through the allocator, block by block."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from typing import NamedTuple, TypeVar

from memcalc.core.rows import Row
from memcalc.core.tensor import StorageRow
from memcalc.device.allocator import Block, CachingAllocator
from memcalc.device.observer import SILENT, Observer
from memcalc.device.shown import Workspaces
from memcalc.engines.base.script import DEFAULT, Event, Scripts
from memcalc.megatron.between_stages import Kind
from memcalc.optimizers import Parameter


class Part(NamedTuple):
    """The events of a log from `start` to `end`, which are of one phase and layer."""

    start: int
    end: int
    phase: str
    layer: int | None


class Names(NamedTuple):
    """The rows that a log's blocks were allocated as, and its phases and layers."""

    rows: Sequence[StorageRow] = ()
    of_blocks: Sequence[int] = ()
    """The index in `rows` of each block."""
    segments: Sequence[tuple[int, str, int | None]] = ()
    """The indices in the log's events at which another phase or layer begins."""
    layer_of: Callable[[int], int | None] = lambda _block: None
    """Returns the layer of the real stack that a block belongs to."""

    def parts(self, end: int) -> Iterator[Part]:
        """Yield the parts of a log with `end` events. What comes before the first segment is a part too."""
        for (start, phase, layer), (stop, _, _) in pairwise([(0, "", None), *self.segments, (end, "", None)]):
            if start < stop:
                yield Part(start, stop, phase, layer)


class Log(NamedTuple):
    """A micro-batch or an optimizer step, written out block by block.

    `events` has i where block i is allocated and ~i where block i is freed, as `Unrolled.log` has. `sizes` (bytes) and
    `streams` are by block number. `backward` is the index in `events` at which backward begins.
    """

    events: Sequence[int]
    sizes: Sequence[int]
    streams: Sequence[str]
    backward: int = 0
    gradients: tuple[int, ...] = ()
    stays: Mapping[int, str] = {}
    """The blocks that stay allocated after backward, with the engine's names for them."""
    names: Names = Names()
    products: Mapping[Kind, int] = {}
    """The index in `events` of the allocation of each phase's first matrix product."""


class Action(NamedTuple):
    """A forward or a backward of one micro-batch of one model chunk. `between` counts the tensors between pipeline stages."""

    kind: Kind
    chunk: int
    log: Log
    between: int = 0


class Held(NamedTuple):
    """Rows and the bytes of each of their blocks, in the order of `in_turn`."""

    rows: Sequence[Row]
    sizes: Sequence[int]


_Class = TypeVar("_Class", Parameter, Row)


def in_turn(classes: Iterable[_Class]) -> Iterator[tuple[_Class, int]]:
    """Yield what each class stands for, one by one, with its number. Neighbours with equal counts are one stack of layers, and
    come layer by layer."""
    for count, neighbours in groupby(classes, lambda one: one.count if isinstance(one, Parameter) else one.copies):
        stack = list(neighbours)
        for number in range(count):
            for one in stack:
                yield one, number


class Process:
    """A process and the blocks that it has in the allocator."""

    def __init__(self, allocator: CachingAllocator, workspaces: Workspaces, observer: Observer = SILENT) -> None:
        self.allocator = allocator
        self.observer = observer
        self.workspaces: dict[Kind, tuple[int, ...]] = workspaces._asdict()  # type: ignore[assignment]
        """The bytes of the workspaces that are not allocated yet, by phase: the thread that runs forward has a cuBLAS handle,
        autograd's thread another."""
        self.gradients: list[Block] = []
        self.between: list[Block] = []
        self.left: dict[int, list[Block]] = {}
        """The blocks other than gradients that each chunk's last backward left. The log of the next forward allocates them
        again."""

    def hold(self, held: Held) -> list[Block]:
        """Allocate the blocks of rows and return them. They stay until the caller frees them."""
        self.observer.rows_come(held.rows)
        return self._hold(held.sizes)

    def _hold(self, sizes: Iterable[int]) -> list[Block]:
        """Allocate blocks of these bytes on the default stream."""
        return [self.allocator.allocate(nbytes, DEFAULT) for nbytes in sizes]

    def have_between(self, count: int, nbytes: int) -> None:
        """Bring the tensors between stages to `count`, each of `nbytes` bytes: free the oldest, or allocate new ones."""
        self.free(self.between[: max(0, len(self.between) - count)])
        self.observer.between_come()
        self.between = [*self.between[-count:], *self._hold([nbytes] * (count - len(self.between)))] if count else []

    def run(self, actions: Iterable[Action], between: int) -> None:
        """Play forwards and backwards. A backward belongs to the chunk's oldest forward without one. `between`: the bytes of one
        tensor between stages."""
        waiting: dict[int, list[dict[int, Block]]] = {}
        for kind, chunk, log, count in actions:
            self.observer.turn_begins(kind, chunk)
            self.have_between(count, between)
            forwards = waiting.setdefault(chunk, [])
            if kind == "forward":
                self.free(self.left.pop(chunk, ()))
                self.backward_is_over()
                forwards.append(self._turn(kind, log, 0, log.backward, {}))
                continue
            self.backward_begins()
            live = self._turn(kind, log, log.backward, len(log.events), forwards.pop(0))
            self.take_over(log, live)
            self.free(self.left.pop(chunk, ()))
            self.left[chunk] = list(live.values())

    def _turn(self, kind: Kind, log: Log, start: int, end: int, live: dict[int, Block]) -> dict[int, Block]:
        """Play a forward or a backward. The first one of each kind allocates its thread's workspaces after the result of its
        first product, or at its beginning if its products are not known."""
        if kind in self.workspaces:
            first = log.products.get(kind, start - 1) + 1
            live = self._play(log, start, first, live)
            self.observer.workspaces_come()
            self._hold(self.workspaces.pop(kind))
            start = first
        return self._play(log, start, end, live)

    def backward_begins(self) -> None: ...

    def backward_is_over(self) -> None: ...

    def take_over(self, log: Log, live: dict[int, Block]) -> None:
        """Keep the gradients that a backward leaves."""
        self.gradients += [live.pop(i) for i in log.gradients if i in live]

    def update(self, casts: Held, states: Held, updates: Sequence[Log]) -> None:
        """Play the optimizer's step, then free all gradients. `casts`: tensors that exist for the step only; `states`: what the
        step makes and keeps."""
        made = self.hold(casts)
        self.hold(states)
        for log in updates:
            made += self._play(log, 0, len(log.events), {}).values()
        self._free_gradients(made)

    def first_update(self, casts: Held, updates: Sequence[Log]) -> None:
        """Play a first step whose logs make the states, which stay."""
        made = self.hold(casts)
        for log in updates:
            self._play(log, 0, len(log.events), {})
        self._free_gradients(made)

    def _free_gradients(self, made: Iterable[Block]) -> None:
        """Free what a step has made and does not keep, and all gradients."""
        self.free((*made, *self.gradients, *chain.from_iterable(self.left.values())))
        self.gradients, self.left = [], {}

    def free(self, blocks: Iterable[Block]) -> None:
        """Free blocks. Their order makes no difference to what is free in the end."""
        for block in blocks:
            self.allocator.release(block)

    def _play(self, log: Log, start: int, end: int, live: dict[int, Block]) -> dict[int, Block]:
        """Play a part of a log. Return the blocks that are live after that part, by number."""
        allocate, release = self.allocator.allocate, self.allocator.release
        events, sizes, streams = log.events, log.sizes, log.streams
        self.observer.log_plays(log, start, end)
        for i in events[start:end]:
            if i >= 0:
                live[i] = allocate(sizes[i], streams[i])
            else:
                release(live.pop(~i))
        return live


class ScriptedProcess(Process):
    """A process whose engine lists by name the blocks that it allocates and frees (engines/base/script.py)."""

    def __init__(
        self, allocator: CachingAllocator, workspaces: Workspaces, scripts: Scripts, observer: Observer = SILENT
    ) -> None:
        super().__init__(allocator, workspaces, observer)
        self.scripts = scripts
        self.named: dict[Hashable, Block] = {}

    def follow(self, events: Sequence[Event]) -> None:
        self.observer.script_plays(events)
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
        self.follow([Event(event.block) for event in self.scripts.backward if event.block in self.named])

    def take_over(self, log: Log, live: dict[int, Block]) -> None:
        gradients = [live.pop(i) for i in log.gradients if i in live]
        self.named |= dict(zip(self.scripts.gradients, gradients, strict=bool(gradients)))
        for i, name in log.stays.items():
            if name in self.named:
                self.allocator.release(live.pop(i))
            else:
                self.named[name] = live.pop(i)
