"""Local maxima of the bytes alive in a run, by phase."""

from __future__ import annotations

from itertools import pairwise
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
    sizes, log, turns = sizes_of(run) if sizes is None else sizes, run.log, run.turns()
    early = _levels(run, sizes, run.middle.early)
    late = _levels(run, sizes, run.middle.late) if run.middle.more else early
    levels = early if turns[0] is run.middle.early else late
    found: dict[str, dict[int, int]] = {"": {}, "forward": {}, "backward": {}}
    here: dict[int, int] | None = found[""]
    saved, start, now, rising = 0, 0, "", False
    begins = {place: mark for place, mark in _begins(run).items() if place < len(log)}
    for stop in (*begins, len(log)):
        if start < run.forward_end <= stop and run.forward_end < len(log):
            saved = levels[run.forward_end]
        if here is not None:
            _add_maxima(here, levels, log, start, stop, rising=rising)
        rising = log[stop - 1] >= 0 if start < stop else rising
        if rising and here is not None:
            here.setdefault(levels[stop], stop)
        if stop < len(log):
            phase, kept = begins[stop]
            rising, now = phase == "backward" != now, phase
            here = found[phase] if kept else None
            if stop in turns:
                levels = late if turns[stop] is run.middle.late else early
        start = stop
    return found["forward"], found["backward"], saved, levels[len(log)]


def _add_maxima(
    here: dict[int, int], levels: Sequence[int], log: Sequence[int], start: int, stop: int, *, rising: bool
) -> None:
    """Add the places from `start` to `stop` at which a free follows an allocation. `rising`: True if `start` counts as
    following one."""
    if rising and start < stop and log[start] < 0:
        here.setdefault(levels[start], start)
    for place in [at for at, (before, event) in enumerate(pairwise(log[start:stop]), start + 1) if event < 0 <= before]:
        here.setdefault(levels[place], place)


def _levels(run: Trace, sizes: Sequence[int], stands: range) -> list[int]:
    """Return the amount that is alive before each place of the log, and after the last one, if the layers `stands` stand for
    those that are left out."""
    if run.middle.more:
        times = 1 + run.middle.more
        of_rows = zip(sizes, run.rows, strict=True)
        sizes = [size * times if row.layer is not None and row.layer in stands else size for size, row in of_rows]
    return run.alive(sizes)


def sizes_of(run: Trace) -> list[int]:
    """Return the amount of each block. A block of the repeated micro-batch counts once for every micro-batch that it
    stands for."""
    ids = list(map(id, run.rows))  # micro-batches that do the same have the same objects
    rows = dict(zip(ids, run.rows, strict=True))
    of_row = {key: amount(row.shape, row.dtype, row.component) for key, row in rows.items()}
    sizes = list(map(of_row.__getitem__, ids))
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
