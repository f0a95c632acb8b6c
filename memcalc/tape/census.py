"""The census of a run: which blocks are alive at a place of its log, and the rows that stand for them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.rows import Component, Row

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.tape.runs import Trace


def _alive(run: Trace, place: int) -> set[int]:
    """Return the blocks alive just before `place` in the log."""
    log = run.log[:place]  # in which a block comes once, and goes once
    return {event for event in log if event >= 0}.difference([~event for event in log if event < 0])


class _Kind(NamedTuple):
    """A kind of blocks that one row stands for."""

    component: Component
    name: str
    shape: Shape
    dtype: DType


def saved_blocks(run: Trace) -> set[int]:
    """Return the blocks that a forward leaves for its backward."""
    if not run.forward_ends:
        return _alive(run, run.forward_end)
    phases = {place: phase for place, phase, _ in run.segments}
    marks = sorted({0, *run.forward_ends, *phases} - {len(run.log)})
    ends = set(run.forward_ends)
    of_this: set[int] = set()
    saved: set[int] = set()
    phase = ""
    for start, stop in pairwise([*marks, len(run.log)]):
        if start in ends:
            saved |= of_this
            of_this = set()
        phase = phases.get(start, phase)
        part = run.log[start:stop]
        if phase == "forward":  # a gradient that waits to be sent is not saved
            of_this.update([event for event in part if event >= 0])
        of_this.difference_update([~event for event in part if event < 0])
    return saved


def blocks_that_stay(run: Trace) -> set[int]:
    """Return the blocks alive when the run is over.

    After a step of several micro-batches they also have their numbers from before they were renamed: a loss is renamed
    when the caller gets it.
    """
    out = _alive(run, len(run.log))
    if run.forward_ends:
        begun = [place for place, phase, _ in run.segments if not phase]  # micro-batches after the first
        out = out.union(*(_alive(run, place) for place in begun))
        out |= {~run.log[place] for place in run.renamed if run.log[place + 1] in out}
    return out


def _census(run: Trace, place: int, saved: set[int], left: set[int]) -> Counter[_Kind]:
    """Count the blocks of each kind that are alive.

    A block that is alive at the end of forward too is a saved activation. A block that is alive at the end of backward
    counts as a buffer.
    """
    away, copies = run.away(place), run.copies()
    out: Counter[_Kind] = Counter()
    for i in sorted(_alive(run, place)):
        row = run.rows[i]
        times = run.times(row, away) * (1 + run.repeated.more if i in copies else 1)
        if row.component == "gradients":
            out[_Kind("gradients", row.name, row.shape, row.dtype)] += times
        elif row.component == "activation":
            component = "buffers" if i in left else "saved_activations" if i in saved else "temporaries"
            out[_Kind(component, row.label, row.shape, row.dtype)] += times
        elif row.component == "gathered":
            out[_Kind("buffers", row.label, row.shape, row.dtype)] += times
    return out


_LIVES: Final[dict[str, str]] = {
    "gradients": "backward to step",
    "saved_activations": "forward to backward",
    "temporaries": "within the phase",
    "buffers": "kept after backward",
}


def _source(run: Trace, component: Component) -> str:
    if run.source:
        return run.source
    return "torch/csrc/autograd/functions/accumulate_grad.cpp" if component == "gradients" else run.kernels.source


def rows_alive(run: Trace, place: int, saved: set[int], left: set[int]) -> list[Row]:
    """Return the rows alive just before `place`, one for equal blocks of all layers. `saved` are the blocks that forward leaves
    for backward, `left` those alive when the run is over."""
    return [
        Row(
            kind.component,
            kind.name,
            kind.shape,
            kind.dtype,
            count,
            _LIVES[kind.component],
            basis="traced" if run.source else run.kernels.basis,
            source=_source(run, kind.component),
        )
        for kind, count in _census(run, place, saved, left).items()
    ]
