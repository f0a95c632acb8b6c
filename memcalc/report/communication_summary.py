"""The communication of a step in a few lines: the bytes that each axis sends, by kind of collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from memcalc.hardware.cost import Unknown
from memcalc.report.communication import layer_line, time_lines
from memcalc.report.fitting import Column, fitting, table_of
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


class Sent(NamedTuple):
    """The collectives of one axis, one kind and one group size in a step, added up."""

    axis: str
    collective: str
    ranks: int
    calls: int
    payload: int
    wire: int
    seconds: float | None
    """The time of all calls; None without a GPU, or if the time of a call is not known."""


def sent(report: Report) -> list[Sent]:
    """Return the report's collectives, added up by axis, kind and group size. The totals equal those of the full table."""
    costs: list[Any] = report.costs or [None] * len(report.collectives)
    groups: dict[tuple[str, str, int], list[tuple[Any, Any]]] = {}
    for c, cost in zip(report.collectives, costs, strict=True):
        groups.setdefault((c.axis, c.collective, c.group_size), []).append((c, cost))
    return [
        Sent(
            *key,
            sum(c.calls for c, _ in own),
            sum(c.payload for c, _ in own),
            sum(c.wire for c, _ in own),
            _seconds([cost for _, cost in own]),
        )
        for key, own in groups.items()
    ]


def _seconds(costs: list[Any]) -> float | None:
    known = [cost.seconds for cost in costs if cost is not None and not isinstance(cost, Unknown)]
    return sum(known) if len(known) == len(costs) else None


def communication_summary(report: Report, width: int) -> list[Any]:
    """Return the table, a line that names the columns left out for the width, the bytes of one layer, and the time that the step
    waits."""
    lines = sent(report)
    columns = [
        Column("axis", [*(one.axis for one in lines), "all"], "left"),
        Column("collective", [*(one.collective for one in lines), ""], "left"),
        Column("ranks", [*(str(one.ranks) for one in lines), ""]),
        Column("calls", [*(str(one.calls) for one in lines), str(sum(one.calls for one in lines))]),
        *(_sizes(name, [getattr(one, name) for one in lines]) for name in ("payload", "wire")),
        *([_times([one.seconds for one in lines])] if report.gpu is not None else []),
    ]
    kept, left_out = fitting(columns, width, ("ranks", "wire", "time", "calls"))
    table = table_of(kept, title="Communication per step and GPU", bold=len(lines))
    return [
        table,
        *([Text(left_out)] if left_out else []),
        layer_line(report),
        *time_lines(report, bracketed=False),
    ]


def _sizes(name: str, sizes: list[int]) -> Column:
    return Column(name, [show_bytes(size) for size in [*sizes, sum(sizes)]])


def _times(seconds: list[float | None]) -> Column:
    known = [one for one in seconds if one is not None]
    total = show_seconds(sum(known)) if len(known) == len(seconds) else "?"
    return Column("time", [*("?" if one is None else show_seconds(one) for one in seconds), total])
