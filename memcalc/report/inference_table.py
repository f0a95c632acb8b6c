"""The report of `memcalc infer` in a terminal."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memcalc.report.consoles import console_for
from memcalc.report.folding import Folded
from memcalc.report.served_lines import served_lines
from memcalc.units import show_bytes, show_count

if TYPE_CHECKING:
    from memcalc.inference.options import Asked
    from memcalc.inference.report import Inferred, Item

_NARROW: Final = 70  # columns; in fewer, the tables leave out the largest row, and shapes
_NAMES: Final = {
    "weights": "weights",
    "kv_cache": "key/value cache",
    "state_cache": "recurrent states",
    "buffers": "buffers and inputs",
    "temporaries": "temporaries",
}
"""The components of tensors, in their order; rows of the device are in the answer."""


def print_inferred(inferred: Inferred, *, file: IO[str], rows: bool = False) -> None:
    """Print a report. A terminal gets colour and its own width; any other file plain text of 100 columns (220 with `rows`), or
    as COLUMNS says."""
    console = console_for(file, 220 if rows else 100)
    parts: list[RenderableType] = [
        _title(inferred),
        *_answer(inferred),
        "",
        _table(inferred, console.width),
        *_after(inferred),
    ]
    if rows:
        parts += ["", _rows(inferred.items, console.width)]
    parts += ["", *(Folded(f"note: {note}") for note in inferred.notes)]
    console.print(Group(*parts))


def _title(inferred: Inferred) -> RenderableType:
    model, asked = inferred.model, inferred.asked
    parallel = " · ".join(
        f"{name} {size}" for name, size in (("tp", asked.tp), ("pp", asked.pp), ("ep", asked.ep)) if size > 1
    )
    words = [
        f"{model.name} ({show_count(model.num_parameters)} parameters) in {_dtypes(asked)}",
        f"{asked.batch_size} sequence{'s' if asked.batch_size > 1 else ''} of {asked.prompt_len} + {asked.new_tokens} tokens",
    ]
    return Folded(" · ".join([*words, parallel] if parallel else words))


def _dtypes(asked: Asked) -> str:
    """Return the dtype that the model computes in, and the format of quantised weights."""
    return asked.dtype if asked.quantize in (None, "none") else f"{asked.dtype}, weights in {asked.quantize}"


def _answer(inferred: Inferred) -> list[RenderableType]:
    fit, gpus = inferred.fit, inferred.asked.tp * inferred.asked.pp > 1 or inferred.asked.ep > 1
    who = "each GPU" if gpus else "one GPU"
    if fit is None or inferred.gpu is None:
        if inferred.total is None:
            return [Folded(Text(f"{who} holds {show_bytes(inferred.least)} of weights and caches", style="bold"))]
        text = Text(f"{who} needs {show_bytes(inferred.needs())}", style="bold")
        text.append(f": {show_bytes(inferred.total)} of tensors at the peak; --gpu tells whether it fits", "not bold")
        return [Folded(text)]
    size = f"{inferred.gpu.full_name} ({show_bytes(fit.capacity)})"
    if fit.fits is None:
        return [Folded(Text(f"weights and caches leave {show_bytes(fit.headroom)} of {size}", style="bold yellow"))]
    if fit.fits:
        head = Text(f"fits {size}: {show_bytes(fit.headroom)} to spare", style="bold green")
    else:
        head = Text(f"does not fit {size}: {show_bytes(-fit.headroom)} too much", style="bold red")
    return [Folded(head), *_most(inferred.max_sequences)]


def _most(sequences: int | None) -> list[RenderableType]:
    if sequences is None:
        return []
    return [Folded(f"at most {sequences} such sequences at once" if sequences else "not one such sequence fits")]


def _table(inferred: Inferred, width: int) -> Table:
    """Return the table of components. The name of the largest row takes the room that the numbers leave."""
    lines: list[tuple[list[str], str]] = []
    for component, words in _NAMES.items():
        items = [item for item in inferred.items if item.component == component]
        if not items:
            continue
        kept = sum(item.nbytes for item in items)
        most = max(items, key=lambda item: (item.at_peak, item.nbytes))
        cells = [words, show_bytes(kept) if kept else "", show_bytes(sum(item.at_peak for item in items))]
        lines.append(([*cells, f"{show_bytes(most.at_peak or most.nbytes)}  {most.name}"], ""))
    for words, size in (("prefill peak", inferred.prefill_peak), ("decode peak", inferred.decode_peak)):
        if size is not None:
            lines.append(([words, "", show_bytes(size), ""], "bold" if size == inferred.total else ""))
    table = Table(
        title="Memory per GPU", title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    names = ("component", "at the end", "at the peak")
    widths = [max(len(name), *(len(cells[i]) for cells, _ in lines)) for i, name in enumerate(names)]
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True, min_width=widths[i])
    wide = width >= _NARROW
    if wide:
        room = width - sum(widths) - 2 * len(widths)  # two spaces between columns
        table.add_column("largest row", overflow="ellipsis", no_wrap=True, max_width=room)
    for cells, style in lines:
        table.add_row(*(cells if wide else cells[:3]), style=style)
    return table


def _after(inferred: Inferred) -> list[RenderableType]:
    token, whole = inferred.kv_bytes_per_token(), inferred.kv_bytes_per_token_all_gpus
    lines = [
        f"keys and values: {show_bytes(token)} per token"
        + (f" on a GPU, {show_bytes(whole)} on all" if whole != token else "")
    ]
    rule = f"rule of thumb: 1.2 × weights = {show_bytes(inferred.rule_of_thumb)}"
    if inferred.total is not None:
        rule += f"; the run's peak is {inferred.total / inferred.rule_of_thumb:.2f} times that"
    lines.append(rule)
    return ["", *(Folded(line) for line in [*lines, *served_lines(inferred)])]


def _rows(items: list[Item], width: int) -> Table:
    table = Table(title="Rows", title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for name in ("component", "name"):
        table.add_column(name, overflow="fold")
    for name in ("bytes", "at the peak"):
        table.add_column(name, justify="right", no_wrap=True)
    wide = width >= 2 * _NARROW
    if wide:
        table.add_column("formula", overflow="fold")
    for item in items:
        cells = [item.component, item.name, show_bytes(item.nbytes), show_bytes(item.at_peak)]
        table.add_row(*cells, *([item.formula] if wide else []))
    return table
