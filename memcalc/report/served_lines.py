"""The lines that `memcalc infer` prints of serving engines, ZeRO-Inference and time; and the table of dtypes."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from memcalc.report.consoles import console_for
from memcalc.report.folding import Folded
from memcalc.timing.kernels import Unknown
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.inference.dtype_table import Line, Sizes
    from memcalc.inference.report import Inferred
    from memcalc.inference.serving.served import Serving
    from memcalc.inputs.model import Model


def served_lines(inferred: Inferred) -> list[str]:
    """Return the lines below the table of a report."""
    out: list[str] = [] if inferred.serving is None else _serving(inferred.serving, inferred)
    needs = inferred.zero_inference
    if needs is not None:
        host = sum(row.nbytes for row in needs.host)
        out.append(
            f"ZeRO-Inference: {show_bytes(host)} on the host or NVMe; a forward copies {show_bytes(needs.per_forward)} of it"
        )
    if inferred.gpu is None:
        return out
    times = inferred.times
    if isinstance(times, Unknown):
        return [*out, f"time: not known, because {times.missing}"]
    known = "time if it fitted" if inferred.fits is False else "time"
    line = f"{known}: the first token after {show_seconds(times.prefill)}"
    if times.decode is not None and times.tokens_per_second is not None:
        line += f", then {_rate(times.tokens_per_second)} tokens/s, a step in {show_seconds(times.decode)}"
    return [*out, line]


def _serving(serving: Serving, inferred: Inferred) -> list[str]:
    length = (inferred.asked.prompt_len or 0) + (inferred.asked.new_tokens or 0)
    option = "gpu-memory-utilization" if serving.engine == "vllm" else "mem-fraction-static"
    parts = [f"{show_bytes(serving.weights)} of weights"]
    if serving.activations is not None:
        parts += [
            f"{show_bytes(serving.activations)} for the profiling run",
            f"{show_bytes(serving.outside)} outside torch",
        ]
    out = [
        f"{serving.engine} takes {show_bytes(serving.reserved)} (--{option} {serving.share:g}): {', '.join(parts)}, "
        f"{show_bytes(max(0, serving.cache))} of cache"
    ]
    graphs = serving.graphs
    if graphs is not None and graphs.sizes:
        least = "" if graphs.measured is not None else "at least "
        out.append(
            f"CUDA graphs of {len(graphs.sizes)} sizes up to {graphs.sizes[-1]} tokens: {graphs.full} whole decode steps, "
            f"{graphs.piecewise} in pieces; {least}{show_bytes(graphs.known)} with their static buffers"
        )
    if serving.reserve:
        parts = ", ".join(f"{show_bytes(part.nbytes)} for {part.name} ({part.formula})" for part in serving.reserve)
        out.append(f"SGLang's rule leaves free: {parts}")
    if serving.num_blocks is not None and serving.bytes_per_block is not None:
        each, many = show_bytes(serving.bytes_per_block), serving.blocks_per_sequence
        out.append(f"{serving.num_blocks:,} blocks of {each}, {many} for a sequence")
    out.append(
        f"cache of {serving.tokens:,} tokens; maximum concurrency for {length:,} tokens per request: "
        f"{serving.max_concurrency:.2f}x"
    )
    return out


def dtype_document(model: Model, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the table of dtypes as a JSON document, in bytes."""
    return {
        "schema_version": 1,
        "model": {"name": model.name, "model_type": model.model_type, "parameters": model.num_parameters},
        "dtypes": [
            {
                "dtype": line.dtype,
                "accelerate": None if line.accelerate is None else line.accelerate._asdict(),
                "exact": None if line.exact is None else line.exact._asdict(),
            }
            for line in lines
        ],
    }


def print_dtypes(model: Model, lines: Sequence[Line], *, file: IO[str]) -> None:
    """Print accelerate's table with the exact numbers beside it."""
    console = console_for(file, 110)
    table = Table(title=f"Weights of {model.name}", title_justify="left", title_style="bold", header_style="bold", box=None,
                  pad_edge=False)  # fmt: skip
    table.add_column("dtype", no_wrap=True)
    for whose in ("accelerate", "exact"):
        for what in ("largest\nlayer", "total", "training\nwith Adam"):
            table.add_column(f"{whose}\n{what}", justify="right")
    for line in lines:
        table.add_row(line.dtype, *_cells(line.accelerate), *_cells(line.exact))
    console.print(table, Text())
    console.print(
        Folded(
            "accelerate counts AutoModel, without the output head, with buffers, and takes every weight as quantised without "
            "scales; its training has no 16-bit copy. Exact: the model with its head, int8 and int4 (nf4) as bitsandbytes keeps "
            "them, 16 bytes a parameter with Adam, no activations."
        )
    )


def _cells(sizes: Sizes | None) -> tuple[str, str, str]:
    if sizes is None:
        return "-", "-", "-"
    training = "-" if sizes.training is None else show_bytes(round(sizes.training))
    return show_bytes(round(sizes.largest_layer)), show_bytes(round(sizes.total)), training


def _rate(tokens: float) -> str:
    """Return tokens a second for people: whole ones above 10, else two digits."""
    return f"{tokens:,.0f}" if tokens >= 10 else f"{tokens:.2g}"
