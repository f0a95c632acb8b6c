"""Integers that are not known yet: polynomials in unknowns of which only the least value is known.

Code that adds and multiplies such numbers gives its result for all values at once. Some operations depend on a value: a
comparison, a loop, a division with a remainder, a cache key. The least values decide them where they can; otherwise the
operation raises `Undecided`. So every result holds for all values from the least ones up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn, Union

Exponents = tuple[int, int, int]
"""The exponents of the three unknowns: sequences in a micro-batch, tokens of a rank's part of one, micro-batches."""
Whole = Union[int, "Number"]

_ONE: Final[Exponents] = (0, 0, 0)


class Undecided(Exception):
    """Raised where some values would take another branch than others."""


def unknown(which: int, least: tuple[int, int, int]) -> Number:
    """Return unknown number `which` of the three. `least` holds the least value of each."""
    i, j, k = (int(which == place) for place in range(3))
    return Number({(i, j, k): 1}, least)


def terms_of(number: Whole) -> Mapping[Exponents, int]:
    """Return the coefficients of a number by exponents. A known number has one constant term."""
    return number.terms if isinstance(number, Number) else {_ONE: number} if number else {}


class Number:
    """A polynomial. `least` holds the least value of each unknown, 1 or more."""

    __slots__ = ("least", "terms")

    def __init__(self, terms: Mapping[Exponents, int], least: tuple[int, int, int]) -> None:
        self.terms = {exponents: c for exponents, c in terms.items() if c}
        self.least = least

    def __str__(self) -> str:
        return "n"  # formulas of unknowns are never shown

    __repr__ = __str__

    # --- arithmetic

    def __add__(self, other: Whole) -> Number:
        out = dict(self.terms)
        for exponents, c in terms_of(other).items():
            out[exponents] = out.get(exponents, 0) + c
        return Number(out, self.least)

    __radd__ = __add__

    def __neg__(self) -> Number:
        return self * -1

    def __sub__(self, other: Whole) -> Number:
        return self + other * -1

    def __rsub__(self, other: Whole) -> Number:
        return -self + other

    def __mul__(self, other: Whole) -> Number:
        if not isinstance(other, (int, Number)):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented  # a list of unknown length
        out: dict[Exponents, int] = {}
        for (a, b, c), left in self.terms.items():
            for (d, e, f), right in terms_of(other).items():
                exponents = a + d, b + e, c + f
                out[exponents] = out.get(exponents, 0) + left * right
        return Number(out, self.least)

    __rmul__ = __mul__

    def __floordiv__(self, other: Whole) -> Number:
        """Return the quotient by a single term. Raises Undecided if a division leaves a remainder."""
        if len(terms_of(other)) != 1:
            raise Undecided(f"{self} // {other}")
        [((d, e, f), divisor)] = terms_of(other).items()
        out: dict[Exponents, int] = {}
        for (a, b, c), left in self.terms.items():
            if left % divisor or a < d or b < e or c < f:
                raise Undecided(f"{self} // {other}")
            out[a - d, b - e, c - f] = left // divisor
        return Number(out, self.least)

    def __mod__(self, other: Whole) -> int:
        """Return 0 if `other` divides the number for all values; raise Undecided otherwise."""
        _ = self // other
        return 0

    # --- operations that depend on a value

    def _positive(self) -> bool:
        """Return True if no value is below one. Returns False also where terms of both signs leave it open."""
        if any(c < 0 for exponents, c in self.terms.items() if exponents != _ONE):
            return False
        x, y, z = self.least
        return sum(c * x**i * y**j * z**k for (i, j, k), c in self.terms.items()) > 0

    def __gt__(self, other: Whole) -> bool:
        more = self - other
        if more._positive():
            return True
        if (1 - more)._positive():
            return False
        raise Undecided(f"{self} > {other}")

    def __ge__(self, other: Whole) -> bool:
        return self > other - 1

    def __lt__(self, other: Whole) -> bool:
        return not self >= other

    def __le__(self, other: Whole) -> bool:
        return not self > other

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, Number)):
            return False
        more = self - other
        if more.terms and not more._positive() and not (-more)._positive():
            raise Undecided(f"{self} == {other}")
        return not more.terms

    def __bool__(self) -> bool:
        return self != 0

    def _open(self, *_: object) -> NoReturn:
        raise Undecided(f"{self} is not known")

    __hash__ = __index__ = __int__ = __float__ = __rfloordiv__ = __rmod__ = _open  # type: ignore[assignment]
