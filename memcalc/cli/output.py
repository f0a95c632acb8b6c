"""Where a report goes: the terminal, a pipe, a file; as a table, JSON, CSV or Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from memcalc.errors import InputError, one_line

if TYPE_CHECKING:
    from memcalc.estimation import Report

FORMATS = ("table", "json", "csv", "markdown")


class Tables(NamedTuple):
    """The tables that are printed only when they are asked for."""

    rows: bool
    per_layer: bool
    all_ranks: bool


def choose_format(json: bool, format: str) -> str:
    """The format that --json and --format ask for."""
    if format not in FORMATS:
        raise InputError(f"--format {one_line(format)}: allowed: {', '.join(FORMATS)}")
    if json and format not in ("table", "json"):
        raise InputError(f"--format {format}: contradicts --json; give one of them")
    return "json" if json else format


def write(report: Report, kind: str, *, tables: Tables, output: Path | str | None) -> None:
    """Render the report and put it where it was asked for."""
    if output is None:
        _write_to(report, kind, tables, sys.stdout)
        return
    if output == "":  # an empty word is not made a path of
        raise InputError("--output '': expected the name of a file")
    try:
        with Path(output).open("w", encoding="utf-8", newline="") as file:
            _write_to(report, kind, tables, file)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"--output {one_line(output)}: cannot be written ({one_line(why)})") from None


def _write_to(report: Report, kind: str, tables: Tables, file: IO[str]) -> None:
    if kind == "table":
        from memcalc.report.table import print_report

        print_report(report, **tables._asdict(), file=file)
    else:
        file.write(_render(report, kind))


def _render(report: Report, kind: str) -> str:
    if kind == "json":
        import json

        return json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n"
    from memcalc.report import flat

    return flat.csv_text(report) if kind == "csv" else flat.markdown_text(report)
