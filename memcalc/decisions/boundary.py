"""The place in a row of values from which they are enough no more, by doubling and bisection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Test = Callable[[int], bool]
_STEPS: Final = 5
"""The number of places beyond a boundary that are tried: 2, 4, 8 ... from it."""
_PARTS: Final = 64
"""The first step down from the last possible place is one part in this many of the places before it."""


def last_enough(count: int, possible: Test, enough: Test) -> int | None:
    """Return a place `i` of `count` with `enough(i)` and not `enough(i + 1)`, or the last place; None if no place was found.

    `possible` is quick: a place that is not possible is not enough. The slow `enough` is asked about places near the last
    possible one. If there are several boundaries, the result is one of them.
    """
    bound = _last(count, possible)
    if bound is None:
        return None
    good, bad = _down(bound, enough)
    return None if good is None else _bisected(good, bad, enough)


def _last(count: int, test: Test) -> int | None:
    """Return a place that passes with one behind it that does not, or the last place; None if the first place fails."""
    if not count or not test(0):
        return None
    good, step = 0, 1
    while good < count - 1:
        ahead = min(good + step, count - 1)
        if not test(ahead):
            return _bisected(good, ahead, test)
        good, step = ahead, 2 * step
    return good


def _down(bound: int, enough: Test) -> tuple[int | None, int]:
    """Return a place from `bound` down that is enough, None if there is none, and a place behind it that is not. The distance of
    the places doubles."""
    bad, place, step = bound + 1, bound, max(1, bound // _PARTS)
    while not enough(place):
        if not place:
            return None, 0
        bad, place, step = place, max(0, place - step), 2 * step
    return place, bad


def _bisected(good: int, bad: int, test: Test) -> int:
    """Return a place between one that passes and one that fails: it passes, and the one behind it fails."""
    while bad - good > 1:
        middle = (good + bad) // 2
        if test(middle):
            good = middle
        else:
            bad = middle
    return good


def beyond(place: int, count: int) -> list[int]:
    """Return some places behind the one after `place`, at growing distances."""
    return [place + (1 << i) for i in range(1, _STEPS + 1) if place + (1 << i) < count]
