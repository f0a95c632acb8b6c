"""The lines on a step's time, and its part of the JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from memcalc.report.folding import Folded
from memcalc.units import show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memcalc.estimation.report import Report
    from memcalc.timing.step import StepTime

_WORDS: Final = {
    "compute": "compute",
    "recompute": "recomputation",
    "exposed_communication": "communication",
    "bubble": "waiting for other stages",
    "optimizer": "optimizer",
}
_LEAST: Final = 0.005
"""The share of a step below which a part is left out of the line."""


def time_lines(report: Report) -> list[RenderableType]:
    """Return the time of a step, and where it goes; [] without a GPU or a model."""
    if report.gpu is None or report.states_only:
        return []
    time = report.time
    from memcalc.timing.kernels import Unknown

    if isinstance(time, Unknown):
        return [Folded(f"the time of a step is not known: {time.missing}")]
    per_gpu = time.tokens_per_second / report.setup.gpus
    unit = "tokens" if report.model.program.has_sequence else "images"
    verb = "would take" if report.fits is False else "takes"
    text = Text(f"a step {verb} {show_seconds(time.seconds)}", style="bold")
    text.append(f" ({show_range(time)})", "not bold")
    text.append(f": {per_gpu:,.0f} {unit}/s per GPU{_mfu(time)}; {_parts(time)}", "not bold")
    return [Folded(text)]


def show_range(time: StepTime) -> str:
    """Return the range of a step's time in words: what it is, and why it ends at the estimate if it does."""
    ends = f"{show_seconds(time.low)} to {show_seconds(time.high)}"
    if time.low < time.seconds < time.high:
        return f"{ends}, by published runs"
    kind = "faster" if time.low == time.seconds else "slower"
    return f"{ends}; no published run of its kind was {kind} than its estimate"


def _mfu(time: StepTime) -> str:
    return "" if time.mfu is None else f", MFU {time.mfu:.0%}"


def _parts(time: StepTime) -> str:
    """Return the shares of the step, the largest first."""
    shares = [(seconds / time.seconds, _WORDS[part]) for part, seconds in time.breakdown.items()]
    return ", ".join(f"{word} {share:.0%}" for share, word in sorted(shares, reverse=True) if share >= _LEAST)


def time_notes(report: Report) -> list[str]:
    """Return why the document has no time, if a GPU is given."""
    from memcalc.timing.kernels import Unknown

    if report.gpu is None or not isinstance(report.time, Unknown):
        return []
    return [f"the time of a step is not known: {report.time.missing}"]


def time_document(report: Report) -> dict[str, Any] | None:
    """Return the document's `time`; None without a GPU, or if a part of the time is not known."""
    time = report.time
    from memcalc.timing.kernels import Unknown

    if isinstance(time, Unknown):
        return None
    return {
        "seconds_per_step": time.seconds,
        "low": time.low,
        "high": time.high,
        "published_runs": time.range.runs,
        "breakdown": dict(time.breakdown),
        "tokens_per_second": time.tokens_per_second,
        "tokens_per_second_per_gpu": time.tokens_per_second / report.setup.gpus,
        "mfu": time.mfu,
        "hfu": time.hfu,
        "items": [item._asdict() for item in time.items],
    }
