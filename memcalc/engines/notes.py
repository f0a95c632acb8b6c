"""Hooks that only note what happens in a run, for an engine that is played over it later (`memcalc/noted.py`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from memcalc.autograd import Checkpoint, Leaf, Recomputation
from memcalc.dims import ONE_DIM, numel
from memcalc.dtypes import uint8
from memcalc.engines.visits import Visit, Visits
from memcalc.families.module import Module, Run
from memcalc.noted import Begins, Ends, Event, Holds, LetsGo, Noted, Ready, Selective, Where
from memcalc.tensor import Memory, Storage, Tensor


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
    """A run in which each gradient goes as soon as it is ready, and that notes when that is."""

    def start(self, run: Run) -> GradientNotes:
        return GradientNotes(run)


class NoteModules(NamedTuple):
    """A run that notes besides when modules begin and end, and which gathered weights its graph refers to."""

    leaves: frozenset[Where] = frozenset()
    """Modules that are gathered whole."""
    replaced: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = ()
    """Functions that the engine puts in the place of torch's."""

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
            self.events.append(Ready(len(memory.log), i, len(memory.sent)))
            memory.relabel(gradient.storage, leaf.shape, "gathered", "gradient not reduced yet", None)

        leaf.ready = ready

    def backward_is_over(self) -> None:
        elements = tuple(numel(weight.shape)[0] for weight in self.run.weights.values())
        layers = tuple(layer for _, layer in self.run.weights)
        self.run.noted = Noted(elements, layers, tuple(self.events), len(self.memory.log))


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
        return loss

    def _begins(self, visit: Visit, forward: bool) -> None:
        memory = self.memory
        phase = "forward" if memory.phase == "forward" else "backward"
        noted = Begins(len(memory.log), visit.visited, forward, phase, self._selective(), len(memory.sent))
        self.events.append(noted)

    def _ends(self, visit: Visit, forward: bool) -> None:
        memory = self.memory
        self.events.append(Ends(len(memory.log), visit.visited, forward, len(memory.sent)))

    def _selective(self) -> Selective | None:
        """The checkpoint that is running, if it keeps some results."""
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
        """A stand-in for the memory that a parameter has been gathered into, which notes how long it is referred to."""
        number = next(self.numbers)
        self.events.append(Holds(len(self.memory.log), number, i))
        return Tensor(_Reference(self.memory, self.events, number), (ONE_DIM,), (1,), uint8)


class _Reference(Storage):
    """A storage of no bytes."""

    __slots__ = ("events", "number")

    def __init__(self, memory: Memory, events: list[Event], number: int) -> None:
        self.memory, self.index = memory, -1
        self.events, self.number = events, number

    def __del__(self) -> None:
        self.events.append(LetsGo(len(self.memory.log), self.number))
