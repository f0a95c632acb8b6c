"""Bars of blocks, all to one scale: a full bar is the peak."""

from __future__ import annotations

from typing import Final

_MOST: Final = 20
_FROM: Final = 60  # columns of a console that names and sizes need; half of those above them are the bars'
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def full_bar(width: int) -> int:
    """The length of a full bar on a console of so many columns."""
    return max(1, min(_MOST, (width - _FROM) // 2))


def bar(part: int, whole: int, full: int) -> str:
    """A bar of `full` cells times part/whole, to an eighth of a cell; never longer, and to be seen unless the part is zero."""
    if not part:
        return ""
    eighths = max(1, min(8 * full, round(8 * full * part / whole)))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
