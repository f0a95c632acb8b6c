"""`memcalc compare`: several setups side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memcalc.cli import options as o
from memcalc.cli.setup_options import takes_lists

EPILOG = """Examples:

memcalc compare llama-7b --gpus 8 --zero 1,2,3 --gpu a100-80gb

memcalc compare llama-3-8b,qwen3-8b -g 8 --engine fsdp2 -b 1,2 --bars

memcalc compare llama-7b -g 8 --zero 3 --gpu a100-80gb,h100-80gb --price 2,4

memcalc compare llama-7b -g 8 --deepspeed-table
"""


def rewritten(arguments: list[str]) -> list[str]:
    """Return the arguments with a value after each switch, which may be a list here."""
    from memcalc.cli.lists import with_values

    return with_values(arguments)


@takes_lists
def compare(
    name: o.Name = None,
    model: o.Model = None,
    params: o.Params = None,
    price: Annotated[
        str | None,
        o.option(
            "Price of a GPU-hour, or one for each --gpu: adds the cost of a step and of 10^9 tokens.",
            "Output",
            "--price",
        ),
    ] = None,
    bars: Annotated[
        bool, typer.Option("--bars", help="Bars of each step's time and memory.", rich_help_panel="Output")
    ] = False,
    deepspeed_table: Annotated[
        bool,
        typer.Option(
            "--deepspeed-table",
            help="DeepSpeed's own tables of model states for ZeRO-2 and 3, with and without offload.",
            rich_help_panel="Output",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.", rich_help_panel="Output")] = False,
    **setup: Any,
) -> None:
    """Compare setups: any option takes a comma list, and every combination is a column."""
    import sys

    from memcalc.cli.lists import numbers, values_of_words
    from memcalc.cli.waiting import waiting
    from memcalc.decisions.compare import compare as run

    given = values_of_words({"model": o.model_of(name, model), "params": params, **setup})
    if deepspeed_table:
        _deepspeed_table({**given, "price": price, "bars": bars or None}, json)
        return
    prices = numbers("price", price)
    with waiting("the steps, on paper"):
        compared = run(price=prices, **given)
    if json:
        import json as library

        with waiting("the steps, played through the allocator"):
            text = library.dumps(compared.to_dict(), indent=1, ensure_ascii=False)
        print(text)
        return
    from memcalc.decisions.compare_table import print_compared

    print_compared(compared, sys.stdout, bars=bars, waiting=waiting)


def _deepspeed_table(given: dict[str, Any], json: bool) -> None:
    import sys

    from memcalc.decisions.deepspeed_lines import print_tables
    from memcalc.decisions.deepspeed_table import deepspeed_tables

    tables = deepspeed_tables(**given)
    if json:
        import json as library

        print(library.dumps(tables.to_dict(), indent=1, ensure_ascii=False))
    else:
        print_tables(tables, sys.stdout)
