"""What peft makes of a model with more than plain LoRA: its parameters, and a step of it, as `validated.validate` runs one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import transformers
from records import on_record

import memcalc
from memcalc.families import support_of
from memcalc.tracing.modules import configuration, on_meta, quiet
from memcalc.validate import fake, run
from memcalc.validate.comparison import Comparison, Measured

_measure = fake.measure


@on_record
def measure(report: memcalc.Report) -> Measured:
    """Versions are not part of a record."""
    return _measure(report)._replace(environment={})


def validate(model: Any, **options: Any) -> Comparison:
    with patch.object(fake, "measure", measure):
        return run.validate(model, **options)


@on_record
def parameters(fields: dict[str, Any], options: dict[str, Any]) -> list[tuple[str, list[int], bool]]:
    """Name, shape and whether it trains, of every parameter with a LoraConfig of these options."""
    import peft

    kept = {name: value for name, value in deepcopy(fields).items() if name != "model_type"}
    config = configuration(fields["model_type"], kept)
    named = support_of(fields["model_type"]).auto_class
    with quiet(), torch.device("meta"):
        model: Any = on_meta(config) if named is None else getattr(transformers, named).from_config(config)
        own: Any = peft.get_peft_model(model, peft.LoraConfig(r=3, **options)).get_base_model()
    return [(name, list(p.shape), p.requires_grad) for name, p in own.named_parameters()]
