"""What one layer sends for one micro-batch, collective by collective, and what a stage sends to those beside it: the table
behind "TP 8bsh, DP 16h², PP 2bsh"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memcalc.collectives import Collective, wire_bytes
from memcalc.report.collectives import Numbers, add_words
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation import Report


class Share(NamedTuple):
    """A layer's part of a collective: of one micro-batch where activations are sent, of a step where gradients are. What goes
    between stages is no layer's: it is the stage's, of one micro-batch."""

    collective: Collective
    calls: float
    payload: int
    formula: str

    @property
    def wire(self) -> int:
        return wire_bytes(self.collective.collective, self.collective.group_size, self.payload)


def shares(report: Report) -> list[Share]:
    """A layer's part of everything that layers send, of those layers that send it; and what goes between stages."""
    rank, micro = report.rank, report.setup.micro_batches
    out: list[Share] = []
    for c in report.collectives:
        if c.layer is not None:
            parts = (c.layers or rank.layers) * (1 if c.axis == "dp" else micro)
            out.append(Share(c, c.calls / parts, c.payload // parts, c.each))
        elif c.by_layer:
            layer, whole = c.shares or (rank.layer_parameters, rank.parameters)
            exact = c.payload % whole == 0
            share = f"{layer}·{c.payload // whole} B" if exact else f"{layer}/{whole} of {c.payload} B"
            out.append(Share(c, c.calls * layer / whole, c.payload * layer // whole, share))
        elif c.axis == "pp" and c.collective == "send":
            calls = c.calls // micro
            out.append(Share(c, calls, c.payload // micro, c.each if calls == 1 else f"{calls}·{c.each}"))
    return out


def _what(c: Collective, layers: int) -> str:
    """Its name, and which layers send it if not all do."""
    return c.name if c.layers in (0, layers) else f"{c.name} ({c.layers} of {layers} layers)"


_WIDE: Final = 96  # columns that all of it needs; below them a collective is on three lines


def per_layer_table(report: Report, width: int) -> list[RenderableType]:
    """One row for each collective; its last lines add up each axis. With a line of what the width leaves out."""
    rows = shares(report)
    if not rows:
        return [Text("per layer: no layer sends anything")]
    between = " and between stages" if any(share.collective.axis == "pp" for share in rows) else ""
    title = f"Communication of one layer{between}: activations of a micro-batch, gradients and weights of a step"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    wide, numbers, left_out = width >= _WIDE, Numbers(("calls", "payload", "wire")), ""
    if not wide:
        numbers, left_out = numbers.that_fit(width)
    words_of = add_words(table, ("axis", "phase", "collective", "what"), on_one_line=wide)
    for name in numbers.names:
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("formula", overflow="fold")

    def add(
        words: tuple[str, str, str], what: str, calls: float, sizes: tuple[int, int], each: str, style: str
    ) -> None:
        shown = [f"{calls:.3g}", *(show_bytes(size) for size in sizes)][: len(numbers.names)]
        if wide:
            table.add_row(*words, what, *shown, each, style=style)
        else:
            table.add_row(*words_of((*words, "\n  ".join(line for line in (what, each) if line))), *shown, style=style)

    for share in rows:
        c = share.collective
        words = (c.axis, c.phase, c.collective)
        add(words, _what(c, report.rank.layers), share.calls, (share.payload, share.wire), share.formula, "")
    for axis in dict.fromkeys(share.collective.axis for share in rows):
        own = [share for share in rows if share.collective.axis == axis]
        sizes = (sum(s.payload for s in own), sum(s.wire for s in own))
        add((axis, "all", ""), "", sum(s.calls for s in own), sizes, "", "bold")
    return [table, *([Text(left_out)] if left_out else [])]
