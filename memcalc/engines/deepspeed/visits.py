"""Visits of modules: which module runs when, as an engine's hooks see it in forward, in a recomputation and in
backward.

DeepSpeed's ZeRO-3 wraps a module's inputs and outputs in autograd functions
(deepspeed/runtime/zero/parameter_offload.py). Here a node knows the module that it was made in. The module's backward
begins with the first of its nodes. It is over when the last has run and its weights' gradients are accumulated. Modules
within a leaf (utils/z3_leaf_module.py) have no hooks: their nodes belong to the leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from memcalc.core.autograd import Leaf, Node
from memcalc.core.checkpoint import Recomputation
from memcalc.core.noted import Visited, Where
from memcalc.core.tensor import Tensor
from memcalc.families.base.module import Module, Run

Event = Callable[["Visit", bool], None]
"""Called when a visit begins or ends. The second argument is True in forward."""


class Visit:
    """One call of a module."""

    __slots__ = ("begun", "from_outside", "outer", "visited", "waiting")

    def __init__(self, visited: Visited, outer: Visit | None) -> None:
        self.visited = visited
        self.outer = outer
        self.waiting = 0
        """The number of nodes that have not run yet, including those of inner modules."""
        self.begun = False
        self.from_outside = False
        """True if an input requires a gradient. Otherwise nothing tells that the module's backward is over."""


class Visits:
    """The visitor of one run."""

    def __init__(
        self,
        run: Run,
        leaves: AbstractSet[Where],
        begins: Event,
        ends: Event,
        gathered: Callable[[int], Tensor | None],
    ) -> None:
        self.leaves, self.begins, self.ends, self.whole = leaves, begins, ends, gathered
        self.memory = run.memory
        self.places = {key: i for i, key in enumerate(run.weights)}
        self.storages = {weight.storage: i for i, weight in enumerate(run.weights.values())}
        own: dict[Where, list[int]] = {}
        within: dict[Where, list[int]] = {}
        modules = [(*_parent(where), i) for where, i in self.places.items()]
        for path, layer, i in [*modules, *self._external(run)]:
            own.setdefault((path, layer), []).append(i)
            for where in _around(path, layer):
                within.setdefault(where, []).append(i)
        self.own = {where: frozenset(parameters) for where, parameters in own.items()}
        self.within = {where: frozenset(parameters) for where, parameters in within.items()}
        self.running: list[Visit] = []
        self.over: list[Visit] = []

    def _external(self, run: Run) -> Iterator[tuple[str, int | None, int]]:
        for path, weight in run.external:
            for (name, layer), i in self.places.items():
                if name == weight:
                    yield path, layer if "*" in path else None, i

    # --- forward

    def enter(self, path: str, layer: int | None, weights: Sequence[Tensor] = ()) -> bool:
        where = path, layer
        outer = self.running[-1] if self.running else None
        if outer is not None and (outer.visited.where == where or outer.visited.is_leaf):
            return False
        if self._is_recomputed(where):
            return False
        own, within = (of.get(where, frozenset[int]()) for of in (self.own, self.within))
        if given := [self.places[key] for weight in weights if (key := (weight.name, layer)) in self.places]:
            own, within = own.union(given), within.union(given)
        is_leaf = where in self.leaves
        visit = Visit(Visited(where, within if is_leaf else own, within, is_leaf), outer)
        self.running.append(visit)
        self.begins(visit, True)
        return True

    def _is_recomputed(self, where: Where) -> bool:
        """Tell whether a module's own call contains the running checkpoint, as in transformers' layers: the
        recomputation begins behind the module's hooks. Megatron's checkpoint is around the layer's call."""
        if self.memory.reentered == where:
            return True
        checkpoint = self.memory.checkpoint
        if not isinstance(checkpoint, Recomputation) or not checkpoint.frame.early_stop:
            return False
        m = checkpoint.frame.args[0]
        return isinstance(m, Module) and (m.path, m.layer) == where

    def leave(self, *, done: bool) -> None:
        visit = self.running.pop()
        if done:
            self.ends(visit, True)

    def gathered(self, view: Tensor) -> Tensor | None:
        place = self.storages.get(view.storage)
        return None if place is None else self.whole(place)

    def current(self) -> Visit | None:
        return self.running[-1] if self.running else None

    # --- backward

    def backward_begins(self, nodes: Iterable[Node]) -> None:
        """Count the nodes of each visit that backward will run."""
        own: dict[Visit, int] = {}
        for node in nodes:
            visit: Any = node.visit
            if visit is None or isinstance(node, Leaf):
                continue
            own[visit] = own.get(visit, 0) + 1
            for other, _ in node.edges:  # most come from inside the visit, and so from inside all around it
                if other is not None and other.visit is not visit and not isinstance(other, Leaf):
                    _comes_from(other.visit, visit)
        for visit, count in own.items():
            while visit is not None:
                visit.waiting += count
                visit = visit.outer

    def before(self, node: Node) -> None:
        for visit in self.over:
            if visit.from_outside:
                self.ends(visit, False)
        self.over.clear()
        visit: Visit | None = node.visit
        beginning: list[Visit] = []
        while visit is not None and not visit.begun:
            visit.begun = True
            beginning.append(visit)
            visit = visit.outer
        for visit in reversed(beginning):
            self.begins(visit, False)

    def after(self, node: Node) -> None:
        if isinstance(node, Leaf):
            return
        visit: Visit | None = node.visit
        while visit is not None:
            visit.waiting -= 1
            if not visit.waiting:
                self.over.append(visit)
            visit = visit.outer

    def backward_ends(self) -> None:
        for visit in self.over:
            if visit.from_outside:
                self.ends(visit, False)
        self.over.clear()


def _comes_from(other: Visit | None, visit: Visit | None) -> None:
    """Note an input that a visit, and those around it, have from another visit outside."""
    while visit is not None:
        visit.from_outside = visit.from_outside or not _within(other, visit)
        visit = visit.outer


def _within(inner: Visit | None, visit: Visit) -> bool:
    while inner is not None:
        if inner is visit:
            return True
        inner = inner.outer
    return False


def _parent(weight: Where) -> Where:
    """Return the module that has a weight."""
    name, layer = weight
    return name.rpartition(".")[0], layer


def _around(path: str, layer: int | None) -> Iterator[Where]:
    """Yield a module, and all modules that it is in."""
    while path:
        yield path, layer if "*" in path else None
        path = path.rpartition(".")[0]
    yield "", None
