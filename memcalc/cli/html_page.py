"""The work of `--html`: the page of a report in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memcalc.cli.output import written
from memcalc.cli.waiting import waiting

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

Page = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="Write a page with pictures and every row, for a browser.",
        rich_help_panel="Output",
        show_default=False,
    ),
]


def write_page(report: Report, html: Path | str) -> None:
    """Write the page of a report. Raise InputError if the file cannot be written."""
    from memcalc.pictures.html.page import page

    with waiting("the page"):
        text = page(report)
    with written("--html", html) as file:
        file.write(text)
