"""Lists that a terminal shows as far as they fit, and that others read line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from memcalc.report.consoles import console_for
from memcalc.report.fitting import Column, fitting, needed, table_of


def print_columns(columns: Sequence[Column], first_to_go: Sequence[str], file: IO[str]) -> None:
    """Print the columns that the terminal or COLUMNS has a place for, and name the others in a line; elsewhere all of them."""
    console = console_for(file, needed(columns))
    kept, gone = fitting(columns, console.width, first_to_go)
    console.print(table_of(kept))
    if gone:
        console.print(gone)
