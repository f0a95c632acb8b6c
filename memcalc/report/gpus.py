"""Tables of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.table import Table
from rich.text import Text

from memcalc.inputs.gpu import GPU, Quantity
from memcalc.report.consoles import listing_console
from memcalc.units import show_bytes


def _show(quantity: Quantity | None) -> str:
    return "" if quantity is None else f"{quantity.value:g} {quantity.unit}"


def as_document(gpu: GPU) -> dict[str, object]:
    """A GPU as its file has it, with its name."""
    out: dict[str, object] = gpu._asdict()
    for key in ("memory", "nominal_memory", "memory_bandwidth"):
        quantity: Quantity = getattr(gpu, key)
        out[key] = quantity._asdict()
    for key in ("dense_flops_per_second", "links"):
        table: dict[str, Quantity] = getattr(gpu, key)
        out[key] = {name: quantity._asdict() for name, quantity in table.items()}
    for key in ("nvlink_group", "network"):
        known: Quantity | None = getattr(gpu, key)
        out[key] = None if known is None else known._asdict()
    return out


def print_list(gpus: Sequence[GPU], file: IO[str]) -> None:
    """A line per GPU; FLOP/s are dense."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("full name", overflow="ellipsis", no_wrap=True)
    for column in ("memory", "bandwidth", "bf16", "fp8", "link"):
        table.add_column(column, justify="right", no_wrap=True)
    for gpu in gpus:
        flops = gpu.dense_flops_per_second
        link = next((gpu.links[k] for k in ("nvlink", "infinity_fabric", "pcie") if k in gpu.links), None)
        table.add_row(
            gpu.name, gpu.full_name, show_bytes(gpu.capacity), _show(gpu.memory_bandwidth),
            _show(flops.get("bf16") or flops.get("fp16")), _show(flops.get("fp8")), _show(link),
        )  # fmt: skip
    listing_console(file).print(table)


def print_gpu(gpu: GPU, file: IO[str]) -> None:
    """Every number of one GPU with its source."""
    console = listing_console(file)
    title = Text(gpu.name, style="bold")
    title.append(f"  {gpu.full_name}, {gpu.architecture}, {gpu.compute_capability}", style="not bold")
    console.print(title)
    if gpu.aliases:
        console.print(f"also: {', '.join(gpu.aliases)}")
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("quantity", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    rows = {
        "memory (as software sees it)": gpu.memory,
        "memory (nominal)": gpu.nominal_memory,
        "memory bandwidth": gpu.memory_bandwidth,
        **{f"{dtype}, dense": q for dtype, q in gpu.dense_flops_per_second.items()},
        **{f"{link}, both directions": q for link, q in gpu.links.items()},
    }
    if gpu.nvlink_group is not None:
        rows["GPUs that NVLink joins"] = gpu.nvlink_group
    if gpu.network is not None:
        rows["network of one GPU, each direction"] = gpu.network
    for label, quantity in rows.items():
        table.add_row(label, _show(quantity), quantity.source)
    console.print(table)
