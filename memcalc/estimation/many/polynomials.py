"""Polynomials in the sequences of a micro-batch, the tokens of a rank's part of a sequence, and the number of micro-batches,
evaluated for arrays of these numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.core.amounts import amount_of, bytes_of, undominated
from memcalc.core.dims import ZERO, Poly, numel
from memcalc.core.unknowns import Number, terms_of, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.core.rows import Row
    from memcalc.core.unknowns import Exponents, Whole
    from memcalc.engines.rank import Rank

Wholes = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]
"""Whole numbers of 64 bits, or of Python where 64 bits are too few."""
MOST: Final = (1 << 63) - 1
_ROOM: Final = 1 << 62
_BLOCK: Final = 4096
"""The setups that are evaluated at once: few enough for the CPU's cache."""


class TooLarge(Exception):
    """The error that a result might need more than 63 bits."""


class Values:
    """The three numbers of many setups, at which polynomials are evaluated.

    A result is an array with one number for each setup: of 64 bits, or of Python's own integers if `large`.
    """

    def __init__(self, batch: Wholes, rows: Wholes, micro_batches: Wholes, *, large: bool = False) -> None:
        self.arrays = batch, rows, micro_batches
        self._large = large
        self._powers: dict[Exponents, Any] = {}
        self.least: tuple[int, int, int] = tuple(int(one.min()) for one in self.arrays)  # type: ignore[assignment]
        self._most = [int(one.max()) for one in self.arrays]

    @property
    def count(self) -> int:
        return len(self.arrays[0])

    def number(self, which: int) -> Whole:
        """Return one of the three numbers: an int if all setups have the same, else an unknown."""
        return self.least[which] if self.least[which] == self._most[which] else unknown(which, self.least)

    def of(self, places: npt.NDArray[np.intp]) -> Values:
        """Return the values of some of the setups."""
        batch, rows, micro_batches = (one[places] for one in self.arrays)
        return Values(batch, rows, micro_batches, large=self._large)

    def _check(self, most: int) -> None:
        """Raise TooLarge if results up to `most` might not have room in 64 bits."""
        if not self._large and most > _ROOM:
            raise TooLarge

    def at(self, number: Whole, times: int) -> Any:
        """Return a number's values for all setups; an int if it is known. The caller may multiply the values by up to `times`.
        Raise TooLarge if 64 bits might have no room for that."""
        x, y, z = self._most
        self._check(times * sum(abs(c) * x**i * y**j * z**k for (i, j, k), c in terms_of(number).items()))
        if not isinstance(number, Number):
            return number
        return sum(c * self._power(exponents) for exponents, c in number.terms.items())

    def _power(self, exponents: Exponents) -> Any:
        if exponents not in self._powers:
            power: Any = np.ones(self.count, object if self._large else np.int64)
            for values, exponent in zip(self.arrays, exponents, strict=True):
                for _ in range(exponent):
                    power = power * values
            self._powers[exponents] = power
        return self._powers[exponents]

    def highest(self, polys: list[Poly]) -> Numbers:
        """Return the highest value of several polynomials in batch and rows for each setup, and at least 0."""
        x, y, _ = self._most
        for poly in polys:
            self._check(sum(abs(c) * x ** (i // 3) * y ** (i % 3) for i, c in enumerate(poly)))
        powers = np.stack([self._power((i // 3, i % 3, 0)) for i in range(6)])
        coefficients = np.array(polys, powers.dtype).reshape(-1, 6)
        out = np.zeros(self.count, powers.dtype)
        for start in range(0, self.count if polys else 0, _BLOCK):
            block = slice(start, start + _BLOCK)
            out[block] = np.maximum(out[block], (coefficients @ powers[:, block]).max(axis=0))
        return out


class Heights(NamedTuple):
    """The polynomials of a rank's peak in a phase, in bytes: `resident`, which is alive all the time, plus the highest of
    `moments`."""

    resident: Poly
    moments: list[Poly]
    after: tuple[Poly, ...] = ()
    """The totals in bytes after the last moment (`resident` is not added to them). One of them can be the peak."""

    def at(self, values: Values) -> Numbers:
        """Return the bytes of the peak for all setups."""
        highest = values.highest([self.resident]) + values.highest(self.moments)
        return np.maximum(highest, values.highest([*self.after])) if self.after else highest


def heights_of(rank: Rank, left: Poly) -> dict[str, Heights]:
    """Return the polynomials of each phase's peak, as `Report` finds it for one setup.

    `left`: the bytes that the model's run leaves after backward (memcalc.estimation.rank_peaks.buffers_after_backward).
    """
    sums, held = rank.sums, rank.holdings
    moments: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for state in rank.states:
        waiting = [_times(rank.profiles[i].saved.poly, count) for i, count in enumerate(state.in_flight)]
        if rank.between is not None:
            waiting.append(_times(total([rank.between]), state.between))
        profile = rank.profiles[state.chunk]
        for moment in profile.forward if state.kind == "forward" else profile.backward:
            gradients = moment.gradients if held.keeps_gradients else 0
            parts = [moment.poly, (gradients, 0, 0, 0, 0, 0), *waiting]
            if state.kind == "backward" and held.flush is not None and moment.gradients >= held.flush.after:
                parts.append(sums.flush)
            moments[state.kind].add(amount_of(added(*parts)))
    found = {phase: [bytes_of(one)[0] for one in undominated(of)] for phase, of in moments.items()}
    after = tuple(added(sums.always, left, one) for one in sums.after_backward)
    return {
        "forward": Heights(added(sums.always, sums.forward), found["forward"]),
        "backward": Heights(added(sums.always, sums.backward), found["backward"], after),
        "step": Heights(added(sums.always, left, sums.step), []),
    }


def total(rows: Iterable[Row]) -> Poly:
    """Return the bytes of all rows, as a polynomial."""
    return added(ZERO, *(_times(numel(row.shape)[1], row.copies * row.dtype.itemsize) for row in rows))


def added(*polys: Poly) -> Poly:
    """Return the sum of polynomials."""
    return tuple(map(sum, zip(*polys, strict=True)))  # type: ignore[return-value]


def _times(poly: Poly, count: int) -> Poly:
    return tuple([count * c for c in poly])  # type: ignore[return-value]
