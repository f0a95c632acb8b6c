"""Every type of transformers' causal language models, by its default configuration cut to a few layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FEW = 4


def real(fields: dict[str, Any]) -> torch.nn.Module:
    """transformers' own model on the meta device."""
    kept = {name: value for name, value in fields.items() if name != "model_type"}
    config = AutoConfig.for_model(fields["model_type"], **kept)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def cut(model_type: str) -> dict[str, Any]:
    """A config.json of this type with few layers, where its configuration can be cut; else its default."""
    whole = {"model_type": model_type}
    few = {**whole, **_few_layers(model_type)}
    try:
        real(few)
    except Exception:
        return whole
    return few


def _few_layers(model_type: str) -> dict[str, Any]:
    try:
        default = CONFIG_MAPPING[model_type]()
    except Exception:
        return {}
    layers = getattr(default, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= FEW:
        return {}
    lists = {
        name: value[:FEW] for name, value in vars(default).items() if isinstance(value, list) and len(value) == layers
    }
    return {"num_hidden_layers": FEW, **lists}
