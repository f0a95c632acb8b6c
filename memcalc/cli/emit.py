"""`memcalc emit`: a setup as another tool's file or command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memcalc.cli import options as o
from memcalc.cli.setup_options import takes_setup

if TYPE_CHECKING:
    from memcalc.formats.written import Written

EPILOG = """Examples:
memcalc emit deepspeed llama-7b --zero 3 --gpus 8 -b 2 -o ds_config.json
memcalc emit accelerate llama-3-8b --engine fsdp2 --gpus 8
memcalc emit torchrun llama-7b --gpus 64
"""


@takes_setup
def emit(
    topic: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="deepspeed, accelerate, training-args, megatron, torchtitan, torchrun.",
            show_default=False,
        ),
    ],
    name: o.Name = None,
    model: o.Model = None,
    file: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.", rich_help_panel="Output")
    ] = None,
    **setup: Any,
) -> None:
    """Print a setup as another tool's configuration file, or as its command line. What it cannot say goes to stderr."""
    from memcalc.estimation.emitted import emit as run

    print_written(run(topic, o.model_of(name, model), **o.setup_of(setup)), topic, file)


def print_written(written: Written, format: str, output: Path | None) -> None:
    """Print the file, or write it to `output`, and say on stderr what it does not say."""
    import sys

    from memcalc.inputs.options import option_name

    for option, why in written.unsaid.items():
        print(f"not in {format}: {option_name(option)}: {why}", file=sys.stderr)
    if output is None or str(output) == "-":
        sys.stdout.write(written.text)
    else:
        try:
            output.write_text(written.text, encoding="utf-8")
        except OSError as error:
            from memcalc.errors import InputError, one_line

            raise InputError(f"--output {one_line(output)}: cannot be written ({error.strerror})") from None
