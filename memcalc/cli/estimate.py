"""`memcalc estimate`: the report of one setup."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memcalc.cli import file_options as f
from memcalc.cli import options as o
from memcalc.cli import pictures as p
from memcalc.cli.html_page import Page, write_page
from memcalc.cli.setup_options import takes_setup

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

EPILOG = """Examples:
memcalc estimate llama-7b --zero 3 --gpus 8 --gpu a100-80gb
memcalc estimate llama-3-8b -s 32k --recompute full --gpu 80GB
memcalc estimate -m gpt2-xl -b 4 -s 1024 --precision fp32 --rows
memcalc estimate -m llama-7b --gpus 16 --tp 4 --pp 2 --global-batch-size 32 --per-layer
memcalc estimate llama-7b --zero 3 --gpus 8 --html page.html
memcalc estimate llama-7b --deepspeed ds_config.json --gpus 8 --explain-setup
memcalc estimate --params 7.5B --zero 2 --gpus 64 --json
"""


@takes_setup
def estimate(
    name: o.Name = None,
    model: o.Model = None,
    params: o.Params = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit with 1 if it does not fit --gpu, with 2 if that is not known (--params).",
            rich_help_panel="Output",
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Phases, every collective, FLOPs, times.", rich_help_panel="Output"),
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Every row with its formula.", rich_help_panel="Output")] = False,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="What one layer sends, by collective.", rich_help_panel="Output")
    ] = False,
    all_ranks: Annotated[
        bool,
        typer.Option("--all-ranks", help="What every pipeline rank needs and sends.", rich_help_panel="Output"),
    ] = False,
    explain_setup: f.ExplainSetup = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.", rich_help_panel="Output")] = False,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="table, json, csv, markdown. (default: by the suffix of --output, else table)",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write to a file, in the format of its suffix (.json, .csv, .md); - is stdout.",
            rich_help_panel="Output",
        ),
    ] = None,
    timeline: p.Drawn = False,
    snapshot: p.Snapshot = None,
    trace: p.Trace = None,
    html: Page = None,
    **setup: Any,
) -> None:
    """Estimate what one training step needs per GPU: memory by component and phase, communication, and a verdict."""
    from memcalc.cli.output import Tables, answering, choose_format, write
    from memcalc.cli.waiting import waiting
    from memcalc.errors import InputError
    from memcalc.estimation.estimate import estimate as run

    kind = choose_format(json, format, output)
    pictures = p.Pictures(timeline, snapshot, trace)
    model = o.model_of(name, model)
    given = o.setup_of(setup)
    if check and "gpu" not in given:
        raise InputError("--check: needs --gpu, such as --gpu a100-80gb")
    if all_ranks and "pp_rank" in given:
        raise InputError(f"--all-ranks: contradicts --pp-rank {given['pp_rank']}; give one of them")
    states_only = params is not None and model is None
    p.check_pictures(pictures, output=output, page=html, states_only=states_only)
    if states_only:
        _check_states_have(per_layer=per_layer, all_ranks=all_ranks)
    with waiting("computing the step"):
        report = run(model, params=params, **given)
    if explain_setup:
        f.print_setup(report, given, json=kind == "json")
        return
    if check:
        _check_known(report)
    if html is not None:
        write_page(report, html)
    status = 1 if check and report.fits is False else 0
    drawn = p.recorded(pictures, report)
    with answering(status):
        write(report, kind, tables=Tables(rows, per_layer, all_ranks, verbose), output=output)
        if drawn is not None and timeline:
            p.draw(drawn, kind=kind, output=output)
    if status:
        raise typer.Exit(status)


def _check_states_have(**tables: bool) -> None:
    """Raise InputError for an asked table that does not exist for a bare number of parameters."""
    from memcalc.estimation.sizing import NOT_OF_STATES
    from memcalc.inputs.options import refuse

    for name, asked in tables.items():
        if asked:
            refuse(name, True, NOT_OF_STATES)


def _check_known(report: Report) -> None:
    """Raise InputError if it is not known whether the report fits its GPU: `--check` has no exit status for that."""
    from memcalc.errors import InputError

    if report.gpu is not None and report.fits is None:
        from memcalc.report.verdict import states_words

        allowed = "`cudnn: false` in the file" if report.uncounted else "--model instead of --params"
        raise InputError(f"--check: {states_words(report, report.gpu)}; allowed: {allowed}")
