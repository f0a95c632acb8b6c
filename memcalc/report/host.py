"""The line on the host's memory, and its part of the JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from memcalc.offload.host import totals
from memcalc.report.folding import Folded
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memcalc.estimation.report import Report


def host_document(report: Report) -> dict[str, Any]:
    """Return `host`, the bytes of a node by kind, and `host_items`, the rows that add up to them."""
    return {"host": totals(report.host), "host_items": [item._asdict() for item in report.host]}


def host_lines(report: Report) -> list[RenderableType]:
    """Return what the host keeps; [] if nothing is offloaded."""
    if not report.host:
        return []
    kinds = {kind: n for kind, n in totals(report.host).items() if n}
    ranks = min(report.setup.gpus, report.setup.gpus_per_node)
    of = f"per node of {ranks} GPU{'s' if ranks > 1 else ''}"
    if report.setup.servers is not None:
        of = "of the busiest server"
    text = Text(f"host: {show_bytes(sum(kinds.values()))} {of}", style="bold")
    text.append(f" ({', '.join(f'{kind} {show_bytes(n)}' for kind, n in kinds.items())})", "not bold")
    return [Folded(text)]
