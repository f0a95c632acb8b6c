"""`memcalc gpus`: the GPUs that memcalc knows, with the source of every number."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

EPILOG = """Examples:
memcalc gpus
memcalc gpus h100-80gb --json
"""


def gpus(
    name: Annotated[str | None, typer.Argument(help="One GPU, by name or alias.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List the GPUs, or show one with its sources."""
    from memcalc.inputs.gpu import all_gpus, named_gpu
    from memcalc.report.gpus import as_document, print_gpu, print_list

    if json:
        import json as library

        document = [as_document(gpu) for gpu in all_gpus()] if name is None else as_document(named_gpu(name))
        print(library.dumps(document, indent=1, ensure_ascii=False))
    elif name is None:
        print_list(all_gpus(), sys.stdout)
    else:
        print_gpu(named_gpu(name), sys.stdout)
