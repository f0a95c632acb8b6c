"""A picture of time against memory, for a terminal: every layout that was evaluated, and the plans by their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.units import GIB, show_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.planning.result import Plan, Plans, Point

_ROWS: Final = 10
_SLOWEST: Final = 2.0
"""The times of the fastest plan up to which layouts are in the picture."""


def picture(plans: Plans, width: int) -> list[str]:
    """Return the lines of the picture; [] with fewer than two layouts to compare."""
    if len(plans.plans) < 2:
        return []
    fast = min(one.seconds for one in plans.plans)
    shown = [point for point in plans.points if point.seconds <= _SLOWEST * fast]
    seconds = [one.seconds for one in plans.plans] + [point.seconds for point in shown]
    sizes = [one.device for one in plans.plans] + [point.nbytes for point in shown]
    low, high, least, most = min(seconds), max(seconds), min(sizes), max(sizes)
    columns = max(20, min(width - 14, 72))

    def place(time: float, nbytes: int) -> tuple[int, int]:
        across = 0 if high == low else round((time - low) / (high - low) * (columns - 1))
        up = 0 if most == least else round((nbytes - least) / (most - least) * (_ROWS - 1))
        return _ROWS - 1 - up, across

    grid = [[" "] * columns for _ in range(_ROWS)]
    for point in shown:
        row, column = place(point.seconds, point.nbytes)
        grid[row][column] = "+" if _is_front(point, shown) else "·"
    front = set(plans.pareto)
    for i, one in reversed([*enumerate(plans.plans)]):
        row, column = place(one.seconds, one.device)
        grid[row][column] = _mark(one) if i in front else "o"
    labels = [f"{most / GIB:8.1f} GiB ", *[" " * 13] * (_ROWS - 2), f"{least / GIB:8.1f} GiB "]
    lines = [label + "│" + "".join(row).rstrip() for label, row in zip(labels, grid, strict=True)]
    ends = show_seconds(low), show_seconds(high)
    axis = ends[0] + ends[1].rjust(columns - len(ends[0]))
    listed = ", ".join(str(plans.plans[i].rank) for i in plans.pareto)
    return [
        "Memory of a GPU against the time of a step",
        *lines,
        " " * 13 + "└" + "─" * columns,
        " " * 14 + axis,
        f"by number: the Pareto front (no other plan is both faster and smaller): {listed}",
        "o: other plans · layouts by their peak: + on the front, · the others",
    ]


def _is_front(point: Point, others: Sequence[Point]) -> bool:
    """Return True if no other point is better in one way and as good in the other."""
    return not any(
        other != point and other.seconds <= point.seconds and other.nbytes <= point.nbytes for other in others
    )


def _mark(one: Plan) -> str:
    return str(one.rank) if one.rank < 10 else "#"
