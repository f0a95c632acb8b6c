"""The table of what every pipeline rank needs and sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import RenderableType
from rich.text import Text

from memcalc.core.rows import COMPONENTS
from memcalc.hardware.cost import step_time
from memcalc.report.fitting import Column, fitting, table_of
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_NAMES: Final = {"optimizer_states": "optimizer", "saved_activations": "saved"}


def rank_document(report: Report) -> dict[str, Any]:
    """Return the report's rank for the JSON document."""
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


_FIRST_TO_GO: Final = ("buffers", "gradients", "parameters", "layers", "in flight", "optimizer", "time", "wire")


def all_ranks_table(report: Report, width: int) -> list[RenderableType]:
    """Return the table with a line for each rank, and a line that names the columns left out for the width.

    `in flight` counts the forwards of a chunk whose saved activations exist at once, with the running one.
    """
    kept, gone = fitting(rank_columns(report), width, _FIRST_TO_GO)
    worst = [one.rank.number for one in report.each_rank()].index(report.rank.number)
    return [table_of(kept, title="Pipeline ranks", bold=worst), *([Text(gone)] if gone else [])]


def rank_columns(report: Report) -> list[Column]:
    """Return the columns of the table, with a cell for each rank."""
    ranks = report.each_rank()
    return [
        Column("rank", [str(one.rank.number) for one in ranks]),
        Column("layers", [str(one.rank.layers) for one in ranks]),
        Column("in flight", [str(one.in_flight) for one in ranks]),
        *(
            Column(_NAMES.get(component, component), [show_bytes(one.total(component)) for one in ranks])
            for component in COMPONENTS[:-1]
        ),
        Column("peak", [show_bytes(one.peak) for one in ranks]),
        Column("wire", [show_bytes(sum(c.wire for c in one.collectives)) for one in ranks]),
        *([Column("time", [_time(one) for one in ranks])] if report.gpu is not None else []),
    ]


def _time(report: Report) -> str:
    time = step_time(report.collectives, report.costs)
    return "?" if time is None else show_seconds(time.total)
