"""`memcalc fit`: the largest or smallest value of a quantity that fits a GPU."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memcalc.cli import options as o
from memcalc.cli.setup_options import takes_setup

EPILOG = """Examples:

memcalc fit llama-7b --solve micro-batch-size -g 8 --zero 3 --gpu a100-80gb

memcalc fit llama-2-70b --solve gpus --zero 3 --gpu h100-80gb

memcalc fit llama-3-8b --solve seq-len -g 8 --engine fsdp2 --recompute full --gpu 80GB

memcalc fit --solve params -g 64 --zero 2 --gpu a100-80gb

memcalc fit llama-7b -g 8 --gpu a100-80gb --ladder
"""


@takes_setup
def fit(
    name: o.Name = None,
    model: o.Model = None,
    params: o.Params = None,
    solve: Annotated[
        str | None,
        o.option(
            "micro-batch-size, seq-len, gpus, layers, params, lora-rank: what to search for.", "Output", "--solve"
        ),
    ] = None,
    max_gpus: Annotated[
        int | None, o.option("Most GPUs that --solve gpus tries. (default: 1024)", "Output", "--max-gpus")
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder",
            help="Instead of --solve: what people change when it does not fit, what each saves and costs in time.",
            rich_help_panel="Output",
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if nothing fits --gpu.", rich_help_panel="Output")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.", rich_help_panel="Output")] = False,
    **setup: Any,
) -> None:
    """Find the largest batch, length, depth or size, or the fewest GPUs, that fits a GPU."""
    import sys

    from memcalc.cli.output import answering
    from memcalc.cli.waiting import waiting
    from memcalc.decisions.fit import fit as run
    from memcalc.decisions.quantities import MOST_GPUS
    from memcalc.errors import InputError

    model = o.model_of(name, model)
    if max_gpus is not None and solve != "gpus":
        raise InputError(f"--max-gpus {max_gpus}: goes with --solve gpus; leave it out")
    given = o.setup_of(setup)
    if ladder:
        if solve is not None:
            raise InputError(f"--solve {solve}: goes without --ladder; leave one of them out")
        _ladder({"model": model, "params": params, **given}, check, json)
        return
    with waiting("steps, on paper and played through the allocator"):
        found = run(solve, model, params=params, max_gpus=MOST_GPUS if max_gpus is None else max_gpus, **given)
    if check and found.report.fits is None:
        raise InputError(
            "--check: activations are not known without a model; allowed: with --model and another --solve"
        )
    status = 1 if check and found.value is None else 0
    with answering(status):
        if json:
            import json as library

            with waiting("what stops the next step, and what would help"):
                text = library.dumps(found.to_dict(), indent=1, ensure_ascii=False)
            print(text)
        else:
            from memcalc.decisions.fit_lines import print_fit

            print_fit(found, sys.stdout, waiting)
    if status:
        raise typer.Exit(status)


def _ladder(given: dict[str, Any], check: bool, json: bool) -> None:
    import sys

    from memcalc.cli.output import answering
    from memcalc.cli.waiting import waiting
    from memcalc.decisions.ladder import ladder

    with waiting("each rung, on paper and played through the allocator"):
        found = ladder(**given)
    status = 1 if check and found.first_fit is None else 0
    with answering(status):
        if json:
            import json as library

            print(library.dumps(found.to_dict(), indent=1, ensure_ascii=False))
        else:
            from memcalc.decisions.ladder_lines import print_ladder

            print_ladder(found, sys.stdout)
    if status:
        raise typer.Exit(status)
