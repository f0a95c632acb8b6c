"""Where the peaks of a rank are."""

from __future__ import annotations

from typing import Final, NamedTuple

from memcalc.core.dims import ZERO
from memcalc.core.dtypes import DType
from memcalc.core.rows import Component, Row
from memcalc.engines.rank import Rank
from memcalc.megatron.schedules import State
from memcalc.tape.profile import Moment


class Key(NamedTuple):
    """The key of an item: rows with equal keys are one item."""

    component: Component
    name: str
    sizes: tuple[tuple[str, int], ...]
    dtype: DType


class Sized(NamedTuple):
    """A row, and the bytes of all rows with the same key."""

    row: Row
    nbytes: int


class At(NamedTuple):
    """The place of a phase's peak: the state, the moment, and True if the gradient reduction's blocks are alive."""

    state: State | None
    moment: Moment | None
    flushed: bool


NOWHERE: Final = At(None, None, False)


class RankPeaks(NamedTuple):
    """A rank, the peak of each phase in bytes, and where the peaks are. If backward's peak is after the last moment, `last` has
    the engine's rows that are alive only there."""

    rank: Rank
    phases: dict[str, int]
    at: dict[str, At]
    last: tuple[Row, ...]

    def highest(self) -> tuple[int, int]:
        """Return the highest peak of all phases, and backward's peak, in bytes."""
        return max(self.phases.values()), self.phases["backward"]


def buffers_after_backward(rank: Rank) -> list[Row]:
    """Return the buffers that the model's run leaves after backward and that are no part of an engine's rows."""
    return [
        row
        for profile in rank.profiles
        if profile.after_backward.poly != ZERO
        for row in profile.rows(profile.after_backward)
        if row.component == "buffers"
    ]
