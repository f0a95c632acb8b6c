"""The forwards and backwards in a run of several micro-batches, found by its layers."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from memcalc.pictures.timeline import Span

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Passes(NamedTuple):
    """Neighbouring parts of one phase, and how often they go through the layers."""

    phase: str
    parts: Sequence[Span]
    times: int


def spans_of(parts: Sequence[Span], micro_batches: int) -> list[Span]:
    """Return the forwards and backwards that these parts are, for a run of so many micro-batches.

    Forwards that follow each other are one span, and backwards too: the run does not say where one ends. Such a span has no
    micro-batch. No span has one if the forwards that are counted are not one for each micro-batch.
    """
    passes = [_passes(phase, list(group)) for phase, group in groupby(parts, lambda part: part.phase or "forward")]
    known = sum(one.times for one in passes if one.phase == "forward") == micro_batches
    begun = {"forward": 0, "backward": 0}
    spans: list[Span] = []
    for phase, own, times in passes:
        number = begun[phase] if known and times == 1 else None
        begun[phase] += times
        spans.append(Span(phase, number, 0, None, own[0].first, own[-1].last))
    return spans


def _passes(phase: str, parts: Sequence[Span]) -> _Passes:
    """Count how often parts go through the layers: upwards in forward, downwards in backward."""
    layers = [part.layer for part in parts if part.layer is not None]
    upwards = phase == "forward"
    turns = sum((after < before) if upwards else (after > before) for before, after in pairwise(layers))
    return _Passes(phase, parts, 1 + turns)
