"""Hooks that only record the events of a run, for an engine that is played over it later (`memcalc/core/noted.py`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from memcalc.core.autograd import Leaf, Node
from memcalc.core.checkpoint import Checkpoint, Recomputation
from memcalc.core.dims import ONE_DIM, numel
from memcalc.core.dtypes import uint8
from memcalc.core.noted import Begins, Ends, Event, Holds, LetsGo, Noted, Over, Ready, Selective, Where
from memcalc.core.tensor import Storage, Tensor, new_tensor
from memcalc.engines.deepspeed.visits import Visit, Visits
from memcalc.families.base.module import Module, Run

if TYPE_CHECKING:
    from memcalc.core.dims import Shape


class NoHooks:
    """Hooks that do nothing."""

    def before_forward(self) -> None: ...

    def layer(self, forward: Callable[..., object], m: Module, *args: object) -> object:
        return forward(m, *args)

    def after_forward(self, loss: Tensor) -> Tensor:
        return loss

    def after_backward(self) -> None: ...

    def backward_is_over(self) -> None: ...


class NoteGradients(NamedTuple):
    """Makes the hooks of a run that frees each gradient when it is ready, and records that event."""

    def start(self, run: Run) -> GradientNotes:
        return GradientNotes(run)


class NoteKeptGradients(NamedTuple):
    """Makes the hooks of a run that records the same events for an engine that keeps the gradients. The run frees them all
    the same."""

    def start(self, run: Run) -> KeptGradientNotes:
        return KeptGradientNotes(run)


class NoteModules(NamedTuple):
    """Makes the hooks of a run that also records when modules begin and end, and which gathered weights its graph
    refers to."""

    leaves: frozenset[Where] = frozenset()
    """The modules that are gathered whole."""
    replaced: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = ()
    """Functions of torch, with the functions that the engine calls instead."""

    def start(self, run: Run) -> ModuleNotes:
        return ModuleNotes(run, self)


class GradientNotes(NoHooks):
    """The hooks of one step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.memory = run.memory
        self.events: list[Event] = []
        for i, weight in enumerate(run.weights.values()):
            if isinstance(weight.node, Leaf):
                self._hook(i, weight.node)

    def _hook(self, i: int, leaf: Leaf) -> None:
        def ready(gradient: Tensor) -> None:
            leaf.grad = None
            memory = self.memory
            place = len(memory.log)
            after, block = place + 2, len(memory.rows)
            self.events.append(Ready(place, self.segment, after, block, i, len(memory.sent)))
            memory.relabel(gradient.storage, leaf.shape, "gathered", "gradient not reduced yet", None)

        leaf.ready = ready

    def backward_is_over(self) -> None:
        weights, memory = self.run.weights, self.memory
        elements = tuple(numel(_held(self.run, weight))[0] for weight in weights.values())
        self.events.append(Over(len(memory.log), self.segment, len(memory.sent)))
        self.run.noted = Noted(tuple(weights), elements, tuple(self.events))

    @property
    def segment(self) -> int:
        """Return the number of the log's segment that is being written."""
        return len(self.memory.segments) - 1


def _held(run: Run, weight: Tensor) -> Shape:
    """Return the shape of a module's own parameter."""
    packing = run.packing_of(weight)
    return weight.shape if packing is None else packing.stored(weight.shape)[0].shape


class KeptGradientNotes(GradientNotes):
    """The hooks of one step whose gradients stay gradients. One that is added to an earlier micro-batch's does not stay."""

    def _hook(self, i: int, leaf: Leaf) -> None:
        def ready(gradient: Tensor) -> None:
            leaf.grad = None
            memory, place = self.memory, len(self.memory.log)
            self.events.append(Ready(place, self.segment, place + 2, len(memory.rows), i, len(memory.sent)))
            if leaf.accumulating:
                memory.relabel(gradient.storage, leaf.shape, "gathered", "gradient of the last micro-batch", None)
            else:
                memory.relabel(gradient.storage, leaf.shape, "gradients", leaf.scope, leaf.weight_layer)

        leaf.ready = ready


class ModuleNotes(GradientNotes):
    """The hooks of one step, in which the model is a module too."""

    def __init__(self, run: Run, how: NoteModules) -> None:
        super().__init__(run)
        self.visits = Visits(run, how.leaves, self._begins, self._ends, self._referred_to)
        self.memory.visitor = self.visits
        self.memory.kernels = {**self.memory.kernels, **dict(how.replaced)}
        self.numbers = count()
        self.frames: WeakKeyDictionary[Checkpoint, int] = WeakKeyDictionary()

    def before_forward(self) -> None:
        self.visits.enter("", None)

    def after_forward(self, loss: Tensor) -> Tensor:
        self.visits.leave(done=True)
        node = Node(self.memory, _scaled_backward, (loss,))
        return Tensor(loss.storage, loss.shape, loss.strides, loss.dtype, node)

    def _begins(self, visit: Visit, forward: bool) -> None:
        memory = self.memory
        phase = "forward" if memory.phase == "forward" else "backward"
        place, sent = len(memory.log), len(memory.sent)
        self.events.append(Begins(place, self.segment, visit.visited, forward, phase, self._selective(), sent))

    def _ends(self, visit: Visit, forward: bool) -> None:
        memory = self.memory
        self.events.append(Ends(len(memory.log), self.segment, visit.visited, forward, len(memory.sent)))

    def _selective(self) -> Selective | None:
        """Return the running checkpoint, if it keeps the results of some ops."""
        within = self.memory.checkpoint
        frame = within.frame if isinstance(within, Recomputation) else within
        if not isinstance(frame, Checkpoint) or frame.context is None:
            return None
        m = frame.args[0]
        if frame not in self.frames:
            self.frames[frame] = next(self.numbers)
        where = (m.path, m.layer) if isinstance(m, Module) else None
        return Selective(self.frames[frame], where, frame is not within)

    def _referred_to(self, i: int) -> Tensor:
        """Return a stand-in for the memory that a parameter has been gathered into. It records how long it is referred
        to."""
        number = next(self.numbers)
        self.events.append(Holds(len(self.memory.log), self.segment, number, i))
        return Tensor(_Reference(self, number), (ONE_DIM,), (1,), uint8)


def _scaled_backward(_: Node, grads: list[Tensor]) -> list[Tensor]:
    """Return the gradient of the loss that the model returned: the engine scales it (`_scaled_loss` in engine.py)."""
    return [new_tensor(grads[0].memory, (), grads[0].dtype, "gradient of the loss")]


class _Reference(Storage):
    """A storage of no bytes."""

    __slots__ = ("notes", "number")

    def __init__(self, notes: ModuleNotes, number: int) -> None:
        self.memory, self.index = notes.memory, -1
        self.notes, self.number = notes, number

    def __del__(self) -> None:
        notes = self.notes
        notes.events.append(LetsGo(len(self.memory.log), notes.segment, self.number))
