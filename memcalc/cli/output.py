"""Where a report goes: the terminal, a pipe, a file; as a table, JSON, CSV or Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.errors import InputError, one_line

if TYPE_CHECKING:
    from memcalc.estimation import Report

FORMATS = ("table", "json", "csv", "markdown")


def choose_format(json: bool, format: str) -> str:
    """The format that --json and --format ask for."""
    if format not in FORMATS:
        raise InputError(f"--format {one_line(format)}: allowed: {', '.join(FORMATS)}")
    if json and format not in ("table", "json"):
        raise InputError(f"--format {format}: contradicts --json; give one of them")
    return "json" if json else format


def write(report: Report, kind: str, *, rows: bool, output: Path | None) -> None:
    """Render the report and put it where it was asked for."""
    if kind == "table":
        from memcalc.report.table import print_report

        if output is None:
            print_report(report, rows=rows, file=sys.stdout)
            return
        with _open(output) as file:
            print_report(report, rows=rows, file=file)
        return
    text = _render(report, kind)
    if output is None:
        sys.stdout.write(text)
        return
    with _open(output) as file:
        file.write(text)


def _render(report: Report, kind: str) -> str:
    if kind == "json":
        import json

        return json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n"
    from memcalc.report import flat

    return flat.csv_text(report) if kind == "csv" else flat.markdown_text(report)


def _open(path: Path):  # type: ignore[no-untyped-def]
    try:
        return path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise InputError(f"--output {one_line(path)}: cannot be written ({error.strerror})") from None
