"""The console that a report is printed on, and its width."""

from __future__ import annotations

import os
from typing import IO, Final

from rich.console import Console

_MOST: Final = 10_000
LISTING: Final = 200
"""The width in columns of output that programs read line by line: wide enough to cut nothing."""


def console_for(file: IO[str], width: int) -> Console:
    """Return a console for a file. A terminal gets colour and its own width. Any other file gets plain text, as wide as the
    variable COLUMNS says or else `width` columns."""
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    if console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdecimal() and len(columns) < 6 else 0
    wide = asked if 0 < asked <= _MOST else width
    return Console(file=file, highlight=False, emoji=False, markup=False, width=wide, no_color=True)
