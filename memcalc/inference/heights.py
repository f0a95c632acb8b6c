"""The blocks that are alive in a step: their bytes at any batch size, and the blocks at the highest moment.

Weights do not count here: they are rows of their own, which can be quantised.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import evaluate, numel
from memcalc.device.allocator import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import StorageRow
    from memcalc.inference.parallel import Stage
    from memcalc.inference.steps import Step

KV = "kv_cache"
STATE = "state_cache"
WEIGHTS = "parameters"


class Scale(NamedTuple):
    """The batch size, and the dtype that keys and values are kept in."""

    batch: int
    computed: DType
    cache_dtype: DType

    def nbytes(self, row: StorageRow) -> int:
        """Return the bytes of a block; 0 for a weight."""
        if row.component == WEIGHTS:
            return 0
        elements = evaluate(numel(row.shape)[1], self.batch, 1)
        return elements * self.dtype(row).itemsize

    def dtype(self, row: StorageRow) -> DType:
        """Return the dtype of a block: keys and values of the model's dtype are kept in another one if that is asked for."""
        return self.cache_dtype if row.component == KV and row.dtype is self.computed else row.dtype


class On(NamedTuple):
    """A step as one pipeline stage sees it: the moments in which it runs, and the caches of its layers."""

    step: Step
    stage: Stage

    def moments(self) -> list[bool]:
        """Tell for each event of the log whether the stage runs then."""
        step, stage = self.step, self.stage
        if stage.first and stage.last:
            return [True] * len(step.log)
        out = [False] * len(step.log)
        bounds = [*step.segments, (len(step.log), "", None)]
        seen = False
        for (start, _, layer), (end, _, _) in pairwise(bounds):
            seen = seen or layer is not None
            runs = layer in stage.layers if layer is not None else (stage.last if seen else stage.first)
            out[start:end] = [runs] * (end - start)
        return out

    def holds(self, row: StorageRow) -> bool:
        """Tell whether the stage holds a block at a moment in which it runs."""
        return row.component not in (KV, STATE) or row.layer in self.stage.layers


class High(NamedTuple):
    """The highest moment of a step: its bytes, and the place in the log behind it."""

    nbytes: int
    place: int


def highest(on: On, size: Callable[[StorageRow], int]) -> High:
    """Return the moment of a step with most bytes alive on a stage, by the size of each block."""
    step, moments = on.step, on.moments()
    sizes = [size(row) if on.holds(row) else 0 for row in step.rows]
    live = most = place = 0
    for i, event in enumerate(step.log):
        if event >= 0:
            live += sizes[event]
            if live > most and moments[i]:
                most, place = live, i + 1
        else:
            live -= sizes[~event]
    return High(most, place)


def alive(on: On, place: int | None = None) -> list[StorageRow]:
    """Return a stage's blocks that are alive just before `place` in the log; None: at its end."""
    step = on.step
    found: dict[int, None] = {}
    for event in step.log[:place]:
        if event >= 0:
            found[event] = None
        else:
            del found[~event]
    return [row for row in (step.rows[i] for i in found) if on.holds(row)]


def rounding(rows: Sequence[StorageRow], size: Callable[[StorageRow], int]) -> int:
    """Return what the allocator's rounding of blocks to 512 bytes adds."""
    return sum(-size(row) % BLOCK for row in rows)
