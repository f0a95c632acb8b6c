# pyright: basic
"""Adapters and frozen weights where ranks share layers or stages: they come behind the split.

peft asks a model for its plan, and torch's `parallelize_module` makes new parameters, of which not all keep that they want no
gradient. Stages agree in their first step which hidden states want a gradient (_forward_metadata_inference in
torch/distributed/pipelining/stage.py): what a stage really puts out decides. Over a fake group nothing arrives, so the stages
before are run here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memcalc.tracing.modules import quiet
from memcalc.validate.checks import fields_of
from memcalc.validate.engines import config_of, split
from memcalc.validate.pipeline import StageModule, stages_of
from memcalc.validate.reference import build
from memcalc.validate.tuning import require_input_grads, tune

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


def tuned_behind_the_split(setup: Setup, model: Model, mesh: Any) -> Any:
    """Return the whole model with its layers split over the mesh's tp, if it has one, and then with what trains."""
    whole = setup._replace(lora_rank=0, freeze=None, input_require_grads=False)
    made = split(setup, build(whole, model.whole, fields_of(model)), mesh)
    made._device_mesh, made.config.distributed_config = mesh, config_of(setup)
    made = tune(made, setup, model.program)
    if setup.input_require_grads:
        require_input_grads(made, setup)
    return made


def outputs_that_want_a_gradient(setup: Setup, model: Model) -> list[bool]:
    """Return whether the output of each stage wants a gradient, by the forwards of the stages themselves, on one rank and in
    16 bits, for which every attention has a kernel."""
    of_all = [span for _, span in sorted(stage for of_rank in stages_of(setup, model) for stage in of_rank)]
    found: list[bool] = []
    plain = setup._replace(engine="none", precision="bf16", recompute="none", recompute_layers=None, tp=1, cp=1)
    with quiet():
        for span in of_all:
            whole: Any = build(plain, model, fields_of(model))
            if setup.input_require_grads:
                whole.enable_input_require_grads()
            given: Any = torch.zeros((1, 4), dtype=torch.int64)
            if not span.first:
                dtype = next(p.dtype for p in whole.parameters() if p.is_floating_point())
                given = torch.zeros((1, 4, whole.config.hidden_size), dtype=dtype, requires_grad=found[-1])
            found.append(StageModule(whole, span, None)(given).requires_grad)
    return found
