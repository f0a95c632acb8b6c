"""A pipeline rank's step with frozen weights or adapters, as `memcalc.validate` runs one, over stages that know which hidden
states want a gradient.

Stages of torch agree upon that in their first step (_forward_metadata_inference in torch/distributed/pipelining/stage.py): what
a stage really puts out decides. Over a fake group nothing arrives, so the stages before are run here.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.pipelining import PipelineStage
from tuning.split import tuned_behind_the_split

import memcalc
from memcalc.pipelining.programs import spans
from memcalc.tracing.modules import quiet
from memcalc.validate import fake, pipeline
from memcalc.validate.checks import fields_of
from memcalc.validate.comparison import Comparison
from memcalc.validate.reference import build


def validate(model: Any, **options: Any) -> Comparison:
    report = memcalc.estimate(model, engine="fsdp2", **options)
    wanted = outputs_that_want_a_gradient(report)

    def stage(module: Any, index: int, *rest: Any, input_args: Any, output_args: Any, **named: Any) -> Any:
        if index:
            input_args = input_args.detach().requires_grad_(wanted[index - 1])
        output_args = output_args.detach().requires_grad_(wanted[index])
        return PipelineStage(module, index, *rest, input_args=input_args, output_args=output_args, **named)

    with patch.object(pipeline, "PipelineStage", stage), tuned_behind_the_split(report):
        return Comparison(report, fake.measure(report), "fake")


def outputs_that_want_a_gradient(report: memcalc.Report) -> list[bool]:
    """Whether the output of each stage wants a gradient, by the forwards of the real stages."""
    setup, model = report.setup, report.model
    of_ranks = spans(model.layers, setup.pp, setup.virtual_stages, setup.first_stage_layers, setup.last_stage_layers)
    of_all = [of_ranks[i % setup.pp][i // setup.pp] for i in range(setup.pp * setup.virtual_stages)]
    found: list[bool] = []
    plain = setup._replace(recompute="none", tp=1, cp=1)
    for span in of_all:
        with quiet():
            whole: Any = build(plain, model, fields_of(model))
            if setup.input_require_grads:
                whole.enable_input_require_grads()
            given: Any = torch.zeros((1, 4), dtype=torch.int64)
            if not span.first:
                dtype = next(whole.parameters()).dtype
                given = torch.zeros((1, 4, whole.config.hidden_size), dtype=dtype, requires_grad=found[-1])
            found.append(pipeline.StageModule(whole, span, None)(given).requires_grad)
    return found
