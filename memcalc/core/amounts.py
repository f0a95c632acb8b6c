"""An amount: live bytes as one integer. The integer holds the coefficients of a polynomial in (batch - 1)
and (seq - 1), and the bytes of gradients.

Adding two amounts is one addition. An amount exceeds another one for every batch and sequence (from 1 up) if it is as
large in every coefficient: a larger coefficient cannot make up for a smaller one at every size.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from memcalc.core.dims import Poly, Shape, numel
from memcalc.core.dtypes import DType

_DIGIT: Final = 64
_MASK: Final = (1 << _DIGIT) - 1
_SIGN: Final = 1 << _DIGIT - 1
_LENGTH: Final = 7  # six coefficients and the bytes of gradients
_SIGNS: Final = sum(_SIGN << _DIGIT * i for i in range(_LENGTH))
_GRADIENTS: Final = _DIGIT * 6
WIDTH: Final = _DIGIT * _LENGTH
"""The bits of an amount."""


@lru_cache(maxsize=16384)
def amount(shape: Shape, dtype: DType, component: str) -> int:
    """Return the amount of a block: zero unless the block is an activation, a gradient or gathered. Other blocks are
    counted elsewhere."""
    size, poly = numel(shape)
    if component == "gradients":
        return size * dtype.itemsize << _GRADIENTS
    if component not in ("activation", "gathered"):
        return 0
    return sum(c * dtype.itemsize << _DIGIT * i for i, c in enumerate(_from_one(poly)) if c)


def bytes_of(given: int) -> tuple[Poly, int]:
    """Return an amount's polynomial in batch and seq, and its bytes of gradients."""
    digits: list[int] = []
    for _ in range(_LENGTH):
        digit = given & _MASK
        if digit >= _SIGN:  # a negative digit has borrowed from the next
            digit -= 1 << _DIGIT
        digits.append(digit)
        given = (given - digit) >> _DIGIT
    return _to_zero(*digits[:6]), digits[6]


def amount_of(poly: Poly) -> int:
    """Return the amount of a polynomial in batch and seq, without gradients."""
    return sum(c << _DIGIT * i for i, c in enumerate(_from_one(poly)) if c)


def exceeds(left: int, right: int) -> bool:
    """Tell whether `left` is as large as `right` in every coefficient.

    With the sign bit added, no coefficient of the difference borrows from the next. The sign bit stays set where the
    coefficient is not negative.
    """
    return (left - right + _SIGNS) & _SIGNS == _SIGNS


def undominated(amounts: Iterable[int]) -> list[int]:
    """Return the amounts that no other one exceeds, the largest first."""
    kept: list[int] = []
    for new in sorted(amounts, reverse=True):  # an amount that exceeds another one is the larger integer
        for i, other in enumerate(kept):
            if (other - new + _SIGNS) & _SIGNS == _SIGNS:
                if i:
                    kept.insert(0, kept.pop(i))  # an amount that exceeds one is likely to exceed the next
                break
        else:
            kept.append(new)
    return sorted(kept, reverse=True)


def _from_one(poly: Poly) -> Poly:
    """Return a polynomial in batch and seq as a polynomial in (batch - 1) and (seq - 1)."""
    c0, c1, c2, b0, b1, b2 = poly
    return (c0 + c1 + c2 + b0 + b1 + b2, c1 + 2 * c2 + b1 + 2 * b2, c2 + b2, b0 + b1 + b2, b1 + 2 * b2, b2)


def _to_zero(k0: int, k1: int, k2: int, k3: int, k4: int, k5: int) -> Poly:
    """Return a polynomial in (batch - 1) and (seq - 1) as a polynomial in batch and seq."""
    b2, c2 = k5, k2 - k5
    b1 = k4 - 2 * b2
    b0 = k3 - b1 - b2
    c1 = k1 - 2 * c2 - k4
    return (k0 - c1 - c2 - k3, c1, c2, b0, b1, b2)
