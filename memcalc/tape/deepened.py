"""A recorded run of few layers, written out as the run of the stack at its real depth.

The log, the blocks, the products and the events are those of a run at that depth, number by number. The stack's
additional periods repeat the late middle period, as in memcalc.tape.unrolled. Raises NotPeriodic for a run that sends
collectives of its own, or whose middle periods differ. Such a run has to be made at its real depth.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, TypeVar

from memcalc.core.noted import Event, Noted, Ready
from memcalc.core.tensor import StorageRow, Streamed, Work
from memcalc.tape.runs import NO_MIDDLE, Trace
from memcalc.tape.stretches import Depth
from memcalc.tape.unrolled import LATE, NotPeriodic, Piece, Unrolling, pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memcalc.core.noted import Where
    from memcalc.tape.unrolled import Periods


def deepened(run: Trace, weights: Sequence[tuple[Where, int]]) -> Trace:
    """Return the run at the depth of a stack with these weights: the name and layer of each weight, and its number of
    elements.

    Raises NotPeriodic if the run cannot be written out.
    """
    assert run.noted is not None
    if run.sent or run.sent_once or run.repeated.more or run.forward_ends:
        raise NotPeriodic("what a run sends, and a run of several micro-batches, are not written out")
    if not run.middle.more:
        return run
    out = _Deepening(run, run.noted, weights)
    for piece in pieces(run):
        out.play(piece)
    return out.finished()


class _Deepening(Unrolling):
    """The trace that is being written. Its blocks are numbered in the order of their allocation."""

    def __init__(self, run: Trace, noted: Noted, weights: Sequence[tuple[Where, int]]) -> None:
        super().__init__(run)
        self.weights = weights
        self.depth = Depth(run, noted, weights)
        self.blocks: list[StorageRow] = []
        self.renames = sorted(run.renamed)
        self.renamed_at: set[int] = set()
        self.forward_end = 0
        self.events: list[Event] = []
        self.events_of: list[list[Event]] = [[] for _ in range(len(run.segments) + 1)]
        for event in noted.events:
            self.events_of[event.segment + 1].append(event)

    def play(self, piece: Piece) -> None:
        """Write one part of the log.

        An entry outside the layers, or in a layer that is no neighbour of the late period, may touch a block of the
        late period. Such an entry is written once for every period that the late one stands for.
        """
        self.enter(piece)
        near = piece.period is not None and abs(piece.period - LATE) < 2
        events, place = self.events_of[piece.segment + 1], piece.start
        for event in events:
            place = self._up_to(event.place, place, piece, near=near)
            moved = self.depth.moved(event, piece, len(self.log), len(self.segments) - 1)
            if isinstance(moved, Ready) and isinstance(event, Ready):
                # the block goes on under the next number: two entries of the log
                moved = moved._replace(after=len(self.log) + event.after - event.place, block=len(self.blocks))
            self.events.append(moved)
        self._up_to(piece.end, place, piece, near=near)

    def _up_to(self, end: int, place: int, piece: Piece, *, near: bool) -> int:
        if near:
            self._entries(place, max(place, end), piece)
            return max(place, end)
        while place < end:
            following, late = place + 1, self.is_late(place)
            while following < (piece.end if late else end) and self.is_late(following) == late:
                following += 1
            if following > end:
                raise NotPeriodic("an event is between blocks of the late period")
            if late:
                for real in range(LATE, LATE + self.periods.more + 1):
                    self._entries(place, following, Piece(piece.segment, place, following, LATE, real))
            else:
                self._entries(place, following, piece)
            place = following
        return place

    def _entries(self, start: int, end: int, piece: Piece) -> None:
        """Write a part of the log as one period of the real stack has it. Raises NotPeriodic if a block is freed
        without being alive, or allocated twice."""
        run, names, live, log, blocks = self.run, self.names, self.live, self.log, self.blocks
        length = self.periods.length
        if start <= run.forward_end < end:
            self.forward_end = len(log) + run.forward_end - start
        renames = self.renames[bisect_left(self.renames, start) : bisect_left(self.renames, end)]
        self.renamed_at.update(len(log) + place - start for place in renames)
        reals: dict[int | None, int | None] = {None: None}
        number = len(blocks)
        for event in run.log[start:end]:
            period, name = names[event if event >= 0 else ~event]
            if period not in reals:
                reals[period] = self.real_of(period, piece)
            real = reals[period]
            key = real, name
            if event < 0:
                alive = live.pop(key, None)
                if alive is None:
                    raise NotPeriodic(f"{key} is not there")
                log.append(~alive)
                continue
            if key in live:
                raise NotPeriodic(f"{key} is there twice")
            live[key] = number
            log.append(number)
            number += 1
            row = run.rows[event]
            if real != period:
                shape, dtype, component, scope, called, layer = row
                assert layer is not None and real is not None and period is not None
                row = StorageRow(shape, dtype, component, scope, called, layer + (real - period) * length)
            blocks.append(row)

    def finished(self) -> Trace:
        run = self.run
        names, elements = zip(*self.weights, strict=True)
        return run._replace(
            log=self.log,
            rows=self.blocks,
            segments=self.segments,
            forward_end=self.forward_end,
            middle=NO_MIDDLE,
            work=tuple(_of_all_layers(run.work, self.periods)),
            streamed=tuple(_of_all_layers(run.streamed, self.periods)),
            renamed=frozenset(self.renamed_at),
            noted=Noted(names, elements, tuple(self.events)),
        )


_Kernel = TypeVar("_Kernel", Work, Streamed)


def _of_all_layers(work: Sequence[_Kernel], periods: Periods) -> Iterator[_Kernel]:
    """Yield the products, or the other kernels, of all layers of the real stack."""
    for one in work:
        period = periods.of(one.layer)
        if one.layer is None or period is None or period < LATE:
            yield one
        else:
            of, where, layer = type(one), one._fields.index("layer"), one.layer
            for more in (periods.more,) if period > LATE else range(periods.more + 1):
                yield of._make((*one[:where], layer + more * periods.length, *one[where + 1 :]))
