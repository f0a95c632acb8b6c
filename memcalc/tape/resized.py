"""Profiles of runs that differ only in the sizes of an engine's own blocks.

One run is made, for some sizes. Its moments are found once, each with the number of the engine's blocks of every kind that are
alive. Other sizes then give other sums, and no run is gone through again.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.amounts import WIDTH, amount, bytes_of, undominated
from memcalc.tape.peaks import peaks, sizes_of
from memcalc.tape.profile import Moment, Profile, moments_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from memcalc.core.dims import Dim
    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Row
    from memcalc.tape.profile import Resizable
    from memcalc.tape.runs import Trace

_DIGIT: Final = 64
_MASK: Final = (1 << _DIGIT) - 1


class Kind(NamedTuple):
    """Blocks of an engine that have one size, whatever it is."""

    dim: Dim
    dtype: DType
    component: str


class Counts(NamedTuple):
    """A moment: the amount of the blocks that keep their size, and the number of blocks of each kind."""

    fixed: int
    of_kinds: tuple[int, ...]


class Base:
    """The run that others are made from, with its moments."""

    def __init__(self, run: Trace) -> None:
        self.run = run

    @property
    def pads_queries(self) -> bool:
        """Tell whether the run holds only for sequences of the same remainder."""
        return self.run.pads_queries

    @cached_property
    def moments(self) -> Moments:
        """Return the moments that could be a peak for some sizes."""
        kinds: dict[Hashable, int] = {}
        first: list[Kind] = []
        sizes, copies = sizes_of(self.run), self.run.copies()
        for block, row in enumerate(self.run.rows):
            decides = row.shape[0].resizable() if len(row.shape) == 1 else None
            if decides is not None:
                kind = kinds.setdefault((decides, row.dtype, row.component), len(kinds))
                if kind == len(first):
                    first.append(Kind(row.shape[0], row.dtype, row.component))
                times = 1 + self.run.repeated.more if block in copies else 1
                sizes[block] = times << WIDTH + _DIGIT * kind
        forward, backward, saved, after_backward = peaks(self.run, sizes)
        ends = tuple(_counts(one, len(kinds)) for one in (saved, after_backward))
        return Moments(tuple(first), _highest(forward, len(kinds)), _highest(backward, len(kinds)), *ends)


class Moments(NamedTuple):
    """The moments of a run, in the numbers of the engine's blocks. Each has its place in the log."""

    kinds: tuple[Kind, ...]
    forward: Mapping[Counts, int]
    backward: Mapping[Counts, int]
    saved: Counts
    after_backward: Counts


class Resized(Profile):
    """The profile of a run with an engine's sizes. The run itself is made when rows are asked for."""

    def __init__(self, base: Base, hooks: Resizable) -> None:
        self._base, self._hooks = base, hooks
        self._rows: dict[int, list[Row]] = {}
        moments = base.moments
        sizes = [amount((hooks.sized(kind.dim),), kind.dtype, kind.component) for kind in moments.kinds]

        def amounts(found: Mapping[Counts, int]) -> dict[int, int]:
            out: dict[int, int] = {}
            for counts, place in found.items():
                here = _sum(counts, sizes)
                out[here] = min(place, out.get(here, place))
            return out

        self.forward = moments_of(amounts(moments.forward))
        self.backward = moments_of(amounts(moments.backward))
        self.saved = Moment(*bytes_of(_sum(moments.saved, sizes)), base.run.forward_end)
        self.after_backward = Moment(*bytes_of(_sum(moments.after_backward, sizes)), len(base.run.log))

    @property
    def pads_queries(self) -> bool:
        return self._base.pads_queries

    @cached_property
    def run(self) -> Trace:  # type: ignore[override]
        return self._hooks.resized(self._base.run)


def _sum(counts: Counts, sizes: Iterable[int]) -> int:
    return counts.fixed + sum(n * size for n, size in zip(counts.of_kinds, sizes, strict=True) if n)


def _counts(given: int, kinds: int) -> Counts:
    """Return an amount whose digits above `WIDTH` are numbers of blocks."""
    fixed = given & (1 << WIDTH) - 1
    if fixed >> WIDTH - 1:  # a negative amount has borrowed from the numbers
        fixed -= 1 << WIDTH
    numbers = (given - fixed) >> WIDTH
    return Counts(fixed, tuple(numbers >> _DIGIT * kind & _MASK for kind in range(kinds)))


def _highest(found: Mapping[int, int], kinds: int) -> dict[Counts, int]:
    """Return the moments that no other one with the same blocks of the engine exceeds, with their places."""
    alike: dict[tuple[int, ...], dict[int, int]] = {}
    for given, place in found.items():
        counts = _counts(given, kinds)
        alike.setdefault(counts.of_kinds, {})[counts.fixed] = place
    return {Counts(fixed, numbers): places[fixed] for numbers, places in alike.items() for fixed in undominated(places)}
