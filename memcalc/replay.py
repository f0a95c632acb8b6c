"""What the caching allocator reserves for a training run: its allocations and frees, in their order, through its rules.

A run begins with what is there before the first step. Each step is the micro-batches' forwards and backwards, the
optimizer's step, which in the first one makes its states, and `zero_grad(set_to_none=True)`. Steps are played until the
free blocks are those that a step before has left: from there on everything repeats.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, Final, NamedTuple, TypeVar

from memcalc.allocator import Block, CachingAllocator, ExpandableAllocator, OutOfMemory
from memcalc.device import Workspaces
from memcalc.dims import evaluate, numel
from memcalc.engines.holdings import Order, Update
from memcalc.engines.script import DEFAULT, Event, Scripts
from memcalc.megatron.between_stages import Kind
from memcalc.megatron.between_stages import left as left_between
from memcalc.optimizers import Parameter, load_optimizer
from memcalc.ranks import Rank
from memcalc.rows import Row
from memcalc.runs import Trace
from memcalc.setup import Setup
from memcalc.tensor import Memory, StorageRow
from memcalc.unrolled import NotPeriodic, unrolled

MOST_STEPS: Final = 5
_MOST_MICRO_BATCHES: Final = 3  # the first one makes the gradients, the third one does what the second one did
_BOTH: Final[tuple[Kind, ...]] = ("forward", "backward")


class Replay(NamedTuple):
    """What a run came to."""

    reserved: int
    allocated: int
    """In a step; what comes before the first one can be more."""
    retries: int
    """How often cached segments were given back because the device was full."""
    steps: int
    steady: bool
    """Whether the last step left the free blocks that an earlier one did."""


def played(rank: Rank, setup: Setup, workspaces: Workspaces, room: int | None = None) -> Replay | None:
    """A run with the allocator's defaults. What is reserved stays within `room` where giving segments back makes it so.

    None where the order of allocations is not known.
    """
    try:
        free = replayed(rank, setup, CachingAllocator(), workspaces)
    except NotPeriodic:
        return None
    if free is None or room is None or free.reserved <= room:
        return free
    try:
        tight = replayed(rank, setup, CachingAllocator(room), workspaces)
    except OutOfMemory:
        return free
    return tight if tight is not None and tight.steady else free


def expandable(rank: Rank, setup: Setup, workspaces: Workspaces) -> int | None:
    """What is reserved with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`; None where the order is not known."""
    try:
        run = replayed(rank, setup, ExpandableAllocator(), workspaces)
    except NotPeriodic:
        return None
    return None if run is None else run.reserved


def replayed(rank: Rank, setup: Setup, allocator: CachingAllocator, workspaces: Workspaces) -> Replay | None:
    """The same through an allocator of one's own; NotPeriodic as in memcalc.unrolled."""
    order = rank.held.order
    if order is None:
        return None
    batch, seq = setup.micro_batch_size, setup.rows
    if order.scripts is not None:
        return _scripted(rank, order, order.scripts(), setup, allocator, workspaces)
    actions = _actions(rank, order, setup)
    states, casts = _row_sizes(order.states, batch, seq), _row_sizes(order.casts, batch, seq)
    clipping = _row_sizes(order.clipping, batch, seq)
    updates = [_update(setup, update) for update in order.updates]
    between = 0 if rank.between is None else _nbytes(rank.between, batch, seq)
    remaining = 0 if rank.between is None else left_between(rank.number, len(rank.profiles))
    process = _Process(allocator, workspaces)
    moved = process.hold(_row_sizes(order.moved, batch, seq))
    process.hold(_row_sizes(order.flat, batch, seq))
    process.free(moved)
    process.hold(_row_sizes(order.before, batch, seq))
    allocator.most_allocated = allocator.allocated
    left: list[Any] = []
    while len(left) < MOST_STEPS and (len(left) < 2 or left[-1] not in left[:-1]):
        process.run(actions, between)
        process.have_between(remaining, between)
        process.free(process.hold(clipping))
        if not left:
            process.hold(states)
        process.update(casts, updates)
        left.append(allocator.layout())
    steady = left[-1] in left[:-1]
    return Replay(allocator.most_reserved, allocator.most_allocated, allocator.retries, len(left), steady)


def _scripted(
    rank: Rank, order: Order, scripts: Scripts, setup: Setup, allocator: CachingAllocator, workspaces: Workspaces
) -> Replay:
    """A process of an engine that tells all that it does."""
    actions = _actions(rank, order, setup, scripts.stays)
    untraced = None if rank.untraced is None else _micro_batch(rank.untraced().run, order, setup, scripts.stays)
    process = _ScriptedProcess(allocator, workspaces, scripts)
    process.hold(_row_sizes(order.before, setup.micro_batch_size, setup.rows))
    roomy = allocator.limit is None or _most_bytes(scripts.made) <= allocator.limit
    process.follow(scripts.made if roomy else scripts.made_outside)
    left: list[Any] = []
    steps = 0
    while len(left) < MOST_STEPS and (len(left) < 2 or left[-1] not in left[:-1]):
        own = _untraced(actions, untraced, steps)
        if not left:
            allocator.most_allocated = allocator.allocated
        process.run(own, 0)
        process.follow(scripts.closing)
        process.backward_is_over()
        process.follow(scripts.step if steps else scripts.first_step)
        process.update((), ())
        steps += 1
        left = [*left, allocator.layout()] if own is actions else []
    steady = left[-1] in left[:-1]
    return Replay(allocator.most_reserved, allocator.most_allocated, allocator.retries, steps, steady)


def _untraced(actions: list[_Action], log: _Log | None, step: int) -> list[_Action]:
    """A step's, of which the very first micro-batch has another log."""
    if log is None or step:
        return actions
    return [action._replace(log=log) if k < len(_BOTH) else action for k, action in enumerate(actions)]


def _most_bytes(events: Sequence[Event]) -> int:
    """That are there at once."""
    there: dict[Any, int] = {}
    now = most = 0
    for block, nbytes, _ in events:
        if nbytes is not None:
            there[block] = nbytes
            now += nbytes
            most = max(most, now)
        elif block is not None:
            now -= there.pop(block)
    return most


# --- a process


class _Log(NamedTuple):
    """A micro-batch or an optimizer's step: blocks by number, as in Unrolled, with their bytes and streams."""

    events: Sequence[int]
    sizes: Sequence[int]
    streams: Sequence[str]
    backward: int = 0
    gradients: tuple[int, ...] = ()
    stays: Mapping[int, str] = {}
    """Blocks that backward leaves behind, and what they are called then."""


class _Action(NamedTuple):
    """A forward or a backward of a micro-batch of some chunk of the model."""

    kind: Kind
    chunk: int
    log: _Log
    between: int = 0


class _Process:
    """What a process does with the allocator."""

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

    def run(self, actions: Iterable[_Action], between: int) -> None:
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

    def take_over(self, log: _Log, live: dict[int, Block]) -> None:
        """What a backward leaves behind."""
        self.gradients += [live.pop(i) for i in log.gradients if i in live]

    def update(self, casts: Sequence[int], updates: Sequence[_Log]) -> None:
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

    def _play(self, log: _Log, start: int, end: int, live: dict[int, Block]) -> dict[int, Block]:
        """Part of a log; what is alive after it."""
        allocate, release = self.allocator.allocate, self.allocator.release
        events, sizes, streams = log.events, log.sizes, log.streams
        for i in events[start:end]:
            if i >= 0:
                live[i] = allocate(sizes[i], streams[i])
            else:
                release(live.pop(~i))
        return live


class _ScriptedProcess(_Process):
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

    def take_over(self, log: _Log, live: dict[int, Block]) -> None:
        gradients = [live.pop(i) for i in log.gradients if i in live]
        self.named |= dict(zip(self.scripts.gradients, gradients, strict=bool(gradients)))
        for i, name in log.stays.items():
            if name in self.named:
                self.allocator.release(live.pop(i))
            else:
                self.named[name] = live.pop(i)


# --- what it does


def _actions(rank: Rank, order: Order, setup: Setup, stays: frozenset[str] = frozenset()) -> list[_Action]:
    """Forwards and backwards in their order."""
    chunks = [_micro_batch(profile.run, order, setup, stays) for profile in rank.profiles]
    if rank.turns:
        return [_Action(turn.kind, turn.chunk, chunks[turn.chunk], turn.between) for turn in rank.turns]
    micro_batches = chunks * min(setup.micro_batches, _MOST_MICRO_BATCHES)
    if rank.first is not None:
        micro_batches[0] = _micro_batch(rank.first().run, order, setup, stays)
    return [_Action(kind, 0, log) for log in micro_batches for kind in _BOTH]


def _micro_batch(run: Trace, order: Order, setup: Setup, stays: frozenset[str]) -> _Log:
    whole = unrolled(run)
    sizes = [_nbytes(row, setup.micro_batch_size, setup.rows) for row in run.rows]
    streams = [order.streams.get(row.name, DEFAULT) for row in run.rows]
    of_blocks = [sizes[i] for i in whole.rows], [streams[i] for i in whole.rows]
    kept = {i: run.rows[k].name for i, k in enumerate(whole.rows) if run.rows[k].name in stays} if stays else {}
    events = [event for event in whole.log if event >= 0 or ~event not in kept] if kept else whole.log
    return _Log(events, *of_blocks, whole.backward, whole.gradients, kept)


def _nbytes(row: StorageRow | Row, batch: int, seq: int) -> int:
    return evaluate(numel(row.shape)[1], batch, seq) * row.dtype.itemsize


def _update(setup: Setup, update: Update) -> _Log:
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
    return _Log(memory.log, sizes, [DEFAULT] * len(sizes))


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
