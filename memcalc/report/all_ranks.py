"""What every pipeline rank needs and sends, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from memcalc.cost import step_time
from memcalc.rows import COMPONENTS
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.estimation import Report

_WIDE = 100  # columns that all components need
_TIME = 10


def rank_document(report: Report) -> dict[str, Any]:
    """The rank of this report, for the JSON document."""
    time = step_time(report.collectives, report.costs) if report.gpu is not None else None
    return {
        "pp": report.rank.number,
        "layers": report.rank.layers,
        "in_flight": report.in_flight,
        **{component: report.total(component) for component in COMPONENTS[:-1]},
        "phases": dict(report.phases),
        "peak_phase": report.peak_phase,
        "peak": report.peak,
        "device": report.device,
        "communication": {
            "payload": sum(c.payload for c in report.collectives),
            "wire": sum(c.wire for c in report.collectives),
            "seconds": None if time is None else {**time._asdict(), "total": time.total},
        },
    }


def all_ranks_table(report: Report, width: int) -> Table:
    """A line per rank; `in flight` are the forwards of a chunk that are saved at once, the running one included."""
    table = Table(
        title="Pipeline ranks", title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    timed = report.gpu is not None
    narrow = width < _WIDE + (_TIME if timed else 0)
    sizes = ("saved",) if narrow else ("parameters", "gradients", "optimizer", "saved", "buffers")
    for name in ("rank", *(() if narrow else ("layers", "in flight")), *sizes, "peak", "wire"):
        table.add_column(name, justify="right", overflow="fold")
    if timed:
        table.add_column("time", justify="right", overflow="fold")
    for one in report.each_rank():
        components = ("saved_activations",) if narrow else COMPONENTS[:-1]
        cells = [str(one.rank.number), *([] if narrow else [str(one.rank.layers), str(one.in_flight)])]
        cells += [show_bytes(one.total(component)) for component in components]
        cells += [show_bytes(one.peak), show_bytes(sum(c.wire for c in one.collectives))]
        if timed:
            time = step_time(one.collectives, one.costs)
            cells.append("?" if time is None else show_seconds(time.total))
        table.add_row(*cells, style="bold" if one.rank.number == report.rank.number else "")
    return table
