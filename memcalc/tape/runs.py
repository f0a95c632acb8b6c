"""The log of a run on paper, and what of it stands for layers and micro-batches that were not run."""

from __future__ import annotations

from typing import Final, NamedTuple

from memcalc.core.noted import Noted
from memcalc.core.tensor import Sent, StorageRow, Work
from memcalc.kernels import TRANSFORMERS, Kernels


class Middle(NamedTuple):
    """The two middle periods of a run, and how many periods the real stack has more than the run."""

    early: range
    late: range
    more: int


NO_MIDDLE: Final = Middle(range(0), range(0), 0)


class Repeated(NamedTuple):
    """Of a run of several micro-batches one that stands for `more` others besides: its forward's place in the log, and that of
    its backward. What its forward allocates is there once for each of them; the moments within the two lie between those of
    its neighbours."""

    forward: range
    backward: range
    more: int


ONCE: Final = Repeated(range(0), range(0), 0)


class Trace(NamedTuple):
    """One run of a program."""

    log: list[int]
    rows: list[StorageRow]
    segments: list[tuple[int, str, int | None]]
    forward_end: int
    middle: Middle
    source: str = ""
    """What was traced; nothing for a program on paper."""
    kernels: Kernels = TRANSFORMERS
    sent: tuple[Sent, ...] = ()
    work: tuple[Work, ...] = ()
    forward_ends: tuple[int, ...] = ()
    """Of a run of several micro-batches, where each one's forward ends."""
    sent_once: tuple[Sent, ...] = ()
    """What such a run sends when they are all done; `sent` is that of every one of them."""
    repeated: Repeated = ONCE
    renamed: frozenset[int] = frozenset()
    """Places of the log where a block goes on under the number that follows."""
    noted: Noted | None = None
    """What the run was asked to note."""
    pads_queries: bool = False
    """True if it holds only for sequences of the same remainder (`Program.remainder`)."""

    def turns(self) -> dict[int, range]:
        """From which places in the log on which of the middle periods is not a neighbour of what is running.

        In a step of one micro-batch the early one is, until backward comes to them; in a step of several, and where layers
        are gathered or reduced one by one, the one that is farther from the running layer.
        """
        early, late, _ = self.middle
        out = {0: early}
        if not self.forward_ends:
            return out | self._turns_of_backward()
        if self.middle.more:
            for place, _phase, layer in self.segments:
                if layer is not None and layer < early.start:
                    out[place] = late
                elif layer is not None and layer >= late.stop:
                    out[place] = early
        return out

    def _turns_of_backward(self) -> dict[int, range]:
        """The late period is away from where backward has come to it; where backward goes through the stack once more, as of
        an auxiliary loss before all else, the early one is again until then."""
        early, late, _ = self.middle
        out: dict[int, range] = {}
        away, over = early, False
        for place, phase, layer in self.segments:
            if phase != "backward" or layer is None:
                continue
            if away is early and layer in late:
                out[place] = away = late
                over = False
            elif away is late and layer < early.start:
                over = True
            elif over and layer >= late.stop:
                out[place] = away = early
        return out

    def away(self, place: int) -> range:
        """The middle period whose blocks that are alive at `place` stand for those of others."""
        return [away for begin, away in self.turns().items() if begin < place or not begin][-1]

    def copies(self) -> set[int]:
        """The blocks that the forward of the repeated micro-batch has allocated."""
        forward = self.repeated.forward
        return {event for event in self.log[forward.start : forward.stop] if event >= 0}

    def times(self, row: StorageRow, away: range) -> int:
        """How often a block of this run is there in the real stack."""
        return 1 + self.middle.more if row.layer is not None and row.layer in away else 1
