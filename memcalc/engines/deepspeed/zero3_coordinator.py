"""ZeRO-3's bookkeeping of gathered parameters: deepspeed/runtime/zero/partitioned_param_coordinator.py.

The coordinator knows the order of modules from an earlier step. It gathers the parameters of the module that begins,
prefetches the next ones, and keeps those that are used again soon.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from memcalc.core.noted import Visited

Order = Sequence[Visited]
"""The modules that begin, in forward and then in backward."""


class Thresholds(NamedTuple):
    """The options of zero/config.py, in elements."""

    max_live: int
    max_reuse: int
    persistence: int
    prefetch: int


class Gathered(NamedTuple):
    """One all-gather: `parameters` in definition order, in one flat buffer if there are several."""

    parameters: tuple[int, ...]
    forward: bool


class Handle:
    """All-gathers under way. Their buffers live until the last of their parameters is asked for."""

    __slots__ = ("arrived", "buffers", "parameters")

    def __init__(self) -> None:
        self.parameters: list[int] = []
        """The parameters that are in a buffer with others."""
        self.buffers: list[object] = []
        self.arrived = False


def is_of_several(handle: Handle | None) -> bool:
    """Tell whether several parameters are under way in one buffer."""
    return handle is not None and bool(handle.parameters) and not handle.arrived


class Coordinator:
    """The state of one forward and backward. `launch` begins all-gathers and returns the holder of each parameter's buffer."""

    def __init__(
        self,
        sizes: Sequence[int],
        order: Order,
        thresholds: Thresholds,
        launch: Callable[[Gathered], Mapping[int, Handle | None]],
        arrive: Callable[[Handle | None], None],
        free: Callable[[int], None],
        frozen: frozenset[int] = frozenset(),
    ) -> None:
        self.sizes, self.order, self.thresholds, self.frozen = sizes, order, thresholds, frozen
        self.launch, self.arrive, self.free = launch, arrive, free
        self.persistent = {i for i, n in enumerate(sizes) if n <= thresholds.persistence}
        self.available = set(self.persistent)
        self.in_flight: dict[int, Handle | None] = {}
        self.active: dict[int, set[Any]] = {i: set() for i in range(len(sizes))}
        self.live = 0
        self.step = 0
        self.queue = deque((i, at) for at, begun in enumerate(order) for i in sorted(begun.parameters))
        self.fetched_for: dict[int, int] = {}
        self.backward: dict[Any, frozenset[int]] = {}
        self.recomputed: dict[Any, frozenset[int]] = {}
        """The frozen parameters that a recomputation has used, by the module whose backward it is a part of. They go
        with that module's backward (ds_recompute_parameters)."""

    def fetch(self, module: Any, parameters: frozenset[int], forward: bool, *, recomputing: bool = False) -> None:
        """Begin a module: gather its parameters, wait for them, prefetch (fetch_sub_module)."""
        if not forward:
            self.backward[module] = parameters
        elif recomputing and self.backward and self.frozen & parameters:
            self._goes_with(next(reversed(self.backward)), self.frozen & parameters)
        if parameters:
            self._bring(module, parameters, forward)
        if self.thresholds.prefetch:
            self._prefetch(forward)
        self.step += 1

    def _goes_with(self, owner: Any, parameters: frozenset[int]) -> None:
        """Keep parameters until a module's backward is over (update_recompute_parameters)."""
        self.recomputed[owner] = self.recomputed.get(owner, frozenset()) | parameters
        for i in parameters:
            self.active[i].add(owner)

    def _bring(self, module: Any, parameters: frozenset[int], forward: bool) -> None:
        """Gather the parameters of a module and wait for them."""
        self._gather(parameters, forward)
        for i in parameters:
            self.active[i].add(module)
        self._wait_for(parameters)
        self.available |= parameters
        new = len([i for i in parameters if self.fetched_for.get(i, -1) < self.step])
        seen: set[int] = set()
        while self.queue and len(seen) < new:
            i, at = self.queue.popleft()
            self.fetched_for[i] = at
            seen.add(i)

    def _wait_for(self, parameters: frozenset[int]) -> None:
        """Wait for parameters. A buffer is freed with the last of its parameters.

        The real order is that of a set and differs by rank. Most bytes are alive if one parameter of each all-gather of several
        comes first.
        """
        waiting = sorted([i for i in parameters if i in self.in_flight])
        if len(waiting) < 2:
            for i in waiting:
                self.arrive(self.in_flight.pop(i))
            return
        one_of_each = {id(handle): i for i in reversed(waiting) if is_of_several(handle := self.in_flight[i])}
        for i in sorted(waiting, key=lambda i: one_of_each.get(id(self.in_flight[i])) != i):
            self.arrive(self.in_flight.pop(i))

    def _prefetch(self, forward: bool) -> None:
        queue, sizes, fetched_for = self.queue, self.sizes, self.fetched_for
        most = min(self.thresholds.max_live - self.live, self.thresholds.prefetch)
        wanted: set[int] = set()
        elements = 0
        while queue and elements < most:
            i, at = queue.popleft()
            fetched_for[i] = max(fetched_for.get(i, at), at)
            if i not in self.available and i not in self.in_flight and i not in wanted:
                wanted.add(i)
                elements += sizes[i]
        if wanted:
            self._gather(wanted, forward)

    def _gather(self, parameters: AbstractSet[int], forward: bool) -> None:
        missing = tuple(sorted([i for i in parameters if i not in self.available and i not in self.in_flight]))
        if missing:
            self.live += sum([self.sizes[i] for i in missing])
            self.in_flight.update(self.launch(Gathered(missing, forward)))

    def release(self, module: Any, parameters: frozenset[int], forward: bool, *, is_leaf: bool = False) -> None:
        """End a module: free the parameters that are not used again soon (release_sub_module)."""
        going: set[int] = set()
        if parameters:
            going = {i for i in parameters if i not in self.persistent and self.fetched_for.get(i, -1) <= self.step}
        if going:
            uses, most = self._uses_by_leaves if is_leaf else self._uses, self.thresholds.max_reuse
            going = {i for i in going if not uses.is_soon(i, self.step, most)}
        if not forward:
            self.backward.pop(module, None)
            again = self.recomputed.pop(module, None)
            if again:
                going, parameters = going | (again - self.persistent), parameters | again
        if parameters:
            self._leave(module, parameters, going)

    @cached_property
    def _uses(self) -> _Uses:
        return _Uses(self.sizes, [_seen_by(False, begun) for begun in self.order])

    @cached_property
    def _uses_by_leaves(self) -> _Uses:
        return _Uses(self.sizes, [_seen_by(True, begun) for begun in self.order])

    def release_leftovers(self) -> None:
        """Free what no hook has released when backward is over (release_backward_leftovers)."""
        while self.backward:
            module, parameters = self.backward.popitem()
            parameters |= self.recomputed.pop(module, frozenset())
            self._leave(module, parameters, parameters - self.persistent)

    def _leave(self, module: Any, parameters: frozenset[int], going: set[int] | frozenset[int]) -> None:
        for i in sorted(parameters):
            self.active[i].discard(module)
            if i in going and i in self.available and not self.active[i]:
                self.available.discard(i)
                self.live -= self.sizes[i]
                self.free(i)


class _Uses:
    """The modules of a step that use each parameter, and the number of elements between two of them."""

    def __init__(self, sizes: Sequence[int], order: Sequence[frozenset[int]]) -> None:
        self.places: dict[int, list[int]] = {}
        self.before = [0, *accumulate(sum(sizes[i] for i in parameters) for parameters in order)]
        """The elements of all modules before each place."""
        for place, parameters in enumerate(order):
            for i in parameters:
                self.places.setdefault(i, []).append(place)

    def is_soon(self, parameter: int, step: int, max_reuse: int) -> bool:
        """Tell whether the parameter is used again before `max_reuse` elements have passed."""
        places = self.places.get(parameter, ())
        following = bisect_left(places, step)
        return following < len(places) and self.before[places[following]] - self.before[step] < max_reuse


def _seen_by(leaf: bool, begun: Visited) -> frozenset[int]:
    """Return the parameters that the search for the next use takes a module to have. It looks into modules only if the
    module that ends is a leaf, whatever `begun` is."""
    if leaf:
        return begun.within
    return frozenset() if begun.is_leaf else begun.parameters
