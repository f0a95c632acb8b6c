"""The report in a terminal: the answer, the memory, the communication and the advice; the rest on demand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import IO, TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from memcalc.report.advice_lines import advice_lines
from memcalc.report.answer import answer
from memcalc.report.communication import communication_lines, communication_table
from memcalc.report.communication_summary import communication_summary
from memcalc.report.consoles import console_for
from memcalc.report.defaults import default_lines
from memcalc.report.folding import Folded
from memcalc.report.memory_table import memory_table
from memcalc.report.notes import notes
from memcalc.report.time import time_lines
from memcalc.report.title import title

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

MORE: Final = (
    "more: --verbose (phases, every collective, FLOPs), --rows (every tensor with its formula), --per-layer, --help"
)


def print_report(
    report: Report,
    *,
    rows: bool,
    file: IO[str],
    per_layer: bool = False,
    all_ranks: bool = False,
    verbose: bool = False,
    waiting: Callable[[str], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Print a report. A terminal gets colour and its own width; any other file gets plain text of 100 columns (220 with `rows`,
    120 with `all_ranks`), or as COLUMNS says.

    `waiting` returns the context for slow work, given words for that work.
    """
    console = console_for(file, 220 if rows else 120 if all_ranks else 100)
    with waiting("simulating the allocator"):
        parts = _first(report, console.width, verbose=verbose)
        if all_ranks:
            from memcalc.report.all_ranks import all_ranks_table

            parts += ["", *all_ranks_table(report, console.width)]
        if per_layer:
            from memcalc.report.per_layer import per_layer_table

            parts += ["", *per_layer_table(report, console.width)]
        if rows:
            from memcalc.report.rows_table import rows_table

            parts += ["", *rows_table(report, console.width)]
    console.print(Group(*parts))  # before the search for advice, which may take longer than all else
    file.flush()
    with waiting("searching for changes that help"):
        lines = advice_lines(report)
    if not verbose:
        lines += ["", Folded(MORE)]
    if lines:
        console.print(Group(*lines))


def _first(report: Report, width: int, *, verbose: bool) -> list[RenderableType]:
    """Return the answer, the memory, and the communication."""
    parts: list[RenderableType] = [title(report), *answer(report), *time_lines(report), *_said(report), ""]
    if report.model.model_type == "layers":
        from memcalc.report.layers_table import layers_table

        parts += layers_table(report, width, verbose=verbose)
    parts += memory_table(report, width, verbose=verbose)
    if report.host:
        from memcalc.report.host import host_lines

        parts += host_lines(report)
    if verbose:
        from memcalc.report.phases import phase_lines

        parts += ["", *phase_lines(report)]
    if report.setup.pp > 1:
        from memcalc.report.pipeline_lines import pipeline_lines

        parts += pipeline_lines(report)
    if verbose:
        from memcalc.report.compute import compute_lines

        parts += compute_lines(report)
    if report.collectives and verbose:
        parts += ["", *communication_table(report, width), *communication_lines(report)]
    elif report.collectives:
        parts += ["", *communication_summary(report, width)]
    return parts


def _said(report: Report) -> list[RenderableType]:
    """Return a line for each default and each note."""
    traced = [f"memcalc has no program of this model type: {report.traced}"] if report.traced else []
    return [Text(line) for line in (*default_lines(report), *traced, *notes(report))]
