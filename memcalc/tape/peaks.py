"""Local maxima of the bytes alive in a run, by phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.amounts import amount
from memcalc.tape.runs import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence


def peaks(run: Trace, sizes: Sequence[int] | None = None) -> tuple[dict[int, int], dict[int, int], int, int]:
    """Return the local maxima of forward and of backward, as amounts with their places in the log, and the amounts at
    the end of each phase.

    A local maximum is an allocation followed by a free or by another segment. So is the beginning of a backward, in which a
    stage without trained weights allocates nothing. Maxima within the middle layers are left out: they lie between those of
    their neighbours. `sizes` are the amounts of the blocks, if they are not their own.
    """
    sizes = sizes_of(run) if sizes is None else sizes
    early, late, more = run.middle
    begins = _begins(run)
    turns = run.turns()
    found: dict[str, dict[int, int]] = {"": {}, "forward": {}, "backward": {}}
    here: dict[int, int] | None = found[""]
    is_late = turns[0] is not early
    in_early = {i for i, row in enumerate(run.rows) if row.layer is not None and row.layer in early}
    in_late = {i for i, row in enumerate(run.rows) if row.layer is not None and row.layer in late}
    saved = live = extra = extra_early = extra_late = 0
    rising, now = False, ""
    for place, event in enumerate(run.log):
        if place == run.forward_end:
            saved = live + more * extra
        if place in begins:
            if rising and here is not None:
                here.setdefault(live + more * extra, place)
            phase, kept = begins[place]
            rising, now = phase == "backward" != now, phase
            here = found[phase] if kept else None
            if place in turns:
                is_late = turns[place] is late
                extra = extra_late if is_late else extra_early
        block = event if event >= 0 else ~event
        if event >= 0:
            size = sizes[block]
            rising = True
        else:
            if rising and here is not None:
                here.setdefault(live + more * extra, place)
            rising = False
            size = -sizes[block]
        live += size
        if block in in_early:
            extra_early += size
            extra = extra if is_late else extra_early
        elif block in in_late:
            extra_late += size
            extra = extra_late if is_late else extra
    if rising and here is not None:
        here.setdefault(live + more * extra, len(run.log))
    return found["forward"], found["backward"], saved, live + more * extra


def sizes_of(run: Trace) -> list[int]:
    """Return the amount of each block. A block of the repeated micro-batch counts once for every micro-batch that it
    stands for."""
    rows = {id(row): row for row in run.rows}  # micro-batches that do the same have the same objects
    of_row = {key: amount(row.shape, row.dtype, row.component) for key, row in rows.items()}
    sizes = [of_row[id(row)] for row in run.rows]
    for block in run.copies():
        sizes[block] *= 1 + run.repeated.more
    return sizes


def _begins(run: Trace) -> dict[int, tuple[str, bool]]:
    """Return the places in the log at which another phase, layer or micro-batch begins. Each has its phase, and True if
    its moments could be a peak."""
    early, late, _ = run.middle
    forward, backward, more = run.repeated
    segments = {place: (phase, layer) for place, phase, layer in run.segments}
    marks = {forward.start, forward.stop, backward.start, backward.stop} if more else set[int]()
    out: dict[int, tuple[str, bool]] = {}
    phase, layer = "", None
    for place in sorted(segments.keys() | marks):
        phase, layer = segments.get(place, (phase, layer))
        between = layer is not None and (layer in early or layer in late)
        out[place] = phase, not (between or (more and (place in forward or place in backward)))
    return out


def within(run: Trace, parts: Sequence[range]) -> Trace:
    """Return the run with no other phase than `forward`, and that only in some parts of its log."""
    starts = {part.start: "forward" for part in parts} | {part.stop: "" for part in parts}
    layers = {place: layer for place, _, layer in run.segments}
    phase, layer = "", None
    segments: list[tuple[int, str, int | None]] = []
    for place in sorted(starts.keys() | layers.keys()):
        phase, layer = starts.get(place, phase), layers.get(place, layer)
        segments.append((place, phase, layer))
    return run._replace(segments=segments)
