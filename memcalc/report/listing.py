"""Lists that a terminal shows as far as they fit, and that others read line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from memcalc.report.consoles import listing_console
from memcalc.report.fitting import Column, fitting, needed, table_of


def print_columns(columns: Sequence[Column], first_to_go: Sequence[str], file: IO[str]) -> None:
    """The columns that the terminal has a place for and a line of those that it has none for; anywhere else all of them."""
    console = listing_console(file, needed(columns))
    kept, gone = fitting(columns, console.width, first_to_go)
    console.print(table_of(kept))
    if gone:
        console.print(gone)
