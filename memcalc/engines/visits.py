"""Which module runs when: the visits that an engine's hooks see in forward, in a recomputation and in backward.

DeepSpeed's ZeRO-3 wraps what a module is given and what it returns in autograd functions
(deepspeed/runtime/zero/parameter_offload.py). Here a node knows the module that it was made in: the module's backward
begins with the first of its nodes and is over when the last has run and its weights' gradients are accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from memcalc.autograd import Leaf, Node
from memcalc.families.module import Run
from memcalc.tensor import Tensor

Event = Callable[["Visit", bool], None]
"""What is done when a visit begins or ends; whether in forward."""


class Visit:
    """One call of a module: its own parameters, by their place in definition order."""

    __slots__ = ("begun", "from_outside", "outer", "parameters", "waiting", "where")

    def __init__(self, where: tuple[str, int | None], parameters: frozenset[int], outer: Visit | None) -> None:
        self.where = where
        self.parameters = parameters
        self.outer = outer
        self.waiting = 0
        """Nodes that have not run yet, those of inner modules included."""
        self.begun = False
        self.from_outside = False
        """Whether it was given anything that wants a gradient: else nothing tells that its backward is over."""


_ROOT: Final = ("", None)


class Visits:
    """The visitor of one run."""

    def __init__(
        self, run: Run, begins: Event, ends: Event, gathered: Callable[[int], Tensor | None] = lambda _: None
    ) -> None:
        self.begins, self.ends, self.whole = begins, ends, gathered
        self.places = {key: i for i, key in enumerate(run.weights)}
        self.storages = {weight.storage: i for i, weight in enumerate(run.weights.values())}
        own: dict[tuple[str, int | None], list[int]] = {}
        for (name, layer), i in self.places.items():
            own.setdefault((name.rpartition(".")[0], layer), []).append(i)
        for module, weight in run.external:
            own.setdefault((module, None), []).append(self.places[weight, None])
        self.own = {where: frozenset(parameters) for where, parameters in own.items()}
        self.running: list[Visit] = []
        self.over: list[Visit] = []

    # --- forward

    def enter(self, path: str, layer: int | None, weight: Tensor | None = None) -> bool:
        where = path, layer
        if self.running and self.running[-1].where == where:
            return False
        parameters = self.own.get(where, frozenset[int]())
        if weight is not None:
            given = self.places.get((weight.name, layer))
            parameters = parameters if given is None else parameters | {given}
        visit = Visit(where, parameters, self.running[-1] if self.running else None)
        self.running.append(visit)
        self.begins(visit, True)
        return True

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
        """Of the nodes that backward will come to, count those of each visit."""
        for node in nodes:
            visit: Any = node.visit
            if isinstance(node, Leaf):
                continue
            feeds = {other.visit for other, _ in node.edges if other is not None and not isinstance(other, Leaf)}
            feeds.discard(visit)  # most are: from inside the visit, and so inside all around it
            while visit is not None:
                visit.waiting += 1
                visit.from_outside = visit.from_outside or any(not _within(other, visit) for other in feeds)
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


def _within(inner: Visit | None, visit: Visit) -> bool:
    while inner is not None:
        if inner is visit:
            return True
        inner = inner.outer
    return False
