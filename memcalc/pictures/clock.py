"""The time of each moment of a timeline: that of the kernels that run there, if it is known."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.estimation.compute import Place
from memcalc.timing.kernels import Unknown
from memcalc.timing.places import seconds_by_place
from memcalc.timing.step import rates_of
from memcalc.timing.update import update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.estimation.report import Report
    from memcalc.pictures.timeline import Span, Timeline
    from memcalc.tape.runs import Trace
    from memcalc.timing.kernels import Rates

EACH: Final = 1.0
"""The microseconds of an allocation or free whose time is not known."""


class Clock(NamedTuple):
    """The microseconds of every moment since the step began."""

    at: list[float]
    is_time: bool
    """False if a moment has no time, and each one is drawn a microsecond long."""

    @property
    def words(self) -> str:
        """Return a sentence about the axis."""
        if self.is_time:
            return (
                "forward and backward last as long as their kernels (docs/step-time.md), and so does the optimizer's step if "
                "its time is known; each allocation or free is an equal part of it; waiting is left out"
            )
        return "the axis is not time: each allocation or free is drawn 1 µs long"


def clock_of(timeline: Timeline, report: Report) -> Clock:
    """Return the clock of a report's timeline. It is time if the report has a GPU whose rates are known."""
    seconds = _seconds(timeline, report)
    lengths = [0.0] + [EACH] * timeline.events
    for part, one in seconds.items():
        moments = range(part.first + 1, part.last + 1)
        for moment in moments:
            lengths[moment] = one * 1e6 / len(moments)
    return Clock(list(accumulate(lengths)), bool(seconds))


def _seconds(timeline: Timeline, report: Report) -> dict[Span, float]:
    """Return the seconds of the parts that run kernels; none if they are not known."""
    if report.gpu is None or not report.gpu.dense_flops_per_second:
        return {}
    rates = rates_of(report.setup, report.gpu)
    several = report.rank.on_paper > 1
    out: dict[Span, float] = {}
    for chunk, profile in enumerate(report.rank.profiles):
        run = profile.run
        places = seconds_by_place(run, report.setup, rates)
        if isinstance(places, Unknown):
            return {}
        parts = _running([part for part in timeline.parts if part.chunk == chunk], timeline.spans)
        shares = Counter((part.phase, part.layer) for part in parts)
        passes = Counter(span.phase for span in timeline.spans if span.chunk == chunk)
        for part in parts:
            times = 1 if several else passes[part.phase]
            seconds = places.get(Place(part.phase, _in_the_run(part.layer, run)), 0.0)
            out[part] = seconds * times / shares[part.phase, part.layer]
    return out | _of_the_optimizer(timeline, report, rates)


def _of_the_optimizer(timeline: Timeline, report: Report, rates: Rates) -> dict[Span, float]:
    updates = update(report, rates)
    if isinstance(updates, Unknown):
        return {}
    steps = [span for span in timeline.spans if span.phase == "step"]
    return {span: sum(item.seconds for item in updates) / len(steps) for span in steps}


def _running(parts: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Return the parts of layers, and of what is outside the layers that part of each span that has the head: the last one of a
    forward, the first one of a backward."""
    out = [part for part in parts if part.layer is not None]
    for span in spans:
        outside = [one for one in parts if one.layer is None and span.first <= one.first and one.last <= span.last]
        outside = [one for one in outside if one.phase == span.phase]
        out += outside[-1:] if span.phase == "forward" else outside[:1]
    return out


def _in_the_run(layer: int | None, run: Trace) -> int | None:
    """Return the layer of the run that stands for a layer of the real stack."""
    early, late, more = run.middle
    if layer is None or not more or layer < early.start:
        return layer
    if layer >= late.stop + more * len(early):
        return layer - more * len(early)
    return early.start + (layer - early.start) % len(early)
