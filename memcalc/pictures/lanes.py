"""The collectives of a step on lanes, one for each axis: when each begins, and how long it takes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.pictures.called import called
from memcalc.pictures.clock import EACH
from memcalc.pictures.notes import micro_batches_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memcalc.estimation.report import Report
    from memcalc.layout.collectives import Collective
    from memcalc.pictures.clock import Clock
    from memcalc.pictures.timeline import Span, Timeline

IN_LAYER: Final = "in the layer that sends it"
CALLED: Final = "where the engine calls it"
AT_END: Final = "not known within the phase: drawn from the phase's end on"


class Sent(NamedTuple):
    """Calls of a collective that are drawn as one slice."""

    collective: Collective
    calls: int
    share: float
    """Their part of the payload of all calls in the step."""
    begin: float
    """In microseconds since the step began, as `microseconds` is."""
    microseconds: float
    known: bool
    """True if the time is known."""
    place: str
    """Words for the place in the step."""


class _Batches(NamedTuple):
    """The number of micro-batches in a step, and in its timeline."""

    of_step: int
    shown: int


class _Wanted(NamedTuple):
    """Calls of a collective that could begin at `begin`."""

    collective: Collective
    calls: int
    share: float
    begin: float
    place: str


def sent_of(timeline: Timeline, report: Report, clock: Clock) -> dict[str, list[Sent]]:
    """Return the slices of each axis. A lane sends one collective after the other, and compute does not wait for it."""
    seconds = {collective: _seconds(report, i) for i, collective in enumerate(report.collectives)}
    wanted: dict[str, list[_Wanted]] = defaultdict(list)
    for collective in report.collectives:
        wanted[collective.axis] += _places(collective, timeline, report, clock)
    lanes: dict[str, list[Sent]] = {}
    for axis, waiting in wanted.items():
        lane, free = lanes.setdefault(axis, []), 0.0
        for collective, calls, share, begin, place in sorted(waiting, key=lambda one: one.begin):
            whole = seconds[collective]
            length = EACH if whole is None else share * whole * 1e6
            lane.append(Sent(collective, calls, share, max(begin, free), length, whole is not None, place))
            free = max(begin, free) + length
    return lanes


def _seconds(report: Report, number: int) -> float | None:
    """Return the seconds of all calls of the report's collective of this number; None if they are not known."""
    return getattr(report.costs[number], "seconds", None) if report.costs else None


def _places(collective: Collective, timeline: Timeline, report: Report, clock: Clock) -> Iterator[_Wanted]:
    """Yield the calls of a collective with their places. All calls of the micro-batches that are shown are there, and no call is
    left out because its place is not known."""
    batches = _Batches(report.setup.micro_batches, micro_batches_of(timeline, report))
    parts = _layers_of(collective, timeline, batches)
    noted = [] if parts else called(collective, timeline, report)
    if parts:
        yield from (_Wanted(collective, n, n / collective.calls, clock.at[part.first], IN_LAYER) for part, n in parts)
    elif noted:
        yield from (_Wanted(collective, one.calls, one.share, clock.at[one.part.first], CALLED) for one in noted)
    else:
        spans = [span for span in timeline.spans if span.phase == collective.phase] or timeline.spans[-1:]
        spans, n = _shared_out(collective.calls, spans, batches)
        yield from (_Wanted(collective, n, n / collective.calls, clock.at[span.last], AT_END) for span in spans)


def _shared_out(calls: int, spans: Sequence[Span], batches: _Batches) -> tuple[Sequence[Span], int]:
    """Return the spans of a phase that have equal parts of a collective's calls, and the calls of each. These are all spans, the
    last one of every micro-batch, or the last one of all."""
    if all(span.micro_batch is not None for span in spans):
        chunks = len({span.chunk for span in spans})
        if not calls % (batches.of_step * chunks):
            return spans, calls // (batches.of_step * chunks)
        if not calls % batches.of_step:
            return list({span.micro_batch: span for span in spans}.values()), calls // batches.of_step
    return spans[-1:], calls


def _layers_of(collective: Collective, timeline: Timeline, batches: _Batches) -> list[tuple[Span, int]]:
    """Return the parts that send a collective, each with its calls. Every layer has as many in every micro-batch, or all of
    them in the last one. Return [] if that is not known."""
    if collective.layer is None:
        return []
    parts = [part for part in timeline.layers if part.phase == collective.phase]
    layers = len({(part.chunk, part.layer) for part in parts})
    if not parts or collective.calls % layers or len(parts) != layers * batches.shown:
        return []
    calls = collective.calls // layers
    if not calls % batches.of_step:
        return [(part, calls // batches.of_step) for part in parts]
    if calls == 1 or collective.once:
        last = {(part.chunk, part.layer): part for part in parts}
        return [(part, calls) for part in last.values()]
    return []
