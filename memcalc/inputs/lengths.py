"""Lengths of a data set's sequences: a histogram as text, such as 512:0.6,2048:0.4, or a file with one length a line."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from memcalc.errors import InputError, one_line

_ALLOWED: Final = "allowed: length:share with commas or +, such as 512:0.6,2048:0.4, or a file with one length a line"
_MOST: Final = 10**8


class Lengths(NamedTuple):
    """The moments of a histogram of lengths that matter to packed rows."""

    longest: int
    mean: float
    attended: float
    """The mean length of the sequence that a token is in: the sum of squares over the sum."""


@cache
def lengths_of(text: str) -> Lengths:
    """Return the moments of a histogram, given as text or as a file. Raises InputError."""
    try:
        histogram = _of_file(text) if ":" not in text else _of_text(text)
    except (OSError, ValueError):
        raise InputError(f"--lengths {one_line(text)}: {_ALLOWED}") from None
    shares = sum(histogram.values())
    if not shares or any(not 1 <= length <= _MOST for length in histogram):
        raise InputError(
            f"--lengths {one_line(text)}: {_ALLOWED}; lengths are whole numbers from 1, and shares add up to more than 0"
        )
    tokens = sum(length * share for length, share in histogram.items())
    squares = sum(length**2 * share for length, share in histogram.items())
    return Lengths(max(histogram), tokens / shares, squares / tokens)


def _of_text(text: str) -> dict[int, float]:
    out: Counter[int] = Counter()
    for part in text.replace("+", ",").split(","):
        length, share = part.split(":")
        if not 0 < float(share) < float("inf"):
            raise ValueError(part)
        out[int(length)] += float(share)  # type: ignore[assignment]
    return dict(out)


def _of_file(text: str) -> dict[int, float]:
    return dict(Counter(int(line) for line in Path(text).read_text(encoding="utf-8").split()))
