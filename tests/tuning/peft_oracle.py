"""What peft makes of a model: names and shapes of its parameters, on the meta device."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import transformers
from records import on_record

from memcalc.families import support_of
from memcalc.tracing.modules import configuration, on_meta, quiet

PREFIX = "base_model.model."


@on_record
def adapted(
    fields: dict[str, Any], targets: list[str] | str | None, bias: str = "none"
) -> list[tuple[str, list[int], bool]]:
    """Name, shape and whether it trains, of every parameter; empty if peft refuses the targets."""
    import peft

    kept = {name: value for name, value in deepcopy(fields).items() if name != "model_type"}
    config = configuration(fields["model_type"], kept)
    named = support_of(fields["model_type"]).auto_class
    with quiet(), torch.device("meta"):
        model = on_meta(config) if named is None else getattr(transformers, named).from_config(config)
        try:
            own: Any = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=targets, bias=bias))  # type: ignore[arg-type]
        except ValueError:
            return []
    return [(name.removeprefix(PREFIX), list(p.shape), p.requires_grad) for name, p in own.named_parameters()]
