"""An engine's blocks between the events of a recorded run. The log is written again, with each allocation and free of
the engine in its place.

An engine that only adds blocks, or holds blocks longer, needs no run of its own: one recorded run serves all rank
counts, bucket sizes and ranks. The result is the trace that a run with the engine's hooks would leave, number by
number.
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
    """The run that an engine acts over, as it goes on. A block of the engine is freed when its last reference goes."""

    takes_sent: bool
    """False if `send` does nothing."""

    def reach(self, place: int) -> None:
        """Let the run go on up to this place."""
        ...

    def block(self, name: str, dim: str, elements: int, dtype: DType) -> object:
        """Allocate a block of the engine with this many elements; it belongs to no layer."""
        ...

    def block_of_run(self, number: int) -> object:
        """Refer to a block of the run from here on."""
        ...

    def send(self, sent: Sent, after: int) -> None:
        """Call a collective of the engine, after the first `after` collectives of the run itself."""
        ...

    def stays(self, block: object) -> None:
        """Refer to a block of the engine until the step is over."""
        ...


class OverRun(Protocol):
    """An engine that acts while a recorded run goes on."""

    def play(self, noted: Noted, out: Out) -> None:
        """Act between the events."""
        ...


class Block:
    """A block of the engine's own. It is freed when its last reference goes."""

    __slots__ = ("log", "number")

    def __init__(self, memory: Memory, row: StorageRow) -> None:
        self.log, self.number = memory.log, len(memory.rows)
        memory.rows.append(row)
        memory.log.append(self.number)

    def __del__(self) -> None:
        self.log.append(~self.number)


class Kept:
    """A block of the old log that the engine refers to. It is freed when both the run and the engine have let it go."""

    __slots__ = ("number", "out")

    def __init__(self, out: Rewriting, number: int) -> None:
        self.out, self.number = out, number
        out.hold(number)

    def __del__(self) -> None:
        self.out.let_go(self.number)


def rewritten(run: Trace, engine: OverRun) -> Trace:
    """Return the run with the engine's blocks in it."""
    assert run.noted is not None
    out = Rewriting(run)
    engine.play(run.noted, out)
    return out.finished()


class Rewriting:
    """A log that is being written again: events of the old log are copied, the engine's blocks come between them."""

    takes_sent = True

    def __init__(self, run: Trace) -> None:
        self.run = run
        self.memory = Memory()
        """The new log, and the collectives of the run and the engine."""
        self._new: dict[int, int] = {}
        """Block of the old log -> its number in the new one."""
        self._copied: list[int] = []
        """The place in the new log of each event of the old one."""
        self._left_out: set[int] = set()
        """The places in the old log of the frees that are not copied, as the engine refers to the block."""
        self._held: dict[int, bool] = {}
        """The blocks that the engine refers to; True if the old log has freed them."""
        self._sent = 0
        self._sent_at: list[int] = []
        self._stays: list[object] = []

    def reach(self, place: int) -> None:
        """Copy the old log up to this place."""
        copied, held, new = self._copied, self._held, self._new
        if place <= len(copied):
            return
        log, rows, old = self.memory.log, self.memory.rows, self.run.rows
        number, at = len(rows), len(log)
        for event in self.run.log[len(copied) : place]:
            copied.append(at)
            if event >= 0:
                new[event] = number
                log.append(number)
                rows.append(old[event])
                number += 1
            elif ~event in held:
                held[~event] = True
                self._left_out.add(len(copied) - 1)
                continue
            else:
                log.append(~new[~event])
            at += 1

    def _reached(self, place: int) -> int:
        """Return the length of the new log when a place of the old one was reached. A segment begins before the engine's
        blocks."""
        return 0 if not place else self._copied[place - 1] + (place - 1 not in self._left_out)

    def send(self, sent: Sent, after: int) -> None:
        self._copy_sent(after)
        self.memory.sent.append(sent)
        self._sent_at.append(len(self.memory.log))

    def _copy_sent(self, end: int) -> None:
        own = self.run.sent[self._sent : end]
        self.memory.sent += own
        self._sent_at += [len(self.memory.log)] * len(own)
        self._sent = max(self._sent, end)

    def block(self, name: str, dim: str, elements: int, dtype: DType) -> Block:
        return Block(self.memory, StorageRow((Dim(dim, elements),), dtype, "gathered", "", name, None))

    def block_of_run(self, number: int) -> Kept:
        return Kept(self, number)

    def stays(self, block: object) -> None:
        self._stays.append(block)

    def hold(self, number: int) -> None:
        self._held[number] = False

    def let_go(self, number: int) -> None:
        if self._held.pop(number):
            self.memory.log.append(~self._new[number])

    def finished(self) -> Trace:
        """Return the trace, with all of the old log copied."""
        run, memory = self.run, self.memory
        self.reach(len(run.log))
        self._copy_sent(len(run.sent))
        reached = self._reached
        return run._replace(
            log=list(memory.log),
            rows=memory.rows,
            segments=[(reached(place), phase, layer) for place, phase, layer in run.segments],
            forward_end=reached(run.forward_end),
            sent=tuple(memory.sent),
            sent_at=tuple(self._sent_at),
            renamed=frozenset(self._copied[place] for place in run.renamed),
            noted=None,
        )
