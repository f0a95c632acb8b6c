"""The place in a row of values from which they are enough no more, by doubling and bisection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_STEPS: Final = 8
"""The number of values beyond a boundary that are tried: 2, 4, 8 ... places from it."""


def last_enough(count: int, enough: Callable[[int], bool]) -> int | None:
    """Return a place `i` of `count` with `enough(i)` and not `enough(i + 1)`; the last place if it is enough; None if the first
    place is not.

    The number of questions grows with the logarithm of `i`. If there are several such places, the result is one of them.
    """
    if not count or not enough(0):
        return None
    good, bad = _doubled(count, enough)
    while bad - good > 1:
        middle = (good + bad) // 2
        if enough(middle):
            good = middle
        else:
            bad = middle
    return good


def _doubled(count: int, enough: Callable[[int], bool]) -> tuple[int, int]:
    """Return a place that is enough, and a later one that is not, or `count`. The distance of the places doubles."""
    good, step = 0, 1
    while good < count - 1:
        ahead = min(good + step, count - 1)
        if not enough(ahead):
            return good, ahead
        good, step = ahead, 2 * step
    return good, count


def beyond(place: int, count: int) -> list[int]:
    """Return some places behind the one after `place`, at growing distances."""
    return [place + (1 << i) for i in range(1, _STEPS + 1) if place + (1 << i) < count]
