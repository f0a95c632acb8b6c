"""An engine's blocks between the events of a recorded run: the run's log is written again, with what the engine allocates
and frees where it does so.

What an engine only adds, and what it holds longer, needs no run of its own: one recorded run serves all rank counts, bucket
sizes and ranks. The result is the trace that a run with the engine's hooks would leave, number by number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from memcalc.tensor import StorageRow

if TYPE_CHECKING:
    from memcalc.runs import Trace


class OverRun(Protocol):
    """An engine that acts while a recorded run goes on."""

    def play(self, run: Trace) -> Trace:
        """The run with the engine's blocks in it."""
        ...


class GradientsReady(NamedTuple):
    """The gradients of a run, as it has noted them."""

    order: tuple[int, ...]
    """Parameters in the order in which backward has their gradients ready, by their place in definition order."""
    elements: tuple[int, ...]
    """The elements of each of them."""
    places: tuple[int, ...]
    """Where in the log each one is: the block that is the gradient comes there."""
    over: int
    """Where in the log backward is over."""


class Rewriting:
    """A log that is being written again: events of the old one are copied, an engine's blocks come between."""

    def __init__(self, run: Trace) -> None:
        self.run = run
        self.log: list[int] = []
        self.rows: list[StorageRow] = []
        self._new: dict[int, int] = {}
        """The number that a block of the old log has now."""
        self._copied: list[int] = []
        """Where each event of the old log is now."""
        self._reached: list[int] = [0]
        """How long the new log was when each event of the old one was reached: a segment begins before the engine's blocks."""
        self._held: dict[int, bool] = {}
        """Blocks that the engine holds longer than the old log does, and whether that has freed them."""

    def copy(self, end: int) -> None:
        """Copy the events up to `end` of the old log."""
        log, rows = self.log, self.rows
        for event in self.run.log[len(self._copied) : end]:
            self._copied.append(len(log))
            if event >= 0:
                self._new[event] = len(rows)
                log.append(len(rows))
                rows.append(self.run.rows[event])
            elif ~event in self._held:
                self._held[~event] = True
            else:
                log.append(~self._new[~event])
            self._reached.append(len(log))

    def allocate(self, row: StorageRow) -> int:
        """A new block of the engine."""
        block = len(self.rows)
        self.rows.append(row)
        self.log.append(block)
        return block

    def free(self, block: int) -> None:
        """One of the engine's blocks goes."""
        self.log.append(~block)

    def hold(self, block: int) -> None:
        """The engine holds a block of the old log."""
        self._held[block] = False

    def let_go(self, block: int) -> None:
        """It does no more: the block goes, unless something else still has it."""
        if self._held.pop(block):
            self.free(self._new[block])

    def finished(self) -> Trace:
        """The trace, when all of the old log is copied."""
        run = self.run
        self.copy(len(run.log))
        reached = self._reached
        return run._replace(
            log=self.log,
            rows=self.rows,
            segments=[(reached[place], phase, layer) for place, phase, layer in run.segments],
            forward_end=reached[run.forward_end],
            renamed=frozenset(self._copied[place] for place in run.renamed),
        )
