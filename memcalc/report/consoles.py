"""Where a report is printed, and how wide that is."""

from __future__ import annotations

import os
from typing import IO, Final

from rich.console import Console

_MOST: Final = 10_000
LISTING: Final = 200
"""Columns of what others read line by line: enough to cut nothing."""


def console_for(file: IO[str], width: int) -> Console:
    """Colour and width of the terminal; plain elsewhere, as wide as COLUMNS says or else `width` columns."""
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    if console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdecimal() and len(columns) < 6 else 0
    wide = asked if 0 < asked <= _MOST else width
    return Console(file=file, highlight=False, emoji=False, markup=False, width=wide, no_color=True)
