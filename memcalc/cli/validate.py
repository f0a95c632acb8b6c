"""`memcalc validate`: run a setup, and print prediction and measurement side by side."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from memcalc.cli import options as o
from memcalc.cli.setup_options import takes_setup

EPILOG = """Examples:
memcalc validate --model gpt2 --precision bf16 -b 2 -s 512
memcalc validate --model llama-7b --engine fsdp2 --zero 3 --gpus 8
memcalc validate --model llama-7b --engine fsdp2 --zero 3 --gpus 8 --quantize nf4 --lora-rank 16
memcalc validate --model llama-7b --backend cuda --precision bf16 --recompute full
memcalc validate --suite quick
memcalc validate --suite gpu --backend cuda --record measured.json
"""

_PANEL = "Measurement"


@takes_setup
def validate(
    name: o.Name = None,
    model: o.Model = None,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            help="fake (default; no GPU: sizes without data) or cuda.",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = "fake",
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            help='Instead of --model: quick, fine-tuning, gpu, or a JSON file {"cases": [...]}.',
            rich_help_panel=_PANEL,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            help="With --suite: write results to this file. Cases that are in it are not run again.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.", rich_help_panel=_PANEL)] = False,
    **setup: Any,
) -> None:
    """Run the estimated step (transformers, torch, the engine) and print prediction and measurement side by side."""
    from memcalc.errors import InputError, one_line
    from memcalc.inputs.file_options import FILES
    from memcalc.validate import recording, run, suites, with_flash

    model = o.model_of(name, model)
    given = o.setup_of(setup)
    if "layers" in given:
        raise InputError("--layers: validate runs models of transformers; allowed: --model")
    has_file = any(name in given for name in FILES)
    if (model is None) == (suite is None) and not (suite is None and has_file):
        raise InputError("--model or --suite: exactly one of them is needed")
    if record is not None and not str(record):  # an empty word is not converted to a path
        raise InputError("--record '': allowed: the name of a file")
    if suite == "":
        raise InputError("--suite '': allowed: the name of a file")
    if suite is None and record is not None:
        raise InputError("--record: needs --suite; allowed: --json, which prints the record of one case")
    speaks = os.environ.get("RANK", "0") == "0"  # only the first of the ranks that torchrun starts
    if suite is not None:
        if given:
            raise InputError(
                f"--{next(iter(given)).replace('_', '-')}: contradicts --suite, whose cases have options; leave it out"
            )
        cases = suites.read_suite(suite)
        made = recording.run_suite(cases, backend, record, lambda line: print(line, file=sys.stderr), speaks=speaks)
        document: dict[str, Any] = {"schema_version": 1, "cases": made}
    else:
        try:
            comparison = with_flash.validate(model, backend=backend, **given)
        except InputError:
            raise
        except Exception as error:  # raised by torch, transformers or the engine
            if run.is_out_of_memory(error):
                raise InputError(f"--backend {backend}: out of memory; allowed: a smaller setup") from None
            why = f"{type(error).__name__}: {one_line(error, 300)}"
            where = run.place_of(error)
            raise InputError(f"--backend {backend}: the run failed ({why}) at {where}") from error
        if not json and speaks:
            from memcalc.report.comparison import print_comparison

            print_comparison(comparison, sys.stdout)
        document = comparison.to_dict()
    if json and speaks:
        import json as library

        print(library.dumps(document, indent=1, ensure_ascii=False))
