"""No engine: one process with plain PyTorch and transformers, the contract's reference step.

Under `bf16-mixed` and `fp16-mixed` the optimizer updates fp32 master weights: the 16-bit gradients are cast to fp32,
the optimizer steps over the masters, and the result is copied back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dtypes import DType, fp32
from memcalc.core.rows import Row
from memcalc.engines.base.clipping import temporaries
from memcalc.engines.base.holdings import (
    Holdings,
    Order,
    Update,
    input_rows,
    larger,
    met_in_step,
    parameter_classes,
    state_rows,
    step_temporaries,
    trained_dtype,
    weight_rows,
)
from memcalc.layout.collectives import Collective

if TYPE_CHECKING:
    from memcalc.families.base.module import Weight
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


def holdings(model: Model, setup: Setup) -> Holdings:
    dtype, trained, own = setup.compute_dtype, trained_dtype(model, setup), setup.keeps_adapter_dtype
    updated = fp32 if setup.has_master_weights else trained

    def updated_as(weight: Weight) -> DType | None:
        """Return a weight's dtype if it is updated itself and others that train have another one."""
        return (weight.dtype or dtype) if own and not setup.has_master_weights else None

    parameters = parameter_classes(model, updated_as)
    always = weight_rows(model, dtype, "parameters", "always", own_dtypes=own)
    step = weight_rows(model, dtype, "gradients", "backward to step", own_dtypes=own)
    casts: list[Row] = []
    accumulated: tuple[Row, ...] = tuple(step) if setup.micro_batches > 1 else ()
    if setup.has_master_weights:

        def has_master(weight: Weight) -> bool:
            """An fp32 adapter is updated itself."""
            return not own or weight.dtype is not fp32

        always += weight_rows(model, fp32, "optimizer_states", "always", ": fp32 master", of=has_master)
        name = ": gradient cast to fp32 for the master"
        casts = weight_rows(model, fp32, "temporaries", "within the step", name, of=has_master)
    before, states = [*always, *input_rows(model, setup, dtype)], state_rows(setup, parameters, updated)
    always = [*always, *states, *input_rows(model, setup, dtype)]
    clipping = temporaries(model, setup, trained, updated_as)
    how = setup.optimizer, setup.optimizer_implementation
    step += larger(clipping, [*casts, *step_temporaries(*how, met_in_step(model, setup, updated_as), updated, updated)])
    return Holdings(
        always=tuple(always),
        forward=accumulated,
        backward=accumulated,
        step=tuple(step),
        keeps_gradients=not accumulated,
        accumulates=bool(accumulated),
        order=Order(
            tuple(before), tuple(states), tuple(casts), (Update(tuple(parameters), updated),), clipping=tuple(clipping)
        ),
    )


def collectives(model: Model, setup: Setup) -> list[Collective]:
    return []


def textbook(model: Model, setup: Setup) -> list[Collective]:
    return []
