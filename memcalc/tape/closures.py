"""Blocks in the closures of reentrant checkpoints: a layer's arguments by keyword, which live as long as the loss of their step.

torch's CheckpointFunction has the function itself in its node (`ctx.run_function`), and transformers puts a layer's arguments
by keyword into that function: masks, positions and their embeddings. So the graph of a step, which the loss holds, still has
them when the forward of the next step begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.passes import forward
from memcalc.core.reentrant import in_closures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import StorageRow, Tensor
    from memcalc.families.base.module import Run
    from memcalc.families.base.program import Program


def left_in_closures(program: Program, run: Run, autocast: DType | None, batch: Sequence[Tensor]) -> list[StorageRow]:
    """Return the blocks that a step's forward makes and leaves in closures."""
    loss = forward(program, run, autocast, batch)
    rows = [run.memory.rows[tensor.storage.index] for tensor in in_closures(loss)]
    return [row for row in rows if row.component == "activation"]
