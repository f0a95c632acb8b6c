"""The search for the best layouts: the most promising one is looked at more closely, until the best are known exactly.

The layouts of the same degrees are in the queue together, until their common bound of the time is the lowest. Every layout has
a bound of its time that only grows as more is known of it: from the model alone, from a run without a pipeline, from its own
run, then the verdict. The one with the lowest bound is always the next to be looked at. If it has been judged already, no
other one can be better, so it is the next of the answer. Whatever is left has a bound that is above the last answer: it is
slower.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.device.shown import device_items
from memcalc.inputs.gpu import load_gpu
from memcalc.planning.bounds import Bound
from memcalc.planning.evaluation import ALONE, EXACT, JUDGED, Exact, Group, Judged

if TYPE_CHECKING:
    from memcalc.planning.evaluation import Member
    from memcalc.planning.layouts import Degrees, Layout
    from memcalc.planning.target import Key, Target
    from memcalc.planning.workers import Workers

_PATIENCE: Final = 3.0
_RUNS_OF_FRONT: Final = 24
"""The ranks that are run for the front of time against memory: one of a layout, or each stage of FSDP2's pipelines."""
_LOOKS_OF_FRONT: Final = 500
"""The layouts that are looked at for it, most of them by a bound alone. Both numbers keep the picture within a second or two."""
_SMALLER: Final = 0.97
"""The share of the least memory so far below which a layout is the front's next step: a row of the picture is a tenth."""
ALLOCATOR: Final = "what the allocator reserves"


class Candidate(NamedTuple):
    """A layout or a group in the queue, the best first."""

    key: Key
    order: int
    known: int
    seconds: float
    nbytes: int
    of: Layout | Group
    judged: Judged | None = None

    @property
    def first(self) -> Layout:
        """Return the layout, or the first of a group's degrees."""
        return first_of(self.of)

    @property
    def layout(self) -> Layout:
        """Return the layout. A group is none."""
        assert not isinstance(self.of, Group)
        return self.of


class Fit(NamedTuple):
    """A layout that fits, as found."""

    layout: Layout
    seconds: float
    nbytes: int
    judged: Judged


class Near(NamedTuple):
    """A layout or a group that is too large: the bytes that it needs at least, and what most of them are."""

    of: Layout | Group
    nbytes: int
    row: str
    known: int

    @property
    def first(self) -> Layout:
        """Return the layout, or the first of a group's degrees."""
        return first_of(self.of)

    @property
    def over(self) -> int:
        """Return the bytes that the GPU lacks."""
        return self.nbytes - load_gpu(self.first.gpu).capacity


def first_of(of: Layout | Group) -> Layout:
    """Return a layout, or the first of a group's degrees."""
    return of.degrees.first if isinstance(of, Group) else of


def number_of(of: Layout | Group) -> int:
    """Return the number of layouts: one, or those of a group that are not refused."""
    return of.refusals.valid() if isinstance(of, Group) else 1


@dataclass
class Counts:
    """The layouts, by what became of them."""

    enumerated: int = 0
    invalid: Counter[str] = field(default_factory=lambda: Counter[str]())
    """The refused layouts by reason."""
    too_large: Counter[str] = field(default_factory=lambda: Counter[str]())
    """The layouts that do not fit, by what most of their bytes are."""
    misses: int = 0
    """The layouts that miss the target, by their bounds or exactly."""
    evaluated: int = 0
    """The layouts whose own run was made."""
    unknown: Counter[str] = field(default_factory=lambda: Counter[str]())
    """The layouts whose run or time is not known, by reason."""


Progress = Callable[[int, int], None]
"""Is told the layouts that were looked at, and all of them."""


class Search:
    """A search over layouts. It can be stopped at any time, and then has the best so far."""

    def __init__(self, target: Target, workers: Workers, top: int, progress: Progress | None = None) -> None:
        self.target, self.top, self.counts = target, top, Counts()
        self.found: list[Fit] = []
        self.fitting: list[tuple[Layout, float, int]] = []
        """Every layout whose own run is within the GPU's memory: its seconds and bytes."""
        self.near: list[Near] = []
        self.complete = False
        self._workers, self._progress = workers, progress
        self._queue: list[Candidate] = []

    @property
    def slower(self) -> int:
        """Return the number of layouts that are left in the queue."""
        return sum(number_of(one.of) for one in self._queue)

    def run(self, degrees: Iterable[Degrees]) -> None:
        """Search layouts until the best are known, or until Ctrl-C."""
        try:
            self._fill(degrees)
            while self._queue and len(self.found) < self.top:
                self._look()
            self.complete = True
            self._walk_the_front()
        except KeyboardInterrupt:
            self._judge_the_rest()

    def _fill(self, degrees: Iterable[Degrees]) -> None:
        for group in self._workers.groups(degrees):
            self.counts.invalid += group.refusals.refused()
            if number_of(group):
                self._push(self.counts.enumerated, group, ALONE, group.bound)
            self.counts.enumerated += len(group.degrees)

    def _push(self, order: int, of: Layout | Group, known: int, bound: Bound) -> None:
        """Queue a layout or a group, unless it is too large or misses the target."""
        first = first_of(of)
        needs = bound.nbytes + outside_of(first)
        if needs > load_gpu(first.gpu).capacity:
            self._too_large(Near(of, needs, bound.row, known))
            return
        if not self.target.is_met(first.gpu, first.gpus, bound.seconds):
            self.counts.misses += number_of(of)
            return
        key = self.target.key(first.gpu, first.gpus, bound.seconds)
        heapq.heappush(self._queue, Candidate(key, order, known, bound.seconds, bound.nbytes, of))

    def _too_large(self, near: Near) -> None:
        self.counts.too_large[near.row] += number_of(near.of)
        self.near.append(near)

    def _look(self) -> None:
        """Take the best of the queue: answers as far as they are proven, else a closer look at as many as there are
        workers."""
        taken: list[Candidate] = []
        while self._queue and len(taken) < self._workers.count:
            if self._queue[0].known == JUDGED:
                if taken:
                    break
                self._answer(heapq.heappop(self._queue))
                return
            taken.append(heapq.heappop(self._queue))
        try:
            results = self._workers.look([(one.known, one.of) for one in taken])
        except KeyboardInterrupt:
            for one in taken:
                heapq.heappush(self._queue, one)
            raise
        for one, result in zip(taken, results, strict=True):
            self._looked(one, result)
        if self._progress is not None:
            self._progress(self.counts.evaluated, self.counts.evaluated + len(self._queue))

    def _answer(self, one: Candidate) -> None:
        assert one.judged is not None
        self.found.append(Fit(one.layout, one.seconds, one.nbytes, one.judged))

    def _looked(self, one: Candidate, result: Bound | list[Member] | Exact | Judged) -> None:
        if isinstance(result, Bound):
            bound = result._replace(seconds=max(one.seconds, result.seconds))
            self._push(one.order, one.of, one.known + 1, bound)
        elif isinstance(result, list):
            for place, layout, bound in result:
                self._push(one.order + place, layout, one.known + 1, bound)
        elif isinstance(result, Exact):
            self._measured(one, result)
        elif result.fits:
            heapq.heappush(self._queue, one._replace(known=JUDGED, judged=result))
        else:
            self._too_large(Near(one.layout, result.needs, ALLOCATOR, JUDGED))

    def _measured(self, one: Candidate, result: Exact) -> None:
        self.counts.evaluated += 1
        if result.why_not:
            self.counts.unknown[result.why_not] += 1
        elif not result.fits:
            self._too_large(Near(one.layout, result.nbytes, result.row, EXACT))
        else:
            self.fitting.append((one.layout, result.seconds, result.nbytes))
            if not self.target.is_met(one.layout.gpu, one.layout.gpus, result.seconds):
                self.counts.misses += 1
                return
            key = self.target.key(one.layout.gpu, one.layout.gpus, result.seconds)
            new = one._replace(key=key, known=EXACT, seconds=result.seconds, nbytes=result.nbytes)
            heapq.heappush(self._queue, new)

    def _walk_the_front(self) -> None:
        """Run layouts of the answer's engines that are slower and may need less memory, the best first, up to a number of them.

        A layout is not run if its least bytes are not below those of a better one. Ctrl-C ends this without a loss.
        """
        aside: list[Candidate] = []
        runs = looks = 0
        engines = {one.layout.engine for one in self.found}
        least = min((nbytes for _, _, nbytes in self.fitting), default=0)
        try:
            while self._queue and runs < _RUNS_OF_FRONT and looks < _LOOKS_OF_FRONT:
                one = heapq.heappop(self._queue)
                aside.append(one)
                is_known = one.known >= EXACT or one.first.engine not in engines
                if is_known or one.nbytes + outside_of(one.first) >= _SMALLER * least:
                    continue
                (result,) = self._workers.look([(one.known, one.of)])
                aside.pop()
                looks += 1
                if isinstance(result, Exact):
                    runs += one.layout.pp if one.layout.engine == "fsdp2" else 1
                self._looked(one, result)
                least = min((nbytes for _, _, nbytes in self.fitting), default=0)
        except KeyboardInterrupt:
            pass
        for one in aside:
            heapq.heappush(self._queue, one)

    def _judge_the_rest(self) -> None:
        """Answer with the best of those that are known exactly. Verdicts are made for some seconds, and until one fits."""
        end = monotonic() + _PATIENCE
        for one in sorted(one for one in self._queue if one.known >= EXACT):
            if len(self.found) >= self.top or (self.found and monotonic() > end):
                break
            if one.judged is None:
                judged = self._workers.judged_here(one.layout)
                if not judged.fits:
                    continue
                one = one._replace(judged=judged)
            self._answer(one)


_OUTSIDE: Final[dict[tuple[str, int], int]] = {}


def outside_of(layout: Layout) -> int:
    """Return the bytes that a process of a layout holds outside torch."""
    key = layout.gpu, layout.gpus
    if key not in _OUTSIDE:
        _OUTSIDE[key] = sum(item.nbytes for item in device_items(layout.gpus, load_gpu(layout.gpu)))
    return _OUTSIDE[key]
