"""What the caching allocator reserves for a training run: its allocations and frees, in their order, through its rules.

A run begins with what is there before the first step. Each step is the micro-batches' forwards and backwards, the
optimizer's step, which in the first one makes its states, and `zero_grad(set_to_none=True)`. Steps are played until the
free blocks are those that a step before has left: from there on everything repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar

from memcalc.allocator import Block, CachingAllocator, ExpandableAllocator, OutOfMemory
from memcalc.dims import evaluate, numel
from memcalc.engines.holdings import Order, Update
from memcalc.optimizers import Parameter, load_optimizer
from memcalc.profile import Trace
from memcalc.ranks import Rank
from memcalc.rows import Row
from memcalc.setup import Setup
from memcalc.tensor import Memory, StorageRow
from memcalc.unrolled import NotPeriodic, Unrolled, unrolled

DEFAULT: Final = "default"
MOST_STEPS: Final = 5
_MOST_MICRO_BATCHES: Final = 3


class Replay(NamedTuple):
    """What a run came to."""

    reserved: int
    allocated: int
    retries: int
    """How often cached segments were given back because the device was full."""
    steps: int
    steady: bool
    """Whether the last step left the free blocks that one before it did."""


def played(rank: Rank, setup: Setup, workspace: int, room: int | None = None) -> Replay | None:
    """A run with the allocator's defaults. What is reserved stays within `room` where giving segments back makes it so.

    None where the order of allocations is not known.
    """
    try:
        free = replayed(rank, setup, CachingAllocator(), workspace)
    except NotPeriodic:
        return None
    if free is None or room is None or free.reserved <= room:
        return free
    try:
        tight = replayed(rank, setup, CachingAllocator(room), workspace)
    except OutOfMemory:
        return free
    return tight if tight is not None and tight.steady else free


def expandable(rank: Rank, setup: Setup, workspace: int) -> int | None:
    """What is reserved with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`; None where the order is not known."""
    try:
        run = replayed(rank, setup, ExpandableAllocator(), workspace)
    except NotPeriodic:
        return None
    return None if run is None else run.reserved


class _Event(NamedTuple):
    """A step's optimizer, or a micro-batch: blocks by number, as in Unrolled, with their bytes and streams."""

    log: Sequence[int]
    sizes: Sequence[int]
    streams: Sequence[str]
    backward: int


def replayed(rank: Rank, setup: Setup, allocator: CachingAllocator, workspace: int) -> Replay | None:
    """None where the order of allocations is not known. `workspace`: of one cuBLAS handle.

    NotPeriodic (memcalc.unrolled) where the layers that a run leaves out do not follow from those that it has.
    """
    order = rank.held.order
    if order is None or len(rank.profiles) != 1:
        return None
    batch, seq = setup.micro_batch_size, setup.rows
    runs = [rank.profiles[0].run]
    if rank.first is not None:
        runs = [rank.first().run, *runs * (min(setup.micro_batches, _MOST_MICRO_BATCHES) - 1)]
    micro_batches = [_micro_batch(run, order, batch, seq) for run in runs]
    play = _Play(allocator, workspace)
    play.hold(_row_sizes(order.before, batch, seq))
    states, casts = _row_sizes(order.states, batch, seq), _row_sizes(order.casts, batch, seq)
    updates = [_update(setup, update) for update in order.updates]
    left: list[Any] = []
    while len(left) < MOST_STEPS and (len(left) < 2 or left[-1] != left[-2]):
        for one in micro_batches:
            play.run(one)
        if not left:
            play.hold(states)
        play.update(casts, updates)
        left.append(allocator.layout())
    steady = left[-1] == left[-2]
    return Replay(allocator.most_reserved, allocator.most_allocated, allocator.retries, len(left), steady)


class _Play:
    """A process: what it holds on the allocator."""

    def __init__(self, allocator: CachingAllocator, workspace: int) -> None:
        self.allocator = allocator
        self.workspaces = [workspace, workspace]
        """Of the handles that are not there yet: forward's thread has one, autograd's another."""
        self.live: list[Block] = []

    def hold(self, sizes: Iterable[int]) -> None:
        """Allocate for good."""
        for nbytes in sizes:
            self.allocator.allocate(nbytes, DEFAULT)

    def run(self, event: _Event) -> None:
        """A micro-batch, of which the gradients stay."""
        if len(self.workspaces) == 2:
            self.hold([self.workspaces.pop()])
        live = self._play(event, 0, event.backward, {})
        if self.workspaces:
            self.hold([self.workspaces.pop()])
        self.live += self._play(event, event.backward, len(event.log), live).values()

    def update(self, casts: Sequence[int], updates: Sequence[_Event]) -> None:
        """The optimizer's step, after which all gradients go."""
        allocator = self.allocator
        made = [allocator.allocate(nbytes, DEFAULT) for nbytes in casts]
        for event in updates:
            made += self._play(event, 0, len(event.log), {}).values()
        for block in (*made, *self.live):
            allocator.release(block)
        self.live = []

    def _play(self, event: _Event, start: int, end: int, live: dict[int, Block]) -> dict[int, Block]:
        allocate, release = self.allocator.allocate, self.allocator.release
        log, sizes, streams, _ = event
        for i in log[start:end]:
            if i >= 0:
                live[i] = allocate(sizes[i], streams[i])
            else:
                release(live.pop(~i))
        return live


def _micro_batch(run: Trace, order: Order, batch: int, seq: int) -> _Event:
    whole: Unrolled = unrolled(run)
    sizes = [_nbytes(row, batch, seq) for row in run.rows]
    streams = [order.streams.get(row.name, DEFAULT) for row in run.rows]
    return _Event(whole.log, [sizes[i] for i in whole.rows], [streams[i] for i in whole.rows], whole.backward)


def _nbytes(row: StorageRow | Row, batch: int, seq: int) -> int:
    return evaluate(numel(row.shape)[1], batch, seq) * row.dtype.itemsize


def _update(setup: Setup, update: Update) -> _Event:
    """The optimizer's step over every parameter, one after the other."""
    memory = Memory()
    parameters = [
        Parameter(one.name, one.shape, 1, one.is_matrix)
        for stack in _stacks(update.parameters)
        for _ in range(stack[0].count)
        for one in stack
    ]
    optimizer = load_optimizer(setup.optimizer)
    optimizer.step(memory, parameters, update.dtype, update.dtype, setup.optimizer_implementation)
    sizes = [numel(row.shape)[0] * row.dtype.itemsize for row in memory.rows]
    return _Event(memory.log, sizes, [DEFAULT] * len(sizes), 0)


_Class = TypeVar("_Class", Parameter, Row)


def _stacks(classes: Iterable[_Class]) -> Iterator[list[_Class]]:
    """Neighbours of equal number, which are one stack of layers."""
    for _, neighbours in groupby(classes, lambda one: one.count if isinstance(one, Parameter) else one.copies):
        yield list(neighbours)


def _row_sizes(rows: Sequence[Row], batch: int, seq: int) -> list[int]:
    """Bytes of every block, layer by layer."""
    return [
        nbytes
        for stack in _stacks(rows)
        for sizes in ([_nbytes(row, batch, seq) for row in stack],)
        for _ in range(stack[0].copies)
        for nbytes in sizes
    ]
