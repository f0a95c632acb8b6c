"""A run's allocations and frees in their order, for the stack at its real depth.

A profile's run has a few periods of layers. The periods between the first and the last ones are written out here:
every additional period does what the late middle period does, to its own blocks and to its neighbours'. A block is
matched with a block of another period by the module and phase that allocated it, its name, size and dtype, and its
number among equal ones. Blocks that the engine or the caller holds (parameters, buffers, the batch) are left out: they
are allocated before the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import pairwise
from typing import NamedTuple

from memcalc.core.dims import numel
from memcalc.tape.runs import Trace


class Unrolled(NamedTuple):
    """The written-out log. `log` holds `i` where block number `i` is allocated and `~i` where it is freed."""

    log: list[int]
    rows: list[int]
    """The row of the run that each block was allocated as."""
    backward: int
    """The place at which backward begins."""
    gradients: tuple[int, ...]
    """The blocks that are gradients in the end, in the order in which they became gradients."""
    segments: list[tuple[int, str, int | None]]
    """The places in `log` at which another phase or layer begins, with the phase and the layer of the real stack."""
    reals: list[int | None]
    """The period of the real stack that each block belongs to; empty for a run at the real depth."""

    def layer(self, run: Trace, block: int) -> int | None:
        """Return the layer of the real stack that a block of this run belongs to."""
        layer, real = run.rows[self.rows[block]].layer, self.reals[block] if self.reals else None
        if layer is None or real is None:
            return layer
        periods = periods_of(run)
        period = periods.of(layer)
        return layer if period is None else layer + (real - period) * periods.length


class NotPeriodic(Exception):
    """Raised where the middle periods of a run differ."""


def unrolled(run: Trace) -> Unrolled:
    """Return a run's log at the real depth.

    Raises NotPeriodic if a block has no equal in the other period that is treated alike, and for a pipeline's run that
    has left micro-batches out.
    """
    if run.repeated.more:
        raise NotPeriodic("micro-batches that were left out of a run are not written out")
    if not run.middle.more:
        return _as_it_is(run)
    out = Unrolling(run)
    for piece in pieces(run):
        out.play(piece)
    return Unrolled(out.log, out.rows, out.backward, tuple(out.gradients), out.segments, out.reals)


def _held(component: str) -> bool:
    return component in ("parameters", "buffers")


def _as_it_is(run: Trace) -> Unrolled:
    """Return the log of a run at its real depth. A renamed block keeps its first number."""
    log: list[int] = []
    rows: list[int] = []
    number: dict[int, int] = {}
    gradients: dict[int, None] = {}
    segments: list[tuple[int, str, int | None]] = []
    backward = renamed = -1
    held = [_held(row.component) for row in run.rows]
    is_gradient = [row.component == "gradients" for row in run.rows]
    is_renamed, forward_end, count = run.renamed, run.forward_end, 0
    follows = False  # the event right after a renamed one
    for (start, phase, layer), (end, _, _) in pairwise([(0, "", None), *run.segments, (len(run.log), "", None)]):
        segments.append((len(log), phase, layer))
        for place, event in enumerate(run.log[start:end], start):
            if place == forward_end:
                backward = len(log)
            if place in is_renamed:
                renamed = number.pop(~event, -1)
                follows = True
            elif follows:
                follows = False
                _rename(run, number, event, renamed, log)
                if is_gradient[event]:
                    gradients[renamed] = None
            elif event >= 0:
                if not held[event]:
                    number[event] = count
                    log.append(count)
                    rows.append(event)
                    if is_gradient[event]:
                        gradients[count] = None
                    count += 1
            elif ~event in number:
                log.append(~number.pop(~event))
    return Unrolled(log, rows, backward, tuple(gradients), segments, [])


def _rename(run: Trace, number: dict[int, int], event: int, renamed: int, log: list[int]) -> None:
    """Give a renamed block its new owner: a block that is the caller's from here on replaces the one of the step
    before, which is freed."""
    if renamed < 0:
        return
    if _held(run.rows[event].component):
        log.append(~renamed)
    else:
        number[event] = renamed


class Piece(NamedTuple):
    """A part of the run's log, and the period of the real stack that runs it."""

    segment: int
    """The segment of the run that the piece is a part of; -1 before the first segment."""
    start: int
    end: int
    period: int | None
    """The period in the run; None outside the layers. `real` is the period in the real stack."""
    real: int | None


class Periods(NamedTuple):
    """The layers of a run in periods. In the real stack `more` periods come before those from LATE on."""

    first: int
    """The first layer of the early middle period."""
    length: int
    more: int

    def of(self, layer: int | None) -> int | None:
        """Return the period of a layer, counted from the early middle one; None outside the layers and without middle
        periods."""
        return None if layer is None or not self.length else (layer - self.first) // self.length


def periods_of(run: Trace) -> Periods:
    return Periods(run.middle.early.start, len(run.middle.early), run.middle.more)


LATE = 1


def pieces(run: Trace) -> Iterator[Piece]:
    """Yield the parts of the log in the order of the real stack.

    The late period's parts come once for every period that it stands for. Their order is that in which the run goes
    through the stack: upwards in forward, downwards in backward.
    """
    periods = periods_of(run)
    cuts = [*run.segments, (len(run.log), "", None)]
    here: list[tuple[int, int, int]] = []  # the late period's parts, of forward or of backward
    before = LATE - 1
    if cuts[0][0]:
        yield Piece(-1, 0, cuts[0][0], None, None)
    for i, ((start, phase, layer), (end, following, after)) in enumerate(pairwise(cuts)):
        period = periods.of(layer)
        if period == LATE:
            here.append((i, start, end))
            if following == phase and periods.of(after) == LATE:
                continue
            reals = range(LATE, LATE + periods.more + 1)
            for real in reals if before < LATE else reversed(reals):
                yield from (Piece(*part, LATE, real) for part in here)
            here = []
        else:
            before = before if period is None else period
            shift = periods.more if period is not None and period > LATE else 0
            yield Piece(i, start, end, period, None if period is None else period + shift)


class Unrolling:
    """The log that is being written. `live` has the number of every live block by its period in the real stack and its
    name."""

    def __init__(self, run: Trace) -> None:
        self.run = run
        self.periods = periods_of(run)
        self.names = _names(run, self.periods)
        self.live: dict[Hashable, int] = {}
        self.log: list[int] = []
        self.rows: list[int] = []
        self.segments: list[tuple[int, str, int | None]] = []
        self.reals: list[int | None] = []
        self.gradients: dict[int, None] = {}
        self.backward = 0
        self.renamed = -1

    def play(self, piece: Piece) -> None:
        """Write one part of the log.

        An entry outside the layers, or in a layer that is no neighbour of the late period, may touch a block of the
        late period. Such an entry is written once for every period that the late one stands for.
        """
        self.enter(piece)
        if piece.period is not None and abs(piece.period - LATE) < 2:
            self._play(piece)
            return
        start = piece.start
        while start < piece.end:
            end, late = start + 1, self.is_late(start)
            while end < piece.end and self.is_late(end) == late:
                end += 1
            if late:
                for real in range(LATE, LATE + self.periods.more + 1):
                    self._play(Piece(piece.segment, start, end, LATE, real))
            else:
                self._play(piece._replace(start=start, end=end))
            start = end

    def enter(self, piece: Piece) -> None:
        """Note the phase and the layer of the real stack that a part of the log belongs to."""
        if piece.segment < 0:
            return
        _place, phase, layer = self.run.segments[piece.segment]
        if layer is not None and piece.period is not None and piece.real is not None:
            layer += (piece.real - piece.period) * self.periods.length
        self.segments.append((len(self.log), phase, layer))

    def is_late(self, place: int) -> bool:
        event = self.run.log[place]
        return self.names[event if event >= 0 else ~event][0] == LATE

    def _play(self, piece: Piece) -> None:
        run = self.run
        for place in range(piece.start, piece.end):
            if place == run.forward_end:
                self.backward = len(self.log)
            event = run.log[place]
            block = event if event >= 0 else ~event
            if _held(run.rows[block].component):
                if place - 1 in run.renamed and self.renamed >= 0:
                    self.log.append(~self.renamed)
                continue
            period, name = self.names[block]
            key = (self.real_of(period, piece), name)
            if place in run.renamed:
                self.renamed = self.number_of(key)
            elif event < 0:
                self.log.append(~self.number_of(key))
            else:
                self._comes(block, key, renamed=place - 1 in run.renamed)

    def _comes(self, block: int, key: tuple[int | None, int], *, renamed: bool) -> None:
        if key in self.live:
            raise NotPeriodic(f"{key} is there twice")
        number = self.live[key] = self.renamed if renamed else len(self.rows)
        if self.run.rows[block].component == "gradients":
            self.gradients[number] = None
        if not renamed:
            self.log.append(number)
            self.rows.append(block)
            self.reals.append(key[0])

    def number_of(self, key: Hashable) -> int:
        if key not in self.live:
            raise NotPeriodic(f"{key} is not there")
        return self.live.pop(key)

    def real_of(self, period: int | None, piece: Piece) -> int | None:
        """Return the period of the real stack that a block belongs to. Neighbours of the running period keep their
        distance from it."""
        if period is None:
            return None
        if piece.period is None or piece.real is None or abs(piece.period - period) > 1:
            return period + self.periods.more if period > LATE else period
        return piece.real + period - piece.period


def _names(run: Trace, periods: Periods) -> list[tuple[int | None, int]]:
    """Return the period of each block of the run, and its name there as a number. Outside the layers every block has a
    name of its own."""
    phase: list[str] = [""] * len(run.rows)
    cuts = {place: name for place, name, _ in run.segments}
    now = ""
    for place, event in enumerate(run.log):
        now = cuts.get(place, now)
        if event >= 0:
            phase[event] = now
    seen: Counter[Hashable] = Counter()
    numbers: dict[Hashable, int] = {}
    out: list[tuple[int | None, int]] = []
    for i, row in enumerate(run.rows):
        period = periods.of(row.layer)
        if period is None:
            out.append((None, i))
            continue
        assert row.layer is not None
        offset = (row.layer - periods.first) % periods.length
        like = (phase[i], offset, row.component, row.scope, row.name, numel(row.shape)[1], row.dtype)
        seen[period, like] += 1
        out.append((period, numbers.setdefault((like, seen[period, like]), len(run.rows) + len(numbers))))
    return out
