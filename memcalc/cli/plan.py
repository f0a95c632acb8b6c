"""`memcalc plan`: the best layouts of a model on some GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from memcalc.cli import options as o
from memcalc.cli.setup_options import takes_setup

if TYPE_CHECKING:
    from memcalc.planning.result import Plans

EPILOG = """Examples:
memcalc plan llama-7b --gpu a100-80gb --gpus 8 --global-batch-size 64 -s 2048
memcalc plan -m mixtral-8x7b --gpu h100-80gb --gpus 64 --global-batch-size 256 -s 4k --engine megatron
memcalc plan llama-3-8b --gpu h100-80gb,a100-80gb --gpus 8..64 --global-batch-size 512 -s 8k --tokens 100B --days 30
"""
_SEARCH: Final = "The search"


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_SEARCH, show_default=False)


@takes_setup
def plan(
    name: o.Name = None,
    model: o.Model = None,
    max_tp: Annotated[int | None, _option("Largest --tp that is tried. (default: 64)", "--max-tp")] = None,
    max_pp: Annotated[int | None, _option("Largest --pp. (default: the layers)", "--max-pp")] = None,
    max_cp: Annotated[int | None, _option("Largest --cp. (default: 32)", "--max-cp")] = None,
    max_ep: Annotated[int | None, _option("Largest --ep. (default: the experts)", "--max-ep")] = None,
    max_virtual_stages: Annotated[
        int | None, _option("Largest --virtual-stages. (default: 8)", "--max-virtual-stages")
    ] = None,
    max_micro_batch_size: Annotated[
        int | None, _option("Largest --micro-batch-size, in powers of two. (default: 8)", "--max-micro-batch-size")
    ] = None,
    tokens: Annotated[str | None, _option("Tokens to train on: 300B, 15T.", "--tokens")] = None,
    days: Annotated[float | None, _option("Days that they may take.", "--days")] = None,
    price: Annotated[
        str | None, _option("Price of a GPU-hour, or NAME=PRICE,... of each --gpu; in any currency.", "--price")
    ] = None,
    budget: Annotated[float | None, _option("Most that the tokens may cost.", "--budget")] = None,
    objective: Annotated[
        str | None,
        _option(
            "time, cost, gpus. (default: time; for --days with several numbers or kinds of GPUs: cost, or gpus without --price)",
            "--objective",
        ),
    ] = None,
    top: Annotated[int, _option("Plans to show. (default: 5)", "--top")] = 5,
    jobs: Annotated[int | None, _option("Processes. (default: one for each core)", "--jobs")] = None,
    emit: Annotated[
        str | None,
        _option(
            "Print the best plan as a file instead: deepspeed, accelerate, training-args, megatron, torchtitan, torchrun.",
            "--emit",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if there is no plan.", rich_help_panel="Output")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.", rich_help_panel="Output")] = False,
    **setup: Any,
) -> None:
    """Find the best layouts on given GPUs: every engine, degree, micro-batch and recomputation. A given option is fixed."""
    import sys
    from shutil import get_terminal_size

    from memcalc.cli.output import answering
    from memcalc.cli.streams import interrupts_raise
    from memcalc.cli.waiting import counting
    from memcalc.errors import InputError
    from memcalc.inputs.file_options import FILES
    from memcalc.planning.plan import plan as run
    from memcalc.planning.printed import lines_of

    given = o.setup_of(setup)
    chosen = o.model_of(name, model)
    has_file = any(name in given for name in FILES)
    if chosen is None and not has_file:
        raise InputError("--model: is needed; as in: memcalc plan llama-7b --gpu h100-80gb --gpus 8")
    if "gpus" not in given and not has_file:
        raise InputError("--gpus: is needed, a number or a range; as in: --gpus 8..512")
    if emit is not None:
        from memcalc.estimation.emitted import check_format

        check_format(emit)  # before a search that may be long
    limits = {
        "max_tp": max_tp, "max_pp": max_pp, "max_cp": max_cp, "max_ep": max_ep,
        "max_virtual_stages": max_virtual_stages, "max_micro_batch_size": max_micro_batch_size,
    }  # fmt: skip
    goal = {"tokens": tokens, "days": days, "price": price, "budget": budget, "objective": objective}
    gpu, gpus = given.pop("gpu", None), given.pop("gpus", None)
    with interrupts_raise(), counting("layouts") as show:
        found = run(chosen, gpu=gpu, gpus=gpus, **goal, top=top, jobs=jobs, progress=show, **limits, **given)
    status = 1 if check and not found.fits else 0
    with answering(status):
        if emit is not None:
            _emit(emit, found, chosen, given)
        elif json:
            import json as library

            print(library.dumps(found.to_dict(), indent=1, ensure_ascii=False))
        else:
            sys.stdout.write("\n".join(lines_of(found, get_terminal_size().columns)) + "\n")
    if status:
        raise typer.Exit(status)


def _emit(format: str, found: Plans, model: Any, given: dict[str, Any]) -> None:
    """Print the best plan in another tool's format."""
    from memcalc.cli.emit import print_written
    from memcalc.errors import InputError
    from memcalc.estimation.emitted import emit

    if not found.plans:
        raise InputError(f"--emit {format}: there is no plan; without --emit the search says why")
    best = found.plans[0]
    layout = {name: value for name, value in best.layout._asdict().items() if value is not None}
    print_written(emit(format, model, **{**given, **layout}), format, None)
