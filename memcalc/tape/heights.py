"""An engine played over a tape: the bytes alive with the engine's blocks, without a log of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.amounts import undominated

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Sent
    from memcalc.tape.rewritten import OverRun
    from memcalc.tape.stretches import Tape


class Heights(NamedTuple):
    """The amounts of a step that could be a peak, by phase. `saved` is the amount at the end of forward, `after_backward` at the
    end of backward."""

    forward: list[int]
    backward: list[int]
    saved: int
    after_backward: int


class Raise(NamedTuple):
    """The engine's bytes over the stretches of a tape, whatever else is alive in them."""

    ranges: list[tuple[int, int, int]]
    """Ranges of stretches (first, end) with the engine's bytes in them."""
    points: list[tuple[int, int]]
    """Stretches with the most bytes that the engine had for a moment when they began."""
    at_turn: int | None
    """The engine's bytes when backward begins; None without a forward."""
    at_end: int


def heights(tape: Tape, engine: OverRun) -> Heights:
    """Return the amounts of a step with the engine's blocks."""
    key = type(engine), engine  # named tuples of two classes are equal if their fields are
    if key not in tape.raises:
        out = _Raised(tape)
        engine.play(tape.noted, out)
        tape.raises[key] = out.finished()
    ranges, points, at_turn, at_end = tape.raises[key]
    saved = 0 if at_turn is None else tape.at[tape.backward.start] + at_turn
    forward, backward = (_within(tape, phase, ranges, points) for phase in (tape.forward, tape.backward))
    return Heights(forward, backward, saved, tape.at[tape.backward.stop] + at_end)


def _within(tape: Tape, phase: range, ranges: list[tuple[int, int, int]], points: list[tuple[int, int]]) -> list[int]:
    """Return the amounts of a phase that could be a peak."""
    found: set[int] = set()
    highest, first, stop = tape.highest, phase.start, phase.stop
    for start, end, extra in ranges:
        start, end = max(start, first), min(end, stop)
        if start < end:
            found.update([top + extra for top in highest(start, end)])
    found.update([tape.at[place] + extra for place, extra in points if place in phase])
    return undominated(found)


class _Block:
    """A block of the engine. Deleting it frees its bytes."""

    __slots__ = ("nbytes", "out")

    def __init__(self, out: _Raised, nbytes: int) -> None:
        self.out, self.nbytes = out, nbytes
        out.change(nbytes)

    def __del__(self) -> None:
        self.out.change(-self.nbytes)


class _Kept:
    """A gradient that the engine refers to. Its bytes count for the engine from where the run frees it."""

    __slots__ = ("number", "out")

    def __init__(self, out: _Raised, number: int) -> None:
        self.out, self.number = out, number
        out.waiting[number] = out.tape.gradients[number].freed

    def __del__(self) -> None:
        if self.out.waiting.pop(self.number, None) is None:
            self.out.change(-self.out.tape.gradients[self.number].amount)


class _Raised:
    """The tape, raised by the engine's bytes. As an `Out` it receives what the engine does."""

    takes_sent = False

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.place = 0
        self.extra: int = 0
        """The engine's bytes now."""
        self.before: int = 0
        """The engine's bytes when the run reached the current stretch."""
        self.highest: int = 0
        """The most bytes that the engine had in the current stretch."""
        self.start = 0
        """The stretch from which on the engine has had its bytes unchanged."""
        self.ranges: list[tuple[int, int, int]] = []
        """Ranges of stretches (first, end) with the engine's bytes in them."""
        self.points: list[tuple[int, int]] = []
        """Stretches with the most bytes that the engine had for a moment when they began."""
        self.waiting: dict[int, int] = {}
        """The gradients that the engine refers to, each with the stretch before which the run frees it."""
        self.at_turn: int | None = None
        self.staying: list[object] = []

    def reach(self, place: int) -> None:
        while self.waiting:
            number = min(self.waiting, key=self.waiting.__getitem__)
            freed = self.waiting[number]
            if freed > place:
                break
            self._reach(freed)
            del self.waiting[number]
            self.change(self.tape.gradients[number].amount)
        self._reach(place)

    def _reach(self, place: int) -> None:
        here = self.place
        if place <= here:
            return
        if self.extra != self.before:
            self._close(here)
        if self.highest > self.before:
            self.points.append((here, self.highest))
        turn = self.tape.backward.start
        if here < turn <= place:
            if self.start < turn:
                self._range(turn, self.extra)
            self.at_turn = self.extra
        self.place, self.before, self.highest = place, self.extra, self.extra

    def _close(self, here: int) -> None:
        self._range(here, self.before)

    def _range(self, end: int, extra: int) -> None:
        if self.start < end:
            self.ranges.append((self.start, end, extra))
        self.start = end

    def change(self, by: int) -> None:
        self.extra += by
        if self.extra > self.highest:
            self.highest = self.extra

    def block(self, name: str, dim: str, elements: int, dtype: DType) -> _Block:
        return _Block(self, elements * dtype.itemsize)

    def block_of_run(self, number: int) -> _Kept:
        return _Kept(self, number)

    def stays(self, block: object) -> None:
        self.staying.append(block)

    def send(self, sent: Sent, after: int) -> None:
        """Ignore the collective: heights need none."""

    def finished(self) -> Raise:
        end = self.tape.backward.stop
        self.reach(end)
        self._range(end, self.extra)
        return Raise(self.ranges, self.points, self.at_turn, self.extra)
