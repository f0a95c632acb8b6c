"""Profiles of engines that are played over one recorded run."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from memcalc.core.amounts import amount, bytes_of
from memcalc.core.dims import numel
from memcalc.tape.deepened import deepened
from memcalc.tape.heights import Heights, heights
from memcalc.tape.profile import Choices, Moment, Profile, recorded_trace, trace
from memcalc.tape.rewritten import rewritten
from memcalc.tape.stretches import tape_of
from memcalc.tape.unrolled import NotPeriodic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from memcalc.core.noted import Where
    from memcalc.core.rows import Row
    from memcalc.families.base.program import Program
    from memcalc.tape.rewritten import OverRun
    from memcalc.tape.runs import Trace
    from memcalc.tape.stretches import Tape


class Recorded:
    """A run with the events that engines act at. One run serves every engine, and all batches and sequences that take
    the same branches."""

    def __init__(self, program: Program, choices: Choices, batch: int, seq: int, tapes: list[Tape]) -> None:
        self.program, self.choices, self.batch, self.seq = program, choices, batch, seq
        self._tapes = tapes
        """Tapes of the same program."""

    @cached_property
    def _weights(self) -> list[tuple[Where, int]]:
        return [((weight.name, weight.layer), numel(weight.stored_shape)[0]) for weight in self.program.weights()]

    @cached_property
    def _shallow(self) -> Trace:
        return recorded_trace(self.program, self.choices, self.batch, self.seq)

    @cached_property
    def _whole(self) -> Trace:
        return trace(self.program, self.choices, self.batch, self.seq, self.program.layers)

    @cached_property
    def tape(self) -> Tape:
        """Return the amounts between the events; peaks follow from them."""
        try:
            tape = tape_of(self._shallow, self._weights)
        except NotPeriodic:
            tape = tape_of(self._whole, self._weights)
        tape.share_raises(self._tapes)
        return tape

    @property
    def pads_queries(self) -> bool:
        """Tell whether the run holds only for sequences of the same remainder."""
        return self._shallow.pads_queries

    @cached_property
    def run(self) -> Trace:
        """Return the run with every block, at the real depth. Rows and the allocator need it."""
        try:
            return deepened(self._shallow, self._weights)
        except NotPeriodic:
            return self._whole


class Played(Profile):
    """The profile of a recorded run with an engine's blocks. The blocks are made when they are asked for."""

    def __init__(self, recorded: Recorded, engine: OverRun) -> None:
        self._recorded, self._engine = recorded, engine
        self._rows: dict[int, list[Row]] = {}

    @property
    def pads_queries(self) -> bool:
        return self._recorded.pads_queries

    @cached_property
    def _heights(self) -> Heights:
        return heights(self._recorded.tape, self._engine)

    @cached_property
    def forward(self) -> tuple[Moment, ...]:  # type: ignore[override]
        return self._moments(self._heights.forward, 0)

    @cached_property
    def backward(self) -> tuple[Moment, ...]:  # type: ignore[override]
        return self._moments(self._heights.backward, len(self.forward))

    @cached_property
    def saved(self) -> Moment:  # type: ignore[override]
        return self._moments([self._heights.saved], len(self.forward) + len(self.backward))[0]

    @cached_property
    def after_backward(self) -> Moment:  # type: ignore[override]
        return self._moments([self._heights.after_backward], len(self.forward) + len(self.backward) + 1)[0]

    @staticmethod
    def _moments(amounts: list[int], first: int) -> tuple[Moment, ...]:
        """Return moments whose places are not known yet. Instead of its place each has its number among all moments, as
        a negative number."""
        return tuple(Moment(*bytes_of(one), ~(first + i)) for i, one in enumerate(amounts))

    @cached_property
    def run(self) -> Trace:  # type: ignore[override]
        return rewritten(self._recorded.run, self._engine)

    def rows(self, moment: Moment) -> list[Row]:
        return super().rows(moment._replace(place=self._places[~moment.place]))

    @cached_property
    def _places(self) -> list[int]:
        """Return the places of all moments in the log, in the order of `moments`."""
        heights, run = self._heights, self.run
        places = highest(run, {"forward": set(heights.forward), "backward": set(heights.backward)})
        of_phases = (
            [places["forward"][one] for one in heights.forward],
            [places["backward"][one] for one in heights.backward],
        )
        return [*of_phases[0], *of_phases[1], run.forward_end, len(run.log)]


def highest(run: Trace, wanted: Mapping[str, AbstractSet[int]]) -> dict[str, dict[int, int]]:
    """Return by phase the place in the log at which each wanted amount is first a local maximum. The log is that of a
    run at its real depth."""
    sizes = [amount(row.shape, row.dtype, row.component) for row in run.rows]
    phases = {place: phase for place, phase, _layer in run.segments}
    found: dict[str, dict[int, int]] = {phase: {} for phase in ("", *wanted)}
    none = frozenset[int]()
    here, looks_for, live, rising = found[""], none, 0, False
    for place, event in enumerate(run.log):
        if rising and (event < 0 or place in phases):
            if live in looks_for:
                here.setdefault(live, place)
            rising = False
        if place in phases:
            here, looks_for = found[phases[place]], wanted.get(phases[place], none)
        if event >= 0:
            live += sizes[event]
            rising = True
        else:
            live -= sizes[~event]
    if rising and live in looks_for:
        here.setdefault(live, len(run.log))
    return found
