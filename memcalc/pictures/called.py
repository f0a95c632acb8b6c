"""The places of a collective's calls, where the engine's run over a recorded step has noted them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import numel

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.layout.collectives import Collective
    from memcalc.pictures.timeline import Span, Timeline
    from memcalc.tape.runs import Trace


class Called(NamedTuple):
    """Calls of a collective in one part of a step."""

    part: Span
    calls: int
    share: float
    """Their part of the payload of all calls in the step."""


def called(collective: Collective, timeline: Timeline, report: Report) -> list[Called]:
    """Return the calls of a collective in the micro-batches that are shown; none if the run has not noted all of them."""
    alike = [one for one in report.collectives if _key(one) == _key(collective)]
    if len(alike) > 1 or len(report.rank.profiles) != 1 or report.rank.on_paper > 1:
        return []
    run, micro_batches = report.rank.profiles[0].run, report.setup.micro_batches
    sent = [
        (at, one)
        for at, one in zip(run.sent_at, run.sent, strict=False)
        if (one.axis, one.kind, one.phase) == _key(collective)
    ]
    if not sent or len(sent) * micro_batches != collective.calls:
        return []
    elements = sum(numel(one.shape)[0] for _, one in sent)
    places: dict[int, list[int]] = defaultdict(list)
    for at, one in sent:
        places[_part_at(run, at)].append(numel(one.shape)[0])
    out: list[Called] = []
    for span in timeline.spans:
        if span.phase == collective.phase:
            found = _parts_of(run, timeline, span)
            if not found.keys() >= places.keys():
                return []
            out += [Called(found[i], len(n), sum(n) / (elements * micro_batches)) for i, n in places.items()]
    return out


def _key(collective: Collective) -> tuple[str, str, str]:
    return collective.axis, collective.collective, collective.phase


def _part_at(run: Trace, place: int) -> int:
    """Return the number of the segment that a place in the log is in. A segment begins before what the engine does there."""
    return max(0, bisect_right(run.segments, place, key=lambda segment: segment[0]) - 1)


def _parts_of(run: Trace, timeline: Timeline, span: Span) -> dict[int, Span]:
    """Return the parts of a span by the number of the segment that each one is; none if they are others than the run's."""
    own = [part for part in timeline.parts if span.first <= part.first and part.last <= span.last]
    segments = [(i, layer) for i, (_place, phase, layer) in enumerate(run.segments) if phase == span.phase]
    own = [part for part in own if part.phase == span.phase]
    if [layer for _, layer in segments] != [part.layer for part in own]:
        return {}
    return {i: part for (i, _), part in zip(segments, own, strict=True)}
