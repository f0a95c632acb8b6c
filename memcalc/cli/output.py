"""The output of a report: to the terminal, a pipe or a file, as a table, JSON, CSV or Markdown."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from memcalc.cli.streams import drop
from memcalc.cli.waiting import waiting
from memcalc.errors import InputError, one_line

if TYPE_CHECKING:
    from collections.abc import Generator

    from memcalc.estimation.report import Report

FORMATS = ("table", "json", "csv", "markdown")


class Tables(NamedTuple):
    """The tables that are printed only on demand."""

    rows: bool
    per_layer: bool
    all_ranks: bool
    verbose: bool = False


_BY_SUFFIX: Final = {".json": "json", ".csv": "csv", ".md": "markdown", ".markdown": "markdown", ".txt": "table"}
STDOUT: Final = "-"


def choose_format(json: bool, format: str | None, output: Path | str | None = None) -> str:
    """Return the format that --json or --format asks for, else the format of the output's suffix, else "table".

    Raise InputError if they contradict each other or the suffix names no format.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"--format {one_line(format)}: allowed: {', '.join(FORMATS)}")
    if json and format not in (None, "table", "json"):
        raise InputError(f"--format {format}: contradicts --json; give one of them")
    asked = "json" if json else format
    suffix = Path(output).suffix.lower() if output else ""
    named = _BY_SUFFIX.get(suffix)
    if asked is None and suffix and named is None:
        allowed = f"{', '.join(_BY_SUFFIX)}, a name without a suffix, or --format"
        raise InputError(f"--output {one_line(output)}: no format is named {one_line(suffix)}; allowed: {allowed}")
    if asked is not None and named not in (None, "table", asked):
        flag = "--json" if json else f"--format {format}"
        raise InputError(f"--output {one_line(output)}: contradicts {flag}; allowed: --format {named}, or another name")
    return asked or named or "table"


@contextmanager
def answering(status: int) -> Generator[None]:
    """Keep the exit status if the reader of stdout closes it: only the text is lost, `status` still is the answer."""
    from typer import Exit

    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich raises SystemExit if the pipe is broken
        drop(sys.stdout)
        raise Exit(status) from None


def write(report: Report, kind: str, *, tables: Tables, output: Path | str | None) -> None:
    """Write the report to a file, or to stdout (None or "-"). Raise InputError if the file cannot be written."""
    if output is None or str(output) == STDOUT:
        _write_to(report, kind, tables, sys.stdout)
        return
    with written("--output", output) as file:
        _write_to(report, kind, tables, file)


@contextmanager
def written(option: str, path: Path | str) -> Generator[IO[str]]:
    """Return the opened file that an option names. Raise InputError if it cannot be written."""
    if path == "":  # an empty word is not converted to a path
        raise InputError(f"{option} '': allowed: the name of a file")
    try:
        with Path(path).open("w", encoding="utf-8", errors="replace", newline="") as file:
            yield file
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{option} {one_line(path)}: cannot be written ({one_line(why)})") from None


def _write_to(report: Report, kind: str, tables: Tables, file: IO[str]) -> None:
    if kind == "table":
        from memcalc.report.table import print_report

        print_report(report, **tables._asdict(), file=file, waiting=waiting)
    else:
        with waiting("simulating the allocator"):
            text = _render(report, kind, tables)
        file.write(text)


def _render(report: Report, kind: str, tables: Tables) -> str:
    """Return the text of any format but the table. JSON always has every table, and Markdown every row."""
    if kind == "json":
        import json

        return json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n"
    also = {"per_layer": tables.per_layer, "all_ranks": tables.all_ranks}
    if kind == "csv":
        from memcalc.report.flat import csv_text

        return csv_text(report, **also)
    from memcalc.report.markdown import markdown_text

    return markdown_text(report, **also)
