"""Tables and documents of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Final

from rich.table import Table
from rich.text import Text

from memcalc.hardware.speed import Speed, speed_of
from memcalc.inputs.gpu import GPU, Quantity
from memcalc.report.consoles import LISTING, console_for
from memcalc.report.fitting import Column
from memcalc.report.listing import print_columns
from memcalc.units import show_bytes

_WIDE: Final = 90  # columns that quantities, values and sources need side by side


def _show(quantity: Quantity | None) -> str:
    return "" if quantity is None else f"{quantity.value:g} {quantity.unit}"


def as_document(gpu: GPU) -> dict[str, object]:
    """Return a GPU's fields for JSON, as its file has them, with its name."""
    out: dict[str, object] = gpu._asdict()
    for key in ("memory", "nominal_memory"):
        quantity: Quantity = getattr(gpu, key)
        out[key] = quantity._asdict()
    for key in ("dense_flops_per_second", "links"):
        table: dict[str, Quantity] = getattr(gpu, key)
        out[key] = {name: quantity._asdict() for name, quantity in table.items()}
    for key in ("memory_bandwidth", "nvlink_group", "network"):
        known: Quantity | None = getattr(gpu, key)
        out[key] = None if known is None else known._asdict()
    speed = speed_of(gpu.name)
    out["speed"] = {
        "basis": speed.basis,
        **{name: quantity._asdict() for name, quantity in _shares(speed).items()},
        "attention": [curve._asdict() for curve in speed.attention],
        "buses": [{"ranks": ranks, "collective": kind, **bus._asdict()} for (ranks, kind), bus in speed.buses.items()],
    }
    return out


def _shares(speed: Speed) -> dict[str, Quantity]:
    names = ("gemm_efficiency", "gemm_latency", "memory_efficiency", "kernel_latency", "launch")
    return {name: getattr(speed, name) for name in names}


def _speeds(gpu: GPU) -> dict[str, Quantity]:
    """Return the shares of the data sheet that a training step reaches, as a step's time takes them."""
    speed = speed_of(gpu.name)
    rows = {
        "matrix products reach, of the dense rate": _percent(speed.gemm_efficiency),
        "other kernels reach, of the bandwidth": _percent(speed.memory_efficiency),
        "latency of a product": speed.gemm_latency,
        "latency of another kernel": speed.kernel_latency,
        "the CPU starts a kernel in": speed.launch,
    }
    for curve in speed.attention:
        keys, share = curve.shares[-1]
        label = f"{curve.kernels} reaches, heads of {curve.head_dim}, {keys} tokens, of the dense rate"
        rows[label] = _percent(Quantity(share, "", curve.source))
    return rows


def _percent(share: Quantity) -> Quantity:
    return Quantity(round(100 * share.value, 1), "%", share.source)


_FIRST_TO_GO: Final = ("full name", "fp8", "link", "bf16", "bandwidth")


def print_list(gpus: Sequence[GPU], file: IO[str]) -> None:
    """Print a line for each GPU. FLOP/s are dense."""
    flops = [gpu.dense_flops_per_second for gpu in gpus]
    links = [
        next((gpu.links[k] for k in ("nvlink", "infinity_fabric", "pcie") if k in gpu.links), None) for gpu in gpus
    ]
    columns = [
        Column("name", [gpu.name for gpu in gpus], "left"),
        Column("full name", [gpu.full_name for gpu in gpus], "left"),
        Column("memory", [show_bytes(gpu.capacity) for gpu in gpus]),
        Column("bandwidth", [_show(gpu.memory_bandwidth) for gpu in gpus]),
        Column("bf16", [_show(of.get("bf16") or of.get("fp16")) for of in flops]),
        Column("fp8", [_show(of.get("fp8")) for of in flops]),
        Column("link", [_show(link) for link in links]),
    ]
    print_columns(columns, _FIRST_TO_GO, file)


def print_gpu(gpu: GPU, file: IO[str]) -> None:
    """Print every number of one GPU with its source."""
    console = console_for(file, LISTING)
    title = Text(gpu.name, style="bold")
    title.append(f"  {gpu.full_name}, {gpu.architecture}, {gpu.compute_capability}", style="not bold")
    console.print(title)
    if gpu.aliases:
        console.print(f"also: {', '.join(gpu.aliases)}")
    rows = {
        "memory (as software sees it)": gpu.memory,
        "memory (nominal)": gpu.nominal_memory,
        **({"memory bandwidth": gpu.memory_bandwidth} if gpu.memory_bandwidth else {}),
        **{f"{dtype}, dense": q for dtype, q in gpu.dense_flops_per_second.items()},
        **{f"{link}, both directions": q for link, q in gpu.links.items()},
    }
    if gpu.nvlink_group is not None:
        rows["GPUs that NVLink joins"] = gpu.nvlink_group
    if gpu.network is not None:
        rows["network of one GPU, each direction"] = gpu.network
    rows |= _speeds(gpu)
    beside = console.width >= _WIDE
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("quantity", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True, min_width=max(len(_show(q)) for q in rows.values()))
    if beside:
        table.add_column("source", overflow="fold")
    for label, quantity in rows.items():
        table.add_row(label, _show(quantity), *([quantity.source] if beside else []))
    console.print(table)
    if not beside:
        for label, quantity in rows.items():
            console.print(Text(f"\nsource of {label}: {quantity.source}"))
