"""Profiles of engines that are played over one recorded run."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from memcalc.amounts import bytes_of
from memcalc.heights import Heights, heights
from memcalc.profile import Choices, Moment, Profile, recorded_tape, trace
from memcalc.rewritten import rewritten

if TYPE_CHECKING:
    from memcalc.families.program import Program
    from memcalc.rewritten import OverRun
    from memcalc.rows import Row
    from memcalc.runs import Trace
    from memcalc.tape import Tape


class Recorded:
    """A run that has noted what engines act at. It holds for every engine, and for all batches and sequences that take the
    same branches."""

    def __init__(self, program: Program, choices: Choices, batch: int, seq: int) -> None:
        self.program, self.choices, self.batch, self.seq = program, choices, batch, seq

    @cached_property
    def tape(self) -> Tape:
        """What is alive between the events; peaks follow from it."""
        return recorded_tape(self.program, self.choices, self.batch, self.seq)

    @property
    def pads_queries(self) -> bool:
        """Whether it holds only for sequences of the same remainder."""
        return self.tape.pads_queries

    @cached_property
    def run(self) -> Trace:
        """Every block, at the real depth; rows and the allocator want it."""
        return trace(self.program, self.choices, self.batch, self.seq, self.program.layers)


class Played(Profile):
    """The profile of what an engine makes of a recorded run. Blocks are made when they are asked for."""

    def __init__(self, recorded: Recorded, engine: OverRun) -> None:
        self._recorded, self._engine = recorded, engine

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
    def left(self) -> Moment:  # type: ignore[override]
        return self._moments([self._heights.left], len(self.forward) + len(self.backward) + 1)[0]

    @staticmethod
    def _moments(amounts: list[int], first: int) -> tuple[Moment, ...]:
        """Their places are not known: they have those of the moments instead, as negative numbers."""
        return tuple(Moment(*bytes_of(one), ~(first + i)) for i, one in enumerate(amounts))

    @cached_property
    def run(self) -> Trace:  # type: ignore[override]
        return rewritten(self._recorded.run, self._engine)

    @cached_property
    def _with_blocks(self) -> Profile:
        return Profile(self.run)

    def rows(self, moment: Moment) -> list[Row]:
        found = self._with_blocks.moments[~moment.place]
        assert (found.poly, found.gradients) == (moment.poly, moment.gradients)
        return self._with_blocks.rows(found)
