"""The columns of a drawing, and the moments of a timeline that each of them stands for."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.pictures.timeline import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.pictures.timeline import Timeline

_LEAST: Final = 4
"""The columns of a span that has hardly any moments, if there is room."""


class Columns(NamedTuple):
    """A drawing's columns."""

    moments: list[range]
    """The moments of each column, at least one."""
    spans: list[tuple[Span, int, int]]
    """The spans, or sections of several spans, with their first column and the one after their last."""

    def of(self, moment: int) -> int:
        """Return the first column that stands for a moment."""
        return next(i for i, moments in enumerate(self.moments) if moment < moments.stop)


def columns_of(timeline: Timeline, count: int) -> Columns:
    """Return `count` columns for a timeline. A span's columns are in proportion to its moments, and at least a few. If there
    are more spans than have room, sections of the step take their place."""
    spans = [span for span in timeline.spans if span.last > span.first]
    if len(spans) * _LEAST > count:
        spans = _sections(spans)
    widths = _shared([span.last - span.first for span in spans], count)
    moments: list[range] = []
    placed: list[tuple[Span, int, int]] = []
    for span, width in zip(spans, widths, strict=True):
        placed.append((span, len(moments), len(moments) + width))
        moments += _parts(span.first, span.last, width)
    moments[0] = range(moments[0].stop)
    moments[-1] = range(moments[-1].start, timeline.events + 1)
    return Columns(moments, placed)


def _sections(spans: Sequence[Span]) -> list[Span]:
    """Return a pipeline's step in four sections: forwards alone, both, backwards alone, and the optimizer's step."""
    turns = [span for span in spans if span.phase != "step"]
    phases = [span.phase for span in turns]
    first = phases.index("backward") if "backward" in phases else len(phases)
    last = len(phases) - phases[::-1].index("forward") if "forward" in phases else 0
    cuts = {
        "forwards": turns[:first],
        "forwards and backwards": turns[first:last],
        "backwards": turns[max(first, last) :],
    }
    sections = [Span(words, None, 0, None, own[0].first, own[-1].last) for words, own in cuts.items() if own]
    return [*sections, *(span for span in spans if span.phase == "step")]


def _shared(sizes: Sequence[int], count: int) -> list[int]:
    """Return `count` columns shared out in proportion to sizes, at least a few for each."""
    free, whole = count - _LEAST * len(sizes), sum(sizes)
    ends = [free * sum(sizes[: i + 1]) // whole for i in range(len(sizes))]
    return [_LEAST + end - start for start, end in zip([0, *ends], ends, strict=False)]


def _parts(first: int, end: int, count: int) -> list[range]:
    """Return `count` ranges of about equal length from `first` to `end`. None is empty: with fewer moments some are repeated."""
    size = end - first
    starts = [first + size * i // count for i in range(count + 1)]
    return [range(start, max(stop, start + 1)) for start, stop in pairwise(starts)]
