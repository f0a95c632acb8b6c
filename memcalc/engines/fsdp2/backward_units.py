"""The units that a backward gathers and reduces, if some weights are frozen: read off the run.

Backward ends at the first layer that needs a gradient. Earlier layers are not gathered again, except the one that was
prefetched for nothing. A unit without a gradient is not reduced.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import numel
from memcalc.core.dtypes import DType
from memcalc.engines.fsdp2.step import GATHERED, REDUCED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.tape.runs import Trace


class BackwardUnits(NamedTuple):
    """The layers of the real stack by what a micro-batch's backward does with them."""

    gathered: frozenset[int]
    reduced: frozenset[int]


def units_of_backward(run: Trace, experts: str | None = None) -> tuple[BackwardUnits, BackwardUnits]:
    """Return the layers that the backward of a run gathers, and those that it reduces; then the same for the units of experts
    at the path `experts`."""

    def units(*, apart: bool) -> BackwardUnits:
        gathered, reduced = (
            frozenset(layer for layer, unit in _layers_with(run, name, "backward") if (unit == experts) == apart)
            for name in (GATHERED, REDUCED)
        )
        return BackwardUnits(gathered, reduced)

    return units(apart=False), units(apart=True)


def _layers_with(run: Trace, name: str, phase: str) -> Iterator[tuple[int, str]]:
    """Yield the real layers that have a block of this name in a phase, with the name of the block's unit."""
    phases = {place: of for place, of, _ in run.segments}
    now = ""
    for place, event in enumerate(run.log):
        now = phases.get(place, now)
        if event >= 0 and now == phase and run.rows[event].name == name:
            row = run.rows[event]
            if row.layer is not None:
                yield from ((layer, row.scope) for layer in _real(run, row.layer))


def elements_of_blocks(run: Trace, name: str, phase: str) -> Counter[DType]:
    """Return the elements of all blocks of this name that a run allocates in a phase, over the real layers, by dtype."""
    phases = {place: of for place, of, _ in run.segments}
    now, elements = "", Counter[DType]()
    for place, event in enumerate(run.log):
        now = phases.get(place, now)
        if event >= 0 and now == phase and run.rows[event].name == name:
            row = run.rows[event]
            layers = 1 if row.layer is None else sum(1 for _ in _real(run, row.layer))
            elements[row.dtype] += layers * numel(row.shape)[0]
    return elements


def _real(run: Trace, layer: int) -> Iterator[int]:
    """Yield the real layers that a layer of the run stands for."""
    early, _, more = run.middle
    if layer in early:
        yield from range(layer, layer + (more + 1) * len(early), len(early))
    else:
        yield layer + more * len(early) if layer >= early.stop else layer
