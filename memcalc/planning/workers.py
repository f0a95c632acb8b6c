"""Who evaluates layouts: this process, or one process on each core."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.process import BaseProcess

    from memcalc.planning.bounds import Bound
    from memcalc.planning.evaluation import Evaluator, Exact, Judged
    from memcalc.planning.layouts import Layout

_CHUNK: Final = 400
"""The layouts that a process is given at a time, to be refused or bounded."""


class Floor(NamedTuple):
    """A layout with its bound from the model alone; with the line that refuses it, and None, if it is refused."""

    order: int
    layout: Layout
    refusal: str
    bound: Bound | None


Look = tuple[int, "Layout"]


class Workers:
    """This process alone."""

    count = 1

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def floors(self, layouts: Iterable[Layout]) -> Iterator[Floor]:
        """Yield every layout with its bound or its refusal, in order."""
        for order, layout in enumerate(layouts):
            yield _floor(self._evaluator, order, layout)

    def look(self, looks: Sequence[Look]) -> list[Bound | Exact | Judged]:
        """Return what is to be known next of each layout."""
        return [self._evaluator.look(*one) for one in looks]

    def judged_here(self, layout: Layout) -> Judged:
        """Return the verdict of a layout, made in this process."""
        return self._evaluator.judged(layout)

    def close(self) -> None:
        """End what was started."""


class Processes(Workers):
    """Several processes, forked when the first layouts come. Each has its own runs."""

    def __init__(self, evaluator: Evaluator, count: int) -> None:
        super().__init__(evaluator)
        self.count = count
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[BaseProcess] = set()
        """The processes that were there before."""

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import active_children, get_context

            self._others = {*active_children()}
            self._pool = ProcessPoolExecutor(
                self.count, get_context("fork"), initializer=_begin, initargs=(self._evaluator,)
            )
        return self._pool

    def floors(self, layouts: Iterable[Layout]) -> Iterator[Floor]:
        for found in self._start().map(_floors, _chunks(enumerate(layouts))):
            yield from found

    def look(self, looks: Sequence[Look]) -> list[Bound | Exact | Judged]:
        return list(self._start().map(_look, looks))

    def close(self) -> None:
        if self._pool is not None:
            from multiprocessing import active_children

            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                if process not in self._others:
                    process.terminate()  # it may be in the middle of a long run that nobody waits for


def workers(evaluator: Evaluator, count: int) -> Workers:
    """Return workers on a number of cores; one where processes cannot be forked."""
    from multiprocessing import get_all_start_methods

    forks = "fork" in get_all_start_methods()
    return Processes(evaluator, count) if count > 1 and forks else Workers(evaluator)


_own: list[Evaluator] = []
"""The evaluator of a started process."""


def _begin(evaluator: Evaluator) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    _own.append(evaluator)


def _floor(evaluator: Evaluator, order: int, layout: Layout) -> Floor:
    refusal = evaluator.refusal(layout)
    return Floor(order, layout, refusal, None if refusal else evaluator.floor(layout))


def _floors(layouts: Sequence[tuple[int, Layout]]) -> list[Floor]:
    return [_floor(_own[0], order, layout) for order, layout in layouts]


def _look(look: Look) -> Any:
    return _own[0].look(*look)


def _chunks(layouts: Iterable[tuple[int, Layout]]) -> Iterator[list[tuple[int, Layout]]]:
    rest = iter(layouts)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk
