"""Who evaluates layouts: this process, or one process on each core."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.process import BaseProcess

    from memcalc.planning.bounds import Bound
    from memcalc.planning.evaluation import Evaluator, Exact, Group, Judged, Member
    from memcalc.planning.layouts import Degrees, Layout

_CHUNK: Final = 20
"""The degrees whose layouts a process is given at a time, to be refused or bounded."""


Look = tuple[int, "Layout | Group"]


class Workers:
    """This process alone."""

    count = 1

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def groups(self, degrees: Iterable[Degrees]) -> Iterator[Group]:
        """Yield the layouts of each degrees with their bound and their refusals, in order."""
        return map(self._evaluator.group, degrees)

    def look(self, looks: Sequence[Look]) -> list[Bound | list[Member] | Exact | Judged]:
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

    def groups(self, degrees: Iterable[Degrees]) -> Iterator[Group]:
        for found in self._start().map(_groups, _chunks(degrees)):
            yield from found

    def look(self, looks: Sequence[Look]) -> list[Bound | list[Member] | Exact | Judged]:
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


def _groups(degrees: Sequence[Degrees]) -> list[Group]:
    return [_own[0].group(one) for one in degrees]


def _look(look: Look) -> Any:
    return _own[0].look(*look)


def _chunks(degrees: Iterable[Degrees]) -> Iterator[list[Degrees]]:
    rest = iter(degrees)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk
