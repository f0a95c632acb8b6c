"""The linear layers of a model: those that a forward on paper calls as nn.Linear or Conv1D."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import fixed_size, workload_size
from memcalc.core.dtypes import fp32
from memcalc.core.tensor import Autocast, Memory
from memcalc.families.base.module import LinearCall, Run, after_forward

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.families.base.program import Program

Place = tuple[str, int | None]
"""A module: its path with `*` for the number of its layer, and that number."""


def linear_modules(program: Program, dtype: DType = fp32, autocast: DType | None = None) -> dict[Place, LinearCall]:
    """Return the calls of linear layers in a forward of weights of `dtype`, by the module's place, in their order."""
    batch, seq = 1, 2
    size = workload_size(batch, seq) if program.polynomial else fixed_size(batch, seq)
    run = Run(Memory(), dtype, program.attention_kinds[0], False, size.batch, size.seq)
    for weight in program.weights():
        run.add_weight(weight)
    for buffer in after_forward(program.buffers(), seq):
        run.add_buffer(buffer)
    run.called = {}
    with Autocast(run.memory, autocast):
        program.forward(run, *program.give(run))
    return run.called
