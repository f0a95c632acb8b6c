"""A recorded run by stretches: the bytes alive from one event that an engine acts at to the next.

A run with middle periods is written out for the stack at its real depth. Live bytes grow linearly along equal layers: a
stretch of the r-th middle period lies on the line through the same stretch of the two middle periods that were run. If
these two differ in what they do, or their stretches lie on no line, NotPeriodic is raised, and the stack is run at its
real depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.amounts import amount, undominated
from memcalc.core.noted import Begins, Ends, Event, Holds, LetsGo, Noted, Over, Ready, Visited, Where
from memcalc.tape.unrolled import LATE, NotPeriodic, Piece, periods_of, pieces

if TYPE_CHECKING:
    from memcalc.tape.runs import Trace

PASSES: Final = ("forward", "backward")


class Gradient(NamedTuple):
    """A gradient that is ready."""

    amount: int
    freed: int
    """The stretch before which the run frees the gradient."""


class Tape:
    """The stretches of a step, and the events between them. An event's place is the stretch that begins with it."""

    def __init__(
        self,
        noted: Noted,
        at: Sequence[int],
        tops: Sequence[tuple[int, ...]],
        gradients: Sequence[Gradient],
        forward: range,
        backward: range,
    ) -> None:
        self.noted = noted
        self.at = at
        """The amount alive when each stretch begins."""
        self.tops = tops
        """The local maxima within each stretch."""
        self.gradients = gradients
        """The gradients in the order in which they are ready. `block` of a Ready is an index into this list."""
        self.forward, self.backward = forward, backward
        self.raises: dict[Any, Any] = {}
        """Bytes that engines which have been played over the events add to the stretches (`memcalc.tape.heights`)."""
        self._joined: dict[tuple[int, int], list[int]] = {}
        self._highest: dict[tuple[int, int], list[int]] = {}

    def share_raises(self, others: list[Tape]) -> None:
        """Share what engines do with another tape of the same events, if there is one among `others`: it differs in batch or
        sequence alone. The tape is one of them from here on."""
        own = self.forward, self.backward, self.gradients, self.noted
        for other in others:
            if own == (other.forward, other.backward, other.gradients, other.noted):
                self.raises = other.raises
                return
        others.append(self)

    def highest(self, start: int, end: int) -> Sequence[int]:
        """Return the amounts within the stretches from `start` to `end` that could be a peak."""
        if end - start == 1:
            return self.tops[start]
        key = start, end
        if key not in self._highest:
            out: list[int] = []
            while start < end:
                size = start & -start or end
                while start + size > end:
                    size = 1 << size.bit_length() - 2
                out += self._of(start, size)
                start += size
            self._highest[key] = out
        return self._highest[key]

    def _of(self, start: int, size: int) -> Sequence[int]:
        """Return the undominated amounts of `size` stretches from `start` on; `size` is a power of two."""
        if size == 1:
            return self.tops[start]
        key = start, size
        if key not in self._joined:
            half = size >> 1
            self._joined[key] = undominated({*self._of(start, half), *self._of(start + half, half)})
        return self._joined[key]


class _Heights(NamedTuple):
    """The amount alive, and the parts of it that belong to the early and to the late middle period."""

    live: int
    early: int
    late: int


class _Stretch(NamedTuple):
    """One stretch of the run."""

    at: _Heights
    tops: tuple[_Heights, ...]

    def amounts(self, more: int) -> list[int]:
        """Return all amounts of the stretch, each with `more` added."""
        return [self.at.live + more, *(top.live + more for top in self.tops)]


class _Segment(NamedTuple):
    """One segment of the run, whose stretches begin at `places`."""

    phase: str
    period: int | None
    places: tuple[int, ...]
    stretches: tuple[_Stretch, ...]
    events: tuple[Event, ...]
    freed: tuple[tuple[int, int], ...]
    """The blocks that are gradients, each with the place after the one at which the run frees it."""


def tape_of(run: Trace, weights: Sequence[tuple[Where, int]]) -> Tape:
    """Return the tape of a recorded run for a stack of these weights: the name and layer of each weight, and its number
    of elements.

    Raises NotPeriodic if the run has to be made at its real depth.
    """
    assert run.noted is not None
    writing = _Writing(run, run.noted, weights)
    for piece in pieces(run):
        writing.play(piece)
    return writing.finished()


def _segments(run: Trace, noted: Noted) -> list[_Segment]:
    """Return the segments of a run. One follows at the end for what is left; the part before the first segment comes
    last, as number -1."""
    bounds = [(0, "", None), *run.segments, (len(run.log), "", None)]
    events: list[list[Event]] = [[] for _ in bounds]
    for event in noted.events:
        events[event.segment + 1].append(event)
    freed, walk, periods = _freed(run, noted), _Walk(run), periods_of(run)
    out: list[_Segment] = []
    for i, (start, phase, layer) in enumerate(bounds):
        end = bounds[i + 1][0] if i + 1 < len(bounds) else start
        gone = tuple((freed[place], place + 1) for place in range(start, end) if place in freed)
        places = {start, *(event.place for event in events[i]), *(after for _, after in gone)}
        places.update(event.after for event in events[i] if isinstance(event, Ready))
        cuts = sorted(places)
        out.append(_Segment(phase, periods.of(layer), tuple(cuts), walk.stretches(cuts, end), tuple(events[i]), gone))
    return [*out[1:], out[0]]


def _freed(run: Trace, noted: Noted) -> dict[int, int]:
    """Return the places at which the run frees a gradient that was ready, with the gradient's block."""
    blocks = {event.block for event in noted.events if isinstance(event, Ready)}
    return {place: ~event for place, event in enumerate(run.log) if ~event in blocks}


class _Walk:
    """A walk along the log from its beginning."""

    def __init__(self, run: Trace) -> None:
        early, late, _ = run.middle
        self.log = run.log
        self.sizes = [amount(row.shape, row.dtype, row.component) for row in run.rows]
        self.early = {i for i, row in enumerate(run.rows) if row.layer is not None and row.layer in early}
        self.late = {i for i, row in enumerate(run.rows) if row.layer is not None and row.layer in late}
        self.now = _Heights(0, 0, 0)

    def stretches(self, places: Sequence[int], end: int) -> tuple[_Stretch, ...]:
        return tuple(self._stretch(*of) for of in zip(places, [*places[1:], end], strict=True))

    def _stretch(self, start: int, end: int) -> _Stretch:
        at = self.now
        live, of_early, of_late = at
        tops: list[_Heights] = []
        rising = False
        for event in self.log[start:end]:
            block = event
            if event < 0:
                block = ~event
                if rising:
                    tops.append(_Heights(live, of_early, of_late))
            rising = event >= 0
            size = self.sizes[block] if rising else -self.sizes[block]
            live += size
            if block in self.early:
                of_early += size
            elif block in self.late:
                of_late += size
        self.now = _Heights(live, of_early, of_late)
        if rising:
            tops.append(self.now)
        return _Stretch(at, tuple(tops))


class _Writing:
    """The tape that is being written."""

    def __init__(self, run: Trace, noted: Noted, weights: Sequence[tuple[Where, int]]) -> None:
        self.run, self.noted, self.weights = run, noted, weights
        self.segments = _segments(run, noted)
        self.depth = Depth(run, noted, weights)
        self.lines = _Lines(self.segments, run.middle.more)
        self.at: list[int] = []
        self.tops: list[tuple[int, ...]] = []
        self.events: list[Event] = []
        self.gradients: list[Gradient] = []
        self.open: dict[int, int] = {}
        """The gradients that are not freed yet, by their blocks."""
        self.begins: dict[str, int] = {}
        """The stretch that each phase begins with."""

    def play(self, piece: Piece) -> None:
        segment, first = self.segments[piece.segment], len(self.at)
        self.begins.setdefault(segment.phase, first)
        for at, tops in self.lines.of(piece):
            self.at.append(at)
            self.tops.append(tops)
        index = {place: first + i for i, place in enumerate(segment.places)}
        for event in segment.events:
            moved = self.depth.moved(event, piece, index[event.place], event.segment)
            if isinstance(moved, Ready):
                if moved.block in self.open:
                    raise NotPeriodic("a gradient of one period is there when that of the next one is ready")
                self.open[moved.block] = len(self.gradients)
                moved = moved._replace(after=index[moved.after], block=len(self.gradients))
                row = self.run.rows[self.run.log[event.place + 1]]
                self.gradients.append(Gradient(amount(row.shape, row.dtype, row.component), -1))
            self.events.append(moved)
        for block, after in segment.freed:
            gradient = self.open.pop(block, None)
            if gradient is None:
                raise NotPeriodic("a gradient is freed in another period than it is made in")
            self.gradients[gradient] = self.gradients[gradient]._replace(freed=index[after])

    def finished(self) -> Tape:
        forward, backward = self.begins["forward"], self.begins["backward"]
        if self.open:
            raise NotPeriodic("a gradient is not freed")
        end = len(self.at)
        ((left, _tops),) = self.lines.of(Piece(len(self.segments) - 2, 0, 0, None, None))
        self.at.append(left)
        names, elements = zip(*self.weights, strict=True)
        noted = Noted(names, elements, tuple(self.events))
        return Tape(noted, self.at, self.tops, self.gradients, range(forward, backward), range(backward, end))


class _Lines:
    """The amounts of the stretches of each piece. Those of a middle period lie on lines."""

    def __init__(self, segments: Sequence[_Segment], more: int) -> None:
        self.segments, self.more = segments, more
        self.phase = ""
        self.was_late = False
        """True once the phase has come to the late period."""
        self.slopes = {"": (0, 0)} | {phase: self._slopes(phase) if more else (0, 0) for phase in PASSES}

    def of(self, piece: Piece) -> list[tuple[int, tuple[int, ...]]]:
        """Return the amount alive at the begin of each stretch, and the stretch's local maxima."""
        segment, more = self.segments[piece.segment], self.more
        if segment.phase != self.phase:
            self.phase, self.was_late = segment.phase, False
        before, after = self.slopes[self.phase]
        if piece.real is not None and piece.period in (LATE - 1, LATE):
            self.was_late |= piece.period == LATE
            first = max(piece.real - LATE, 0)
            besides = first * before + (more - first) * after
            return [(at.live + besides, tuple([top.live + besides for top in tops])) for at, tops in segment.stretches]
        if (self.was_late and self.phase == "backward") or not self.phase:
            return [
                (at.live + more * at.late, tuple([top.live + more * top.late for top in tops]))
                for at, tops in segment.stretches
            ]
        return [
            (at.live + more * at.early, tuple([top.live + more * top.early for top in tops]))
            for at, tops in segment.stretches
        ]

    def _slopes(self, phase: str) -> tuple[int, int]:
        """Return the amount of one middle period before the running one, and of one after it, in the order of the
        stack. Raises NotPeriodic if the two middle periods differ."""
        own = [i for i, segment in enumerate(self.segments) if segment.phase == phase]
        early, late = ([i for i in own if self.segments[i].period == period] for period in (LATE - 1, LATE))
        both = [*early, *late] if phase == "forward" else [*late, *early]
        if not both:
            raise NotPeriodic("the middle periods have no part in it")  # backward ends before it comes to them
        if both != list(range(both[0], both[-1] + 1)) or both[-1] + 1 not in own:
            raise NotPeriodic("something runs between the middle periods")
        following = self.segments[both[-1] + 1].stretches[0].at
        if phase == "forward":
            before, after = following.early, 0
        else:
            before, after = self.segments[late[0]].stretches[0].at.early, following.late
        if len(early) != len(late):
            raise NotPeriodic("the middle periods do not enter the same layers")
        for one, other in zip(early, late, strict=True):
            if not _on_a_line(self.segments[one], self.segments[other], before - after):
                raise NotPeriodic("the middle periods do not do the same")
        return before, after


def _on_a_line(early: _Segment, late: _Segment, step: int) -> bool:
    """Tell whether both segments have the same events, and stretches that differ by `step`."""
    return (
        list(map(type, early.events)) == list(map(type, late.events))
        and len(early.freed) == len(late.freed)
        and [stretch.amounts(step) for stretch in early.stretches] == [stretch.amounts(0) for stretch in late.stretches]
    )


class Depth:
    """The events of a run as events of the stack at its real depth, where layers and parameters have other numbers."""

    def __init__(self, run: Trace, noted: Noted, weights: Sequence[tuple[Where, int]]) -> None:
        self.noted, self.periods = noted, periods_of(run)
        self.places = {where: i for i, (where, _elements) in enumerate(weights)}
        self.moved_sets: dict[tuple[Visited, int | None, int | None], Visited] = {}
        self.numbers = 1 + max((event.number for event in noted.events if isinstance(event, Holds)), default=0)
        self.alike: dict[Where, list[int]] = {}
        """Parameter of the run -> the parameters of the real stack that it stands for."""
        for i, (where, _elements) in enumerate(weights):
            self.alike.setdefault(self._in_the_run(where), []).append(i)

    def moved(self, event: Event, piece: Piece, place: int, segment: int) -> Event:
        """Return the event as a piece has it, at another place of another segment. Raises NotPeriodic if the event is about a
        middle layer that is no neighbour."""
        if not self.periods.more:
            return event._replace(place=place, segment=segment)
        if isinstance(event, Begins):
            _, _, visited, forward, phase, within, sent = event
            if within is not None:
                where = within.module and self._layer(within.module, piece)
                within = within._replace(number=self._number(within.number, piece), module=where)
            return Begins(place, segment, self._visited(visited, piece), forward, phase, within, sent)
        if isinstance(event, Ends):
            return Ends(place, segment, self._visited(event.visited, piece), event.forward, event.sent)
        if isinstance(event, Over):
            return Over(place, segment, event.sent)
        if isinstance(event, LetsGo):
            return LetsGo(place, segment, self._number(event.number, piece))
        parameter = self.places[self._layer(self.noted.weights[event.parameter], piece)]
        if isinstance(event, Holds):
            return Holds(place, segment, self._number(event.number, piece), parameter)
        return Ready(place, segment, event.after, event.block, parameter, event.sent)

    def _number(self, number: int, piece: Piece) -> int:
        """Return the number of a checkpoint or a reference. Each of the periods that the late one stands for has its
        own numbers."""
        return number + self.numbers * piece.real if piece.period == LATE and piece.real is not None else number

    def _visited(self, visited: Visited, piece: Piece) -> Visited:
        layer = visited.where[1]
        key = visited, None if layer is None else piece.period, None if layer is None else piece.real
        if key not in self.moved_sets:
            parameters = self._set(visited.parameters, layer, piece)
            within = parameters if visited.within == visited.parameters else self._set(visited.within, layer, piece)
            self.moved_sets[key] = Visited(self._layer(visited.where, piece), parameters, within, visited.is_leaf)
        return self.moved_sets[key]

    def _set(self, parameters: frozenset[int], layer: int | None, piece: Piece) -> frozenset[int]:
        """Return parameters by their numbers in the real stack. A module in a layer has that layer's parameters; a
        module that contains layers has those of all of them."""
        names = [self.noted.weights[i] for i in parameters]
        if layer is None:
            return frozenset([i for name in names for i in self.alike.get(name, ())])
        return frozenset([self.places[self._layer(name, piece)] for name in names])

    def _layer(self, where: Where, piece: Piece) -> Where:
        """Return a module or weight in its layer of the real stack.

        A layer near the running one keeps its distance from it. Any other layer keeps its distance from the top or the
        bottom of the stack.
        """
        path, layer = where
        period = self.periods.of(layer)
        if layer is None or period is None:
            return where
        if piece.period is not None and piece.real is not None and abs(period - piece.period) < 2:
            periods = piece.real - piece.period
        elif period == LATE:
            raise NotPeriodic("something outside the middle periods is about one of them")
        else:
            periods = self.periods.more if period > LATE else 0
        return path, layer + periods * self.periods.length

    def _in_the_run(self, where: Where) -> Where:
        """Return the weight of the run that stands for a weight of the real stack."""
        name, layer = where
        period = self.periods.of(layer)
        if layer is None or period is None or period <= LATE:
            return where
        return name, layer - min(period - LATE, self.periods.more) * self.periods.length
