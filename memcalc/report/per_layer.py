"""The communication of one layer for one micro-batch, by collective, and of a stage with its neighbours: the table behind
"TP 8bsh, DP 16h², PP 2bsh"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memcalc.core.dtypes import int8
from memcalc.layout.collectives import Collective, wire_bytes
from memcalc.layout.layer_kinds import LaterShares, LayerKind, Shares
from memcalc.report.collectives import Numbers, add_words
from memcalc.report.folding import Folded
from memcalc.setup.setup import DTYPES
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


class Share(NamedTuple):
    """A layer's part of a collective: of one micro-batch for activations, of a step for weights and gradients. A send between
    stages belongs to no layer; its share is that of the stage for one micro-batch."""

    collective: Collective
    layers: int
    """How many of the rank's layers have this part; 0 for a send between stages."""
    calls: float
    payload: int
    formula: str

    @property
    def wire(self) -> int:
        return wire_bytes(self.collective.collective, self.collective.group_size, self.payload)

    @property
    def has_own_calls(self) -> bool:
        """Return False if the layer's bytes are in calls that carry other layers' too, as those of buckets."""
        return self.calls == round(self.calls) and (self.collective.shares is None or self.collective.layer is not None)


def shares(report: Report) -> list[Share]:
    """Return a layer's part of every collective that layers send, and the sends between stages."""
    rank, micro = report.rank, report.setup.micro_batches
    out: list[Share] = []
    for c in report.collectives:
        if c.shares is not None:
            out += [_of_weights(c, c.shares, kind) for kind in c.shares.kinds]
        elif c.layer is not None:
            layers = c.layers or rank.layers
            parts = layers * (1 if c.once else micro)
            calls = c.calls / parts
            out.append(Share(c, layers, calls, c.payload // parts, c.each if calls == 1 else f"{calls:g}·{c.each}"))
        elif c.axis == "pp" and c.collective == "send":
            calls = c.calls // micro
            out.append(Share(c, 0, calls, c.payload // micro, c.each if calls == 1 else f"{calls}·{c.each}"))
    return out


def _of_weights(c: Collective, shares: Shares | LaterShares, kind: LayerKind) -> Share:
    """Return the part of a collective for the weights or gradients of one layer. A collective of layers has calls for each
    layer; else a layer has a share of the calls, by its elements."""
    units = c.layer is not None
    calls = c.calls / sum(k.layers for k in shares.kinds) if units else c.calls * kind.elements / shares.whole
    payload = c.payload * kind.elements // shares.whole
    return Share(c, kind.layers, calls, payload, _in_named_dims(c, shares.whole, kind.formula))


def _in_named_dims(c: Collective, whole: int, weights: str) -> str:
    """Return the formula of a payload of weights, such as "2·(3·ffn·hidden + 2·hidden)·4 B": the weights times a whole number,
    divided by a whole number, or times a fraction."""
    itemsize = int8.itemsize if c.dtype == int8.name else DTYPES[c.dtype].itemsize
    sum_ = f"({weights})"
    if c.payload % (whole * itemsize) == 0:
        times = c.payload // (whole * itemsize)
        return f"{f'{times}·' if times > 1 else ''}{sum_}·{itemsize} B"
    if whole * itemsize % c.payload == 0:
        return f"{sum_}/{whole * itemsize // c.payload}·{itemsize} B"
    return f"{c.payload / (whole * itemsize):.4g}·{sum_}·{itemsize} B"


def show_calls(own: float, *, has_part: bool) -> str:
    """Return a layer's own calls, and "part" if it has a part of calls that layers share: nothing is called 0.4 times."""
    if has_part:
        return f"{own:.3g}+{PART}" if own else PART
    return f"{own:.3g}"


def calls_of(share: Share) -> str:
    """Return the calls of a layer's part in words."""
    return show_calls(share.calls if share.has_own_calls else 0, has_part=not share.has_own_calls)


PART: Final = "part"
_OF_SEVERAL: Final = f"{PART}: in calls that layers share, as those of buckets; payload and wire are those of one layer"


class Total(NamedTuple):
    """The sums of one layer over an axis, or the mean of the layers if they differ; for sends between stages, the stage's."""

    what: str
    calls: str
    payload: int
    wire: int


def _total(own: list[Share], layers: int) -> Total:
    differ = any(share.layers not in (0, layers) for share in own)
    part = [(share, share.layers / layers if differ else 1) for share in own]
    payload, wire = (sum(getattr(share, name) * of for share, of in part) for name in ("payload", "wire"))
    calls = sum(share.calls * of for share, of in part if share.has_own_calls)
    words = show_calls(calls, has_part=not all(share.has_own_calls for share in own))
    return Total(f"mean of {layers} layers" if differ else "", words, round(payload), round(wire))


def _what(share: Share, layers: int) -> str:
    """Return the collective's name, with the number of layers that send it if not all do."""
    name = share.collective.name
    return name if share.layers in (0, layers) else f"{name} ({share.layers} of {layers} layers)"


_WIDE: Final = 120  # columns that the whole table needs; in fewer, a collective takes three lines


def per_layer_table(report: Report, width: int) -> list[RenderableType]:
    """Return the table with a row for each collective and a total for each axis, a line on calls that layers share, and one that
    names the columns left out for the width."""
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

    def add(words: tuple[str, str, str], what: str, calls: str, sizes: tuple[int, int], each: str, style: str) -> None:
        shown = [calls, *(show_bytes(size) for size in sizes)][: len(numbers.names)]
        if wide:
            table.add_row(*words, what, *shown, Folded(each), style=style)
        else:
            table.add_row(*words_of((*words, "\n  ".join(line for line in (what, each) if line))), *shown, style=style)

    for share in rows:
        c = share.collective
        words = (c.axis, c.phase, c.collective)
        calls = calls_of(share)
        add(words, _what(share, report.rank.layers), calls, (share.payload, share.wire), share.formula, "")
    for axis in dict.fromkeys(share.collective.axis for share in rows):
        total = _total([share for share in rows if share.collective.axis == axis], report.rank.layers)
        add((axis, "all", ""), total.what, total.calls, (total.payload, total.wire), "", "bold")
    several = [] if all(share.has_own_calls for share in rows) else [Folded(_OF_SEVERAL)]
    return [table, *several, *([Text(left_out)] if left_out else [])]
