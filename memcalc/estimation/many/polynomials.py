"""Polynomials in a micro-batch's sequences, a rank's tokens of one and the micro-batches, evaluated for arrays of them."""

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
    from memcalc.engines.ranks import Rank

Wholes = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]
"""Whole numbers have 64 bits, or are Python's own where these have no room."""
MOST: Final = (1 << 63) - 1
_ROOM: Final = 1 << 62
_BLOCK: Final = 4096
"""Setups that are evaluated at once, so that their numbers stay in the cache."""


class TooLarge(Exception):
    """More than 63 bits might be needed."""


class Values:
    """The three numbers of each of many setups. Evaluated they are arrays of one number for each setup: 64 bits, or Python's
    own numbers where they are `large`."""

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
        """One of the three: itself where it is the same in all setups."""
        return self.least[which] if self.least[which] == self._most[which] else unknown(which, self.least)

    def of(self, places: npt.NDArray[np.intp]) -> Values:
        """Return the values of some of the setups."""
        batch, rows, micro_batches = (one[places] for one in self.arrays)
        return Values(batch, rows, micro_batches, large=self._large)

    def _check(self, most: int) -> None:
        """TooLarge if that is too much for 64 bits."""
        if not self._large and most > _ROOM:
            raise TooLarge

    def at(self, number: Whole, times: int) -> Any:
        """A number for all setups, of which `times` as much may be taken: an int where it is known."""
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
        """Return the highest of polynomials in batch and rows, and at least 0."""
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
    """The polynomials of which the highest is a rank's peak in a phase: `held` in all of it, and one of the `moments`."""

    held: Poly
    moments: list[Poly]
    after: tuple[Poly, ...] = ()
    """Return what there is after the last moment, in all: the peak may be there."""

    def at(self, values: Values) -> Numbers:
        """Bytes, for all setups."""
        highest = values.highest([self.held]) + values.highest(self.moments)
        return np.maximum(highest, values.highest([*self.after])) if self.after else highest


def heights_of(rank: Rank, left: Poly) -> dict[str, Heights]:
    """Return the peak of each phase, as `Report` has it for one setup. `left`: rows after backward that no engine knows of."""
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
    """The bytes of all rows."""
    return added(ZERO, *(_times(numel(row.shape)[1], row.copies * row.dtype.itemsize) for row in rows))


def added(*polys: Poly) -> Poly:
    """Their sum."""
    return tuple(map(sum, zip(*polys, strict=True)))  # type: ignore[return-value]


def _times(poly: Poly, count: int) -> Poly:
    return tuple([count * c for c in poly])  # type: ignore[return-value]
