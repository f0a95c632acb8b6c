"""The work of `--html`: the page of a report in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.cli.output import STDOUT, written
from memcalc.cli.waiting import waiting
from memcalc.errors import InputError, one_line

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_ALLOWED = "the name of a file of its own, like page.html"


def check_page(html: Path | str, output: Path | str | None) -> None:
    """Raise InputError if the page has no file of its own."""
    if str(html) in ("", STDOUT):
        raise InputError(f"--html {one_line(html)}: is no file; allowed: {_ALLOWED}")
    if output is not None and str(output) not in ("", STDOUT) and _are_one(html, output):
        raise InputError(f"--html {one_line(html)}: is the file of --output too; allowed: {_ALLOWED}")


def _are_one(html: Path | str, output: Path | str) -> bool:
    try:
        return os.path.realpath(html) == os.path.realpath(output)
    except (OSError, ValueError):  # a name that no file can have, which writing refuses
        return False


def write_page(report: Report, html: Path | str) -> None:
    """Write the page of a report. Raise InputError if the file cannot be written."""
    from memcalc.pictures.html.page import page

    with waiting("the page"):
        text = page(report)
    with written("--html", html) as file:
        file.write(text)
