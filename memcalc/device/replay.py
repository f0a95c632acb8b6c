"""The bytes that the caching allocator reserves for a training run, found by playing the run through the allocator's rules.

A run begins with the allocations before the first step. Each step has the forwards and backwards of the micro-batches, the
optimizer's step and `zero_grad(set_to_none=True)`. The first optimizer step also allocates the optimizer's states. Steps are
played until one leaves the same free blocks as an earlier step: from then on all steps repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from memcalc.core.dims import evaluate, numel
from memcalc.core.rows import Row
from memcalc.core.tensor import Memory, StorageRow, Tensor, new_tensor
from memcalc.device.allocator import CachingAllocator
from memcalc.device.observer import SILENT, Observer
from memcalc.device.process import Action, Held, Log, Names, Process, ScriptedProcess, in_turn
from memcalc.device.products import first_products
from memcalc.device.shown import Workspaces
from memcalc.engines.base.holdings import OF_CALLER, Order, Update
from memcalc.engines.base.script import DEFAULT, Event, Scripts
from memcalc.engines.rank import Rank
from memcalc.megatron.between_stages import Kind
from memcalc.megatron.between_stages import left as left_between
from memcalc.optimizers import Parameter, load_optimizer
from memcalc.setup.setup import Setup
from memcalc.tape.runs import Trace
from memcalc.tape.unrolled import unrolled

MOST_STEPS: Final = 5
MOST_STEPS_WHEN_FULL: Final = 20
"""The most steps with a limit. On a full device a steady state takes longer, and a late step can go out of memory."""
_CALM: Final = 3
"""If so many steps end with the same reserved bytes, and none was given back, a limit has made no difference."""
_MOST_MICRO_BATCHES: Final = 3  # the first one makes the gradients, the third one does what the second one did
NOTHING: Final = Held((), ())
_BOTH: Final[tuple[Kind, ...]] = ("forward", "backward")


class Replay(NamedTuple):
    """The result of a run that was played through an allocator. `reserved` and `allocated` are the highest bytes."""

    reserved: int
    allocated: int
    """The highest in a step. The allocations before the first step can be more and do not count."""
    retries: int
    """How often cached segments were given back because the device was full."""
    steps: int
    steady: bool
    """True if the last step left the same free blocks as an earlier step."""
    retried: int = 0
    """How often segments were given back in the last step; if the run is `steady`, as often in every later step."""


def replayed(rank: Rank, setup: Setup, allocator: CachingAllocator, workspaces: Workspaces) -> Replay | None:
    """Play a rank's run through an allocator; None if the order of its allocations is not known. Raise NotPeriodic as
    memcalc.tape.unrolled does."""
    run = prepared(rank, setup)
    return None if run is None else run.play(allocator, workspaces)


def prepared(rank: Rank, setup: Setup) -> Prepared | None:
    """Return a rank's run, ready to be played many times; None if the order of its allocations is not known. Raise NotPeriodic
    as memcalc.tape.unrolled does."""
    order = rank.order
    if order is None:
        return None
    batch, seq = setup.micro_batch_size, setup.tokens_per_part
    before = _held(sorted(order.before, key=lambda row: row.life in OF_CALLER), batch, seq)  # the model is made first
    if order.scripts is not None:
        scripts = order.scripts()
        untraced = None if rank.untraced is None else _micro_batch(rank.untraced().run, order, setup, scripts.stays)
        return _Scripted(before, _actions(rank, order, setup, scripts.stays), untraced, scripts)
    return _Plain(
        before,
        _actions(rank, order, setup),
        moved=_held(order.moved, batch, seq),
        flat=_held(order.flat, batch, seq),
        replaced=_held(order.replaced, batch, seq),
        replacing=_held(order.replacing(), batch, seq),
        states=_held(order.states, batch, seq),
        casts=_held(order.casts, batch, seq),
        clipping=_held(order.clipping, batch, seq),
        updates=[_update(setup, update) for update in order.updates],
        first_updates=_first_updates(setup, order.updates),
        between=0 if rank.between is None else _nbytes(rank.between, batch, seq),
        remaining=0 if rank.between is None else left_between(rank.number, len(rank.profiles)),
    )


class Prepared(Protocol):
    """A run whose allocations are written out."""

    def play(self, allocator: CachingAllocator, workspaces: Workspaces, observer: Observer = SILENT) -> Replay:
        """Play the run from its beginning while `observer` listens. Raise OutOfMemory if the allocator's limit is too low."""
        ...


class _Plain(NamedTuple):
    """A run of an engine that describes what it holds by rows."""

    before: Held
    actions: list[Action]
    moved: Held
    flat: Held
    replaced: Held
    replacing: Held
    states: Held
    casts: Held
    clipping: Held
    updates: list[Log]
    first_updates: list[Log]
    between: int
    remaining: int

    def play(self, allocator: CachingAllocator, workspaces: Workspaces, observer: Observer = SILENT) -> Replay:
        process = Process(allocator, workspaces, observer)
        moved = process.hold(self.moved)
        process.hold(self.flat)
        process.free(moved)
        process.hold(self.before)
        replaced = process.hold(self.replaced)
        allocator.most_allocated = allocator.allocated
        steps = _Steps(allocator)
        while steps.go_on():
            if steps.count == 1:
                process.free(replaced)
                process.hold(self.replacing)
            observer.step_begins()
            process.run(self.actions, self.between)
            observer.turns_are_over()
            process.have_between(self.remaining, self.between)
            process.free(process.hold(self.clipping))
            if not steps.left and self.first_updates:
                process.first_update(self.casts, self.first_updates)
            else:
                process.update(self.casts, NOTHING if steps.left else self.states, self.updates)
            steps.end()
        return steps.result()


class _Scripted(NamedTuple):
    """A run of an engine that lists every block it allocates and frees (engines/base/script.py)."""

    before: Held
    actions: list[Action]
    untraced: Log | None
    scripts: Scripts

    def play(self, allocator: CachingAllocator, workspaces: Workspaces, observer: Observer = SILENT) -> Replay:
        scripts = self.scripts
        process = ScriptedProcess(allocator, workspaces, scripts, observer)
        process.hold(self.before)
        roomy = allocator.limit is None or _most_bytes(scripts.before_first_step) <= allocator.limit
        process.follow(scripts.before_first_step if roomy else scripts.before_first_step_through_cpu)
        allocator.most_allocated = allocator.allocated
        steps = _Steps(allocator)
        while steps.go_on():
            observer.step_begins()
            process.run(_untraced(self.actions, self.untraced, steps.count), 0)
            process.follow(scripts.closing)
            process.backward_is_over()
            observer.turns_are_over()
            process.follow(scripts.step if steps.count else scripts.first_step)
            process.update(NOTHING, NOTHING, ())
            steps.end(like_others=steps.count > 0 or self.untraced is None)
        return steps.result()


class _Steps:
    """The steps of a run. They end when one leaves the same free blocks as an earlier step, or after the most that are played.

    With a limit more steps are played, as long as segments are given back or the last steps have reserved more.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.left: list[Any] = []
        self.reserved: list[int] = []
        """The most bytes reserved up to the end of each step."""
        self.count = 0
        self.retries = 0
        """How often segments were given back before the last step."""

    def go_on(self) -> bool:
        self.retries = self.allocator.retries
        return len(self.left) < self._most() and not self._steady()

    def _most(self) -> int:
        """Return the most steps to play."""
        if self.allocator.limit is None:
            return MOST_STEPS
        calm = not self.retries and len(set(self.reserved[-_CALM:])) == 1
        return MOST_STEPS if calm else MOST_STEPS_WHEN_FULL

    def _steady(self) -> bool:
        return len(self.left) > 1 and self.left[-1] in self.left[:-1]

    def end(self, *, like_others: bool = True) -> None:
        """End a step. `like_others`: False if later steps do something else."""
        self.count += 1
        self.retried = self.allocator.retries - self.retries
        self.reserved.append(self.allocator.most_reserved)
        self.left = [*self.left, self.allocator.layout()] if like_others else []

    def result(self) -> Replay:
        one = self.allocator
        return Replay(one.most_reserved, one.most_allocated, one.retries, self.count, self._steady(), self.retried)


def _untraced(actions: list[Action], log: Log | None, step: int) -> list[Action]:
    """Return the actions of a step. In step 0 the first micro-batch has the log `log`, if there is one."""
    if log is None or step:
        return actions
    return [action._replace(log=log) if k < len(_BOTH) else action for k, action in enumerate(actions)]


def _most_bytes(events: Sequence[Event]) -> int:
    """Return the most bytes that the events' blocks have at once."""
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


# --- what a process does


def _actions(rank: Rank, order: Order, setup: Setup, stays: frozenset[str] = frozenset()) -> list[Action]:
    """Return the forwards and backwards of one step, in order."""
    chunks = [_micro_batch(profile.run, order, setup, stays) for profile in rank.profiles]
    if rank.turns:
        return [Action(turn.kind, turn.chunk, chunks[turn.chunk], turn.between) for turn in rank.turns]
    micro_batches = chunks * min(setup.micro_batches, _MOST_MICRO_BATCHES)
    if rank.first is not None:
        micro_batches[0] = _micro_batch(rank.first().run, order, setup, stays)
    return [Action(kind, 0, log) for log in micro_batches for kind in _BOTH]


def _micro_batch(run: Trace, order: Order, setup: Setup, stays: frozenset[str]) -> Log:
    whole = unrolled(run)
    batch, seq = setup.micro_batch_size, setup.tokens_per_part
    of_shapes = {shape: numel(shape)[1] for shape in dict.fromkeys([row.shape for row in run.rows])}
    elements = {shape: evaluate(poly, batch, seq) for shape, poly in of_shapes.items()}
    sizes = [elements[row.shape] * row.dtype.itemsize for row in run.rows]
    streams = [order.streams.get(row.name, DEFAULT) for row in run.rows]
    of_blocks = [sizes[i] for i in whole.rows], [streams[i] for i in whole.rows]
    kept = {i: run.rows[k].name for i, k in enumerate(whole.rows) if run.rows[k].name in stays} if stays else {}
    events = [event for event in whole.log if event >= 0 or ~event not in kept] if kept else whole.log
    names = Names(run.rows, whole.rows, whole.segments, partial(whole.layer, run))
    # Transformer Engine's products take workspaces of its own: where torch multiplies first is not known.
    products = {} if setup.engine == "megatron" else first_products(run, events, whole.rows, whole.backward)
    return Log(events, *of_blocks, whole.backward, whole.gradients, kept, names, products)


def _nbytes(row: StorageRow | Row, batch: int, seq: int) -> int:
    return evaluate(numel(row.shape)[1], batch, seq) * row.dtype.itemsize


def _update(setup: Setup, update: Update) -> Log:
    """Return the log of the optimizer's step over every parameter, one after the other."""
    memory = Memory()
    optimizer = load_optimizer(setup.optimizer)
    optimizer.step(memory, _parameters(update), update.dtype, update.dtype, setup.optimizer_implementation)
    return _logged(memory)


def _first_updates(setup: Setup, updates: Sequence[Update]) -> list[Log]:
    """Return the logs of a first step that makes a parameter's states when it comes to that parameter; none if the optimizer
    makes those of all parameters before. What stays allocated is the states."""
    optimizer, how = load_optimizer(setup.optimizer), setup.optimizer_implementation
    if not optimizer.makes_states_in_turn:
        return []
    logs: list[Log] = []
    for update in updates:
        memory = Memory()
        kept: list[Tensor] = []
        for parameter in _parameters(update):
            for state in optimizer.states([parameter], update.dtype, how):
                kept.append(new_tensor(memory, state.shape, state.dtype, state.name, component="optimizer_states"))
            optimizer.step(memory, [parameter], update.dtype, update.dtype, how)
        logs.append(_logged(memory))
    return logs


def _parameters(update: Update) -> list[Parameter]:
    return [Parameter(one.name, one.shape, 1, one.is_matrix, head=one.head) for one, _ in in_turn(update.parameters)]


def _logged(memory: Memory) -> Log:
    sizes = [numel(row.shape)[0] * row.dtype.itemsize for row in memory.rows]
    return Log(list(memory.log), sizes, [DEFAULT] * len(sizes), names=Names(memory.rows, range(len(sizes))))


def _held(rows: Sequence[Row], batch: int, seq: int) -> Held:
    sizes = {id(row): _nbytes(row, batch, seq) for row in rows}
    return Held(rows, [sizes[id(row)] for row, _ in in_turn(rows)])
