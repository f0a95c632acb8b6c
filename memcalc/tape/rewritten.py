"""An engine's blocks between the events of a recorded run: the run's log is written again, with what the engine allocates
and frees where it does so.

What an engine only adds, and what it holds longer, needs no run of its own: one recorded run serves all rank counts, bucket
sizes and ranks. The result is the trace that a run with the engine's hooks would leave, number by number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memcalc.core.dims import Dim
from memcalc.core.tensor import Memory, Sent, StorageRow

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.core.noted import Noted
    from memcalc.tape.runs import Trace


class Out(Protocol):
    """The run that an engine acts over, while it goes on. An engine's block is freed when nobody refers to it any more."""

    def reach(self, place: int) -> None:
        """The run goes on up to this place."""
        ...

    def block(self, name: str, dim: str, elements: int, dtype: DType) -> object:
        """A new block of the engine, of so many elements; it belongs to no layer."""
        ...

    def kept(self, number: int) -> object:
        """The engine refers to a block of the run from here on."""
        ...

    def send(self, sent: Sent, after: int) -> None:
        """The engine calls a collective, after so many of the run's own."""
        ...


class OverRun(Protocol):
    """An engine that acts while a recorded run goes on."""

    def play(self, noted: Noted, out: Out) -> None:
        """Act between the events."""
        ...


class Block:
    """A block of the engine's own: it is freed when nobody refers to it any more."""

    __slots__ = ("log", "number")

    def __init__(self, memory: Memory, row: StorageRow) -> None:
        self.log, self.number = memory.log, len(memory.rows)
        memory.rows.append(row)
        memory.log.append(self.number)

    def __del__(self) -> None:
        self.log.append(~self.number)


class Kept:
    """A block of the old log that the engine refers to: it is freed when neither the run nor the engine does so any more."""

    __slots__ = ("number", "out")

    def __init__(self, out: Rewriting, number: int) -> None:
        self.out, self.number = out, number
        out.hold(number)

    def __del__(self) -> None:
        self.out.let_go(self.number)


def rewritten(run: Trace, engine: OverRun) -> Trace:
    """The run with the engine's blocks in it."""
    assert run.noted is not None
    out = Rewriting(run)
    engine.play(run.noted, out)
    return out.finished()


class Rewriting:
    """A log that is being written again: events of the old one are copied, an engine's blocks come between."""

    def __init__(self, run: Trace) -> None:
        self.run = run
        self.memory = Memory()
        """The log that is written, and what the engine sends."""
        self._new: dict[int, int] = {}
        """The number that a block of the old log has now."""
        self._copied: list[int] = []
        """Where each event of the old log is now."""
        self._reached: list[int] = [0]
        """How long the new log was when each event of the old one was reached: a segment begins before the engine's blocks."""
        self._held: dict[int, bool] = {}
        """Blocks that the engine holds longer than the old log does, and whether that has freed them."""
        self._sent = 0

    def reach(self, place: int) -> None:
        """Copy the log up to there."""
        log, rows = self.memory.log, self.memory.rows
        for event in self.run.log[len(self._copied) : place]:
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

    def send(self, sent: Sent, after: int) -> None:
        self._copy_sent(after)
        self.memory.sent.append(sent)

    def _copy_sent(self, end: int) -> None:
        self.memory.sent += self.run.sent[self._sent : end]
        self._sent = max(self._sent, end)

    def block(self, name: str, dim: str, elements: int, dtype: DType) -> Block:
        return Block(self.memory, StorageRow((Dim(dim, elements),), dtype, "gathered", "", name, None))

    def kept(self, number: int) -> Kept:
        return Kept(self, number)

    def hold(self, number: int) -> None:
        self._held[number] = False

    def let_go(self, number: int) -> None:
        if self._held.pop(number):
            self.memory.log.append(~self._new[number])

    def finished(self) -> Trace:
        """The trace, when all of the old log is copied."""
        run, memory = self.run, self.memory
        self.reach(len(run.log))
        self._copy_sent(len(run.sent))
        reached = self._reached
        return run._replace(
            log=list(memory.log),
            rows=memory.rows,
            segments=[(reached[place], phase, layer) for place, phase, layer in run.segments],
            forward_end=reached[run.forward_end],
            sent=tuple(memory.sent),
            renamed=frozenset(self._copied[place] for place in run.renamed),
            noted=None,
        )
