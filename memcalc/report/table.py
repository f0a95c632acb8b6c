"""The report as a person reads it: what fills the memory, which phase peaks and why, what is sent, does it fit, what helps."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memcalc.rows import COMPONENTS, Item
from memcalc.units import show_bytes, show_count

if TYPE_CHECKING:
    from memcalc.estimation import Report

_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "saved_activations": "saved activations",
    "buffers": "buffers",
    "temporaries": "temporaries",
}
_BAR = 20


def print_report(report: Report, *, rows: bool, file: IO[str]) -> None:
    """Print to a terminal with colour and at its width; to anything else plain, at most 100 columns."""
    console = Console(file=file, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, emoji=False, width=max(100, 160 if rows else 100), no_color=True)
    console.print(_title(report))
    console.print(_memory_table(report))
    for line in _phase_lines(report):
        console.print(line)
    if report.collectives:
        console.print()
        console.print(_communication_table(report))
        for line in _communication_lines(report):
            console.print(line)
    if rows:
        console.print()
        console.print(_rows_table(report))
    verdict = _verdict(report)
    if verdict is not None:
        console.print()
        console.print(verdict)
    for line in _advice_lines(report):
        console.print(line)


def _title(report: Report) -> Text:
    model, s = report.model, report.setup
    count = f"{show_count(model.num_parameters)} parameters"
    parts = [count] if model.name else []
    parts.append(f"{s.gpus} GPU{'s' if s.gpus > 1 else ''}")
    engine = s.engine if s.engine != "none" else "plain PyTorch"
    parts.append(f"{engine}, ZeRO {s.zero}" if s.zero or s.engine == "deepspeed" else engine)
    parts += [s.precision, f"{s.optimizer} ({s.optimizer_implementation})"]
    if s.seq_len is not None:
        parts.append(f"micro-batch {s.micro_batch_size} × {s.seq_len} tokens")
        parts.append(f"{s.attention} attention")
        if s.recompute != "none":
            parts.append(f"recompute {s.recompute}")
    else:
        parts.append("model states only")
    text = Text(model.name or count, style="bold")
    text.append("  " + " · ".join(parts), style="not bold")
    return text


def _memory_table(report: Report) -> Table:
    table = Table(
        title="Memory per GPU", title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    table.add_column("component", no_wrap=True, min_width=17)
    table.add_column("most", justify="right", no_wrap=True, min_width=11)
    table.add_column("at the peak", justify="right", no_wrap=True, min_width=11)
    table.add_column("", no_wrap=True, overflow="crop")
    table.add_column("largest row", overflow="ellipsis", no_wrap=True)
    for component in COMPONENTS:
        items = [i for i in report.items if i.component == component]
        at_peak = sum(i.at_peak for i in items)
        most = report.total(component) if component != "temporaries" else None
        if not at_peak and not most:
            continue
        table.add_row(
            _LABELS[component],
            show_bytes(most) if most is not None else "",
            show_bytes(at_peak),
            "█" * round(_BAR * at_peak / report.peak),
            _largest(items),
            style="" if at_peak else "dim",
        )
    table.add_row("peak", "", show_bytes(report.peak), "", f"in {report.peak_phase}", style="bold")
    table.add_row("allocated", "", show_bytes(report.allocated), "", "+ rounding to 512 B, cuBLAS workspaces")
    table.add_row("reserved", "", show_bytes(report.reserved), "", "+ 2 MiB segments; fragmentation not modelled")
    table.add_row(
        "device",
        "",
        show_bytes(report.device),
        "",
        "+ CUDA context" + (", NCCL" if report.setup.gpus > 1 else "") + " (assumed)",
    )
    return table


def _largest(items: list[Item]) -> str:
    largest = max(items, key=lambda i: (i.at_peak, i.nbytes))
    return f"{largest.name}  {show_bytes(largest.at_peak or largest.nbytes)}"


def _phase_lines(report: Report) -> list[Text]:
    line = Text("\npeak by phase: ")
    for i, (phase, size) in enumerate(report.phases.items()):
        line.append(" · " if i else "")
        line.append(f"{phase} {show_bytes(size)}", style="bold" if phase == report.peak_phase else "")
    return [line, Text(f"{report.peak_phase} peaks because {_why(report)}")]


def _why(report: Report) -> str:
    """What the peak holds that the other phases' peaks hold less of."""
    moving = [i for i in report.items if i.at_peak and i.component in ("temporaries", "gradients", "saved_activations")]
    moving += [i for i in report.items if i.at_peak and i.component == "buffers" and i.life != "always"]
    moving.sort(key=lambda i: -i.at_peak)
    named = [f"{i.name} ({show_bytes(i.at_peak)})" for i in moving[:3]]
    if not named:
        return "the model states are all there is"
    return "on top of the states it holds " + ", ".join(named)


def _communication_table(report: Report) -> Table:
    table = Table(
        title="Communication per step and GPU",
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=None,
        pad_edge=False,
    )
    for name, justify in (("phase", "left"), ("collective", "left"), ("what", "left"), ("ranks", "right"),
                          ("calls", "right"), ("payload", "right"), ("wire", "right")):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=name != "what", overflow="fold")  # type: ignore[arg-type]
    for c in report.collectives:
        table.add_row(
            c.phase, c.collective, c.name, str(c.group_size), str(c.calls), show_bytes(c.payload), show_bytes(c.wire)
        )
    payload, wire = sum(c.payload for c in report.collectives), sum(c.wire for c in report.collectives)
    table.add_row("all", "", "", "", "", show_bytes(payload), show_bytes(wire), style="bold")
    return table


def _communication_lines(report: Report) -> list[Text]:
    payload, wire = report.per_layer()
    lines = [Text(f"per layer: payload {show_bytes(payload)}, wire {show_bytes(wire)}")]
    if report.textbook:
        wire = sum(c.wire for c in report.textbook)
        kinds = " + ".join(f"{c.collective} {show_bytes(c.payload)}" for c in report.textbook)
        lines.append(
            Text(f"textbook: {kinds}; wire {show_bytes(wire)} (what is printed above is what the engine does)")
        )
    return lines


def _rows_table(report: Report) -> Table:
    table = Table(title="Rows", title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    table.add_column("component", no_wrap=True)
    table.add_column("name", overflow="fold", ratio=2)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("at the peak", justify="right", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("formula", overflow="fold", ratio=3)
    table.add_column("basis", no_wrap=True)
    for i in [*report.items, *report.overheads]:
        table.add_row(i.component, i.name, f"{i.nbytes:,}", f"{i.at_peak:,}", i.dtype, i.formula, i.basis)
    return table


def _verdict(report: Report) -> Text | None:
    if report.gpu is None:
        return None
    room = report.gpu.capacity - report.device
    size = f"{report.gpu.full_name} ({show_bytes(report.gpu.capacity)})"
    if room >= 0:
        return Text(f"fits {size}: {show_bytes(room)} to spare", style="bold green")
    return Text(f"does not fit {size}: {show_bytes(-room)} too much", style="bold red")


def _advice_lines(report: Report) -> list[Text]:
    from memcalc.report.advice import advice

    found = advice(report)
    if not found:
        return []
    lines = [Text("\nwhat would help most", style="bold")]
    for change in found:
        lines.append(Text(f"  {change.flags:<40} saves {show_bytes(change.saves)}, leaves {show_bytes(change.peak)}"))
    return lines
