"""The reference model of a preference task, beside the policy: a second copy of all weights, or the policy's own base.

TRL loads the reference like the policy and never trains it, but its weights keep `requires_grad`. So under autocast its
casts of weights are kept until its forward ends. A policy with adapters has no second model: they are switched off
(`PeftModel.disable_adapter`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.rows import Row
from memcalc.families.base.module import after_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Adapters, Module, Run
    from memcalc.families.base.program import Program
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

NAME: Final = "reference model: "
SOURCE: Final = "TRL 1.16 trl/trainer/dpo_trainer.py, ref_model"


class SwitchedOff(NamedTuple):
    """The adapters of a policy that runs as its own reference: each adapted layer is its base alone."""

    adapters: Adapters

    def has(self, path: str, layer: int | None) -> bool:
        return self.adapters.has(path, layer)

    def saves(self, path: str, layer: int | None) -> bool:
        return self.adapters.saves(path, layer)

    def around(self, m: Module, x: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        with m:
            return base(x)

    def within(self, m: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return forward


def reference_run(program: Program, run: Run) -> Run:
    """Return the run of the reference model in the policy's memory. Its weights are allocated, if they are its own."""
    if run.adapters is not None:
        return replace(run, recompute=False, adapters=SwitchedOff(run.adapters))
    own = replace(run, recompute=False, weights={}, frozen={}, buffers={}, input_require_grads=False)
    for weight in program.weights():
        own.add_weight(weight)
    for buffer in after_forward(program.buffers(), program.length(run.seq)):
        own.add_buffer(buffer)
    return own


def reference_rows(model: Model, setup: Setup, buffer_dtype: DType | None) -> tuple[Row, ...]:
    """Return the rows of a reference model: its weights and buffers, of the policy's dtypes. `buffer_dtype` is that of
    floating-point buffers, if it is another one."""
    return tuple(_rows(model, setup, buffer_dtype))


def _rows(model: Model, setup: Setup, buffer_dtype: DType | None) -> Iterator[Row]:
    dtype = setup.compute_dtype
    for weight in model.whole.weight_classes:
        copies = model.whole.copies(weight)
        yield Row("parameters", NAME + weight.name, weight.shape, dtype, copies, "always", "exact", SOURCE)
    buffers = Counter(b._replace(layer=None) for b in after_forward(model.whole.program.buffers(), setup.seq_len or 0))
    for buffer, copies in buffers.items():
        kept = buffer.dtype or buffer_dtype or dtype
        yield Row("buffers", NAME + buffer.name, buffer.shape, kept, copies, "always", "exact", SOURCE)
