"""DeepSpeed's tables of memory needs as DeepSpeed prints them, and what they leave out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Final

from memcalc.units import in_gib

if TYPE_CHECKING:
    from memcalc.decisions.deepspeed_table import DeepSpeedTable, DeepSpeedTables
    from memcalc.decisions.mem_needs import Needs

_LEFT_OUT: Final = (
    "DeepSpeed's rules of thumb, in its words; its GB are GiB. Left out: activations, buffers, temporaries, fragmentation.",
    "For all of a step: memcalc estimate --zero 2 or --zero 3.",
)


def print_tables(tables: DeepSpeedTables, file: IO[str]) -> None:
    """Print the tables. Lines that DeepSpeed would print are its own, to the character, and never folded."""
    from rich.console import Group

    from memcalc.report.consoles import console_for
    from memcalc.report.folding import Folded

    for one in tables.tables:
        print(f"{one.model}, ZeRO-{one.zero}", file=file)
        print("\n".join(table_lines(one)), end="\n\n", file=file)
    console_for(file, 120).print(Group(*map(Folded, _LEFT_OUT)))


def table_lines(table: DeepSpeedTable) -> Iterator[str]:
    """Return the lines that `estimate_zero{2,3}_model_states_mem_needs_all_live` prints for the model."""
    of, on = table.params, table.nodes
    layer = f", {_millions(of.largest_layer_params)} largest layer params" if table.zero == 3 else ""
    yield "Estimated memory needed for params, optim states and gradients for a:"
    yield f"HW: Setup with {_several(on.nodes, 'node')}, {_several(on.gpus_per_node, 'GPU')} per node."
    yield f"SW: Model with {_millions(of.total_params)} total params{layer}."
    yield "  per CPU  |  per GPU |   Options"
    for one in table.needs:
        yield f" {in_gib(one.cpu):7.2f}GB | {in_gib(one.gpu):6.2f}GB | {_options(one)}"


def _options(one: Needs) -> str:
    said = [f"offload_optimizer={_device(one.offload_optimizer)}"]
    if one.zero_init is not None:
        said = [f"offload_param={_device(one.offload_param)}", *said, f"zero_init={int(one.zero_init)}"]
    return ", ".join(said)


def _device(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def _millions(count: int) -> str:
    return f"{int(count / 1e6)}M"


def _several(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
