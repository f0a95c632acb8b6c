"""The log of a run on paper, and the layers and micro-batches of the real step that parts of it stand for."""

from __future__ import annotations

from itertools import accumulate
from operator import neg
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.noted import Noted
from memcalc.core.tensor import Sent, StorageRow, Streamed, Work
from memcalc.kernels import TRANSFORMERS, Kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.offloading import Copied


class Middle(NamedTuple):
    """The two middle periods of a run, and the number of periods that the real stack has in addition to the run's."""

    early: range
    late: range
    more: int


NO_MIDDLE: Final = Middle(range(0), range(0), 0)


class Repeated(NamedTuple):
    """A micro-batch that stands for `more` others in a run of several micro-batches, with the places of its forward and
    backward in the log.

    The blocks that its forward allocates count once for each of these micro-batches. The moments within its forward and
    backward lie between those of the neighbouring micro-batches.
    """

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
    """The source of a traced run; empty for a program on paper."""
    kernels: Kernels = TRANSFORMERS
    sent: tuple[Sent, ...] = ()
    work: tuple[Work, ...] = ()
    forward_ends: tuple[int, ...] = ()
    """The places at which each micro-batch's forward ends, in a run of several micro-batches."""
    sent_once: tuple[Sent, ...] = ()
    """The collectives that a run of several micro-batches sends once, after the last one. `sent` holds those of every
    micro-batch."""
    repeated: Repeated = ONCE
    renamed: frozenset[int] = frozenset()
    """The places in the log at which a block goes on under the next number."""
    noted: Noted | None = None
    """The recorded events, if the run was asked to record them."""
    sent_at: tuple[int, ...] = ()
    """The places in the log at which the collectives of `sent` are called, in a run that an engine has been played over."""
    pads_queries: bool = False
    """True if the run holds only for sequences of the same remainder (`Program.remainder`)."""

    of_reference: tuple[range, ...] = ()
    """The places in the log of the forwards of a reference model."""
    streamed: tuple[Streamed, ...] = ()
    """The kernels of the ops that multiply no matrices."""
    copied: tuple[Copied, ...] = ()
    """The saved tensors that are copied to the host and back, in a run at the real depth."""

    def alive(self, sizes: Sequence[int]) -> list[int]:
        """Return the sum of `sizes`, one for each block, of the blocks alive before each place of the log and at its end."""
        changes = [*sizes, *map(neg, reversed(sizes))]  # a free of block i is ~i, the i-th from the end
        return [0, *accumulate(map(changes.__getitem__, self.log))]

    def turns(self) -> dict[int, range]:
        """Return the middle period that stands for others, by the place in the log from which on it does. That period
        is not adjacent to the running layer.

        In a step of one micro-batch the early period stands for others, until backward reaches the middle periods. In a
        step of several micro-batches, and if layers are gathered or reduced one by one, it is the period farther from
        the running layer.
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
        """Return the places in backward at which the other middle period begins to stand for the others.

        The late period does so from where backward reaches it. If backward goes through the stack twice, as for an
        auxiliary loss, the early period does so again from the start of the second pass until backward reaches the late
        period.
        """
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
        """Return the middle period whose blocks stand for those of others at `place`."""
        return [away for begin, away in self.turns().items() if begin < place or not begin][-1]

    def copies(self) -> set[int]:
        """Return the blocks that the forward of the repeated micro-batch has allocated."""
        forward = self.repeated.forward
        return {event for event in self.log[forward.start : forward.stop] if event >= 0}

    def times(self, row: StorageRow, away: range) -> int:
        """Return the number of blocks of the real stack that a block of this run stands for."""
        return 1 + self.middle.more if row.layer is not None and row.layer in away else 1
