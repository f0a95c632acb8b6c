"""Optimizers that update weights within backward (LOMO): a hook of each gradient takes the gradients that are there before it.

The hook runs before its gradient is accumulated, so a gradient is there until the next one is, and that of the last weight
until backward is over, when `fused_backward` calls the hook once more (lomo_optim/lomo.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.noted import Over, Ready
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import (
    Holdings,
    input_rows,
    parameter_classes,
    state_rows,
    trained_dtype,
    weight_rows,
)
from memcalc.engines.deepspeed.notes import NoteGradients
from memcalc.optimizers import load_optimizer

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.noted import Noted
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.tape.rewritten import Out


class FusedBackward(NamedTuple):
    """The updates while backward runs."""

    optimizer: Any
    shapes: tuple[Shape, ...]
    """The shapes of the weights, by their place in definition order."""
    dtype: DType

    def play(self, noted: Noted, out: Out) -> None:
        """Update each weight when the next gradient is ready."""
        waiting: list[object] = []
        shape: Shape = ()

        def block(name: str, elements: int, dtype: DType) -> object:
            return out.block(name, "elements", elements, dtype)

        for event in noted.events:
            out.reach(event.place)
            if not isinstance(event, (Ready, Over)):
                continue
            ready: list[object] = []
            if isinstance(event, Ready):
                out.reach(event.after)
                ready.append(out.block_of_run(event.block))
            if waiting:
                self.optimizer.update(waiting, shape, self.dtype, block)
            waiting = ready
            if isinstance(event, Ready):
                shape = self.shapes[event.parameter]


def holdings(model: Model, setup: Setup) -> Holdings:
    """Return what one process holds whose backward updates the weights."""
    dtype, trained = setup.compute_dtype, trained_dtype(model, setup)
    always = weight_rows(model, dtype, "parameters", "always", own_dtypes=setup.keeps_adapter_dtype)
    always += [*state_rows(setup, parameter_classes(model), trained), *input_rows(model, setup, dtype)]
    scaled: list[Row] = []
    if setup.optimizer == "adalomo":
        name, life = "the loss, scaled", "backward"
        row = Row(
            "buffers", name, (Dim("numbers", 1),), fp32, life=life, basis="modelled", source="lomo_optim/adalomo.py"
        )
        scaled.append(row._replace(dtype=model.program.loss_in(dtype, fp32)))
    shapes = tuple(weight.shape for weight in model.program.weights())
    over = FusedBackward(load_optimizer(setup.optimizer), shapes, trained)
    return Holdings(
        always=tuple(always), backward=tuple(scaled), keeps_gradients=False, hooks=NoteGradients(), over=over
    )
