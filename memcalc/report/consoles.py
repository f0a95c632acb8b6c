"""Where a report is printed, and how wide that is."""

from __future__ import annotations

import os
from typing import IO, Final

from rich.console import Console

_MOST: Final = 10_000


def console_for(file: IO[str], width: int) -> Console:
    """Colour and width of the terminal; plain elsewhere, as wide as COLUMNS says or else `width` columns."""
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdecimal() and len(columns) < 6 else 0
    return _console(file, asked if 0 < asked <= _MOST else width)


def listing_console(file: IO[str], width: int = 200) -> Console:
    """The same for tables that others read line by line: elsewhere `width` columns, enough to cut nothing."""
    return _console(file, width)


def _console(file: IO[str], width: int) -> Console:
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    if console.is_terminal:
        return console
    return Console(file=file, highlight=False, emoji=False, markup=False, width=width, no_color=True)
