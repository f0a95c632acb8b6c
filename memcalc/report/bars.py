"""Bars of block characters, all to one scale: a full bar is the peak."""

from __future__ import annotations

from typing import Final

_MOST: Final = 20
_FROM: Final = 60  # columns that names and sizes need; bars get half of the others
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def full_bar(width: int) -> int:
    """Return the length of a full bar in cells, on a console of `width` columns."""
    return max(1, min(_MOST, (width - _FROM) // 2))


def bar(part: int, whole: int, full: int) -> str:
    """Return a bar of `full` * `part` / `whole` cells, to an eighth of a cell: at most `full`, and at least an eighth unless
    `part` is zero."""
    if not part:
        return ""
    eighths = max(1, min(8 * full, round(8 * full * part / whole)))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
