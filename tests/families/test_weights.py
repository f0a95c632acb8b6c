"""Names, order and shapes of parameters and buffers against transformers' own models on the meta device."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import paper
import pytest
import torch
import transformers
from cases import auto_class, parameter_cases
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import memcalc
from memcalc.families import FAMILIES

SPECS = Path(__file__).resolve().parents[2] / "model_specs"

SAMPLE = [
    "llama-3.2-1b", "mistral-7b", "qwen2-0.5b", "qwen3-0.6b", "gemma-2-2b", "phi-3-mini", "phi-4", "gpt2", "pythia-70m",
    "gpt-neox-20b", "opt-350m", "opt-6.7b", "mixtral-8x7b",
]  # fmt: skip


def configs() -> list[Any]:
    params = [
        pytest.param(fields, id=f"{family}-{i or 'default'}")
        for family in FAMILIES
        for i, fields in enumerate(parameter_cases(family))
    ]
    for name in SAMPLE:
        path = SPECS / f"{name}.json"
        if path.exists():
            params.append(pytest.param(json.loads(path.read_text(encoding="utf-8"))["config"], id=name))
    return params


def meta_model(fields: dict[str, Any]) -> torch.nn.Module:
    kept = deepcopy(fields)
    auto = getattr(transformers, auto_class(kept))
    with torch.device("meta"):
        return auto.from_config(transformers.AutoConfig.for_model(kept.pop("model_type"), **kept))


@pytest.mark.parametrize("fields", configs())
def test_weights_and_buffers_are_transformers_own(fields: dict[str, Any]) -> None:
    model = meta_model(fields)
    program = paper.program_of(fields)
    weights = [(w.name.replace("*", str(w.layer)), [d.size for d in w.shape]) for w in program.weights()]
    assert weights == [(name, list(p.shape)) for name, p in model.named_parameters()]
    buffers = [(b.full_name, [d.size for d in b.shape]) for b in program.buffers() if b.registered]
    assert buffers == [(name, list(b.shape)) for name, b in model.named_buffers()]


def test_the_sample_is_there() -> None:
    assert [name for name in SAMPLE if not (SPECS / f"{name}.json").exists()] == []


@pytest.mark.parametrize("model_type", ["deepseek_v2", "glm4_moe"])
def test_a_default_that_is_built_but_cannot_run(model_type: str) -> None:
    """transformers makes a model of it, whose forward fails."""
    model = memcalc.load_model({"model_type": model_type})
    expected = [(name, tuple(p.shape), None) for name, p in meta_model({"model_type": model_type}).named_parameters()]
    assert model.weights() == expected
    with pytest.raises(memcalc.InputError, match=model_type):
        memcalc.estimate(model)


@pytest.mark.parametrize("model_type", [t for t in FAMILIES if t in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_a_configuration_with_every_field_is_the_default(model_type: str) -> None:
    """What `save_pretrained` writes has all fields, those that the type leaves out or computes among them."""
    try:
        fields = AutoConfig.for_model(model_type).to_dict()
        short = memcalc.load_model({"model_type": model_type})
    except (ValueError, memcalc.InputError):
        pytest.skip("transformers has no default of this type that it can build")
    assert memcalc.load_model(fields).weights() == short.weights()
