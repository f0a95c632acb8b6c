"""The peak of each phase, and the reason for the highest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from memcalc.estimation.report import ROLLOUT
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def phase_lines(report: Report) -> list[Text]:
    line = Text("peak by phase: ")
    before = {} if report.rollout is None else {ROLLOUT: report.rollout.peak}
    for i, (phase, size) in enumerate({**before, **report.phases}.items()):
        line.append(" · " if i else "")
        line.append(f"{phase} {show_bytes(size)}", style="bold" if phase == report.peak_phase else "")
    return [line, Text(f"at the peak, in {report.peak_phase}: {_why(report)}")]


def _why(report: Report) -> str:
    """Return the largest rows at the peak that are not alive all the time: temporaries, gradients, saved activations,
    buffers."""
    components = ("temporaries", "gradients", "saved_activations", "buffers")
    moving = [i for i in report.items if i.at_peak and i.component in components and i.life != "always"]
    moving.sort(key=lambda i: -i.at_peak)
    named = [f"{i.name} ({show_bytes(i.at_peak)})" for i in moving[:3]]
    if not named:
        return "the model states alone"
    return "the model states and, among others, " + ", ".join(named)
