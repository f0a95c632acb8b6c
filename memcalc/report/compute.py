"""The lines on a report's matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from memcalc.estimation.compute import PHASES, seconds_at_peak
from memcalc.units import show_flops, show_seconds

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def compute_lines(report: Report) -> list[Text]:
    """Return the FLOPs of a step by phase, and with a GPU the least time that they take; [] without FLOPs."""
    flops = report.flops
    if not flops["total"]:
        return []
    parts = [f"{phase} {show_flops(flops[phase])}" for phase in PHASES[:2]]
    again = flops["recomputation"]
    if again:
        parts.append(f"recomputation {show_flops(again)} (+{again / (flops['total'] - again):.0%})")
    parts.append(f"total {show_flops(flops['total'])}")
    return [Text(f"matrix products per step and GPU: {' · '.join(parts)}"), *_time(report)]


def _time(report: Report) -> list[Text]:
    if report.gpu is None:
        return []
    seconds = report.seconds_at_peak
    if seconds is None:
        rates = report.gpu.dense_flops_per_second
        missing = sorted({item.dtype for item in report.computed} - rates.keys())
        return [Text(f"time: not known, because the rate of {report.gpu.name} is not known for {', '.join(missing)}")]
    forward = seconds_at_peak([item for item in report.computed if item.phase == "forward"], report.gpu) or 0.0
    phases = f"forward {show_seconds(forward)}, the rest {show_seconds(seconds - forward)}"
    rate = "at the data sheet's dense rate; real steps are slower"
    return [Text(f"time: at least {show_seconds(seconds)} ({phases}) {rate}")]
