"""Lists for a terminal, which shows the columns that fit, and for programs, which read every line whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from memcalc.report.consoles import console_for
from memcalc.report.fitting import Column, fitting, needed, table_of


def print_columns(columns: Sequence[Column], first_to_go: Sequence[str], file: IO[str]) -> None:
    """Print the columns that fit the terminal or COLUMNS, and a line that names the others. Without either, print all
    columns."""
    console = console_for(file, needed(columns))
    kept, gone = fitting(columns, console.width, first_to_go)
    console.print(table_of(kept))
    if gone:
        console.print(gone)
