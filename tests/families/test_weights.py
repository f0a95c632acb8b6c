"""Names, order and shapes of parameters and buffers against transformers' own models on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import paper
import pytest
from cases import parameter_cases
from meta_models import built
from records import on_record
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


@pytest.mark.parametrize("fields", configs())
def test_weights_and_buffers_are_transformers_own(fields: dict[str, Any]) -> None:
    real = built(fields)
    program = paper.program_of(fields)
    weights = [(w.name.replace("*", str(w.layer)), tuple(d.size for d in w.shape)) for w in program.weights()]
    assert weights == real.parameters
    buffers = [(b.full_name, tuple(d.size for d in b.shape)) for b in program.buffers() if b.registered]
    assert buffers == real.buffers


def test_the_sample_is_there() -> None:
    assert [name for name in SAMPLE if not (SPECS / f"{name}.json").exists()] == []


@pytest.mark.parametrize("model_type", ["deepseek_v2", "glm4_moe"])
def test_a_default_that_is_built_but_cannot_run(model_type: str) -> None:
    """transformers makes a model of it, whose forward fails."""
    model = memcalc.load_model({"model_type": model_type})
    expected = [(name, shape, None) for name, shape in built({"model_type": model_type}).parameters]
    assert model.weights() == expected
    with pytest.raises(memcalc.InputError, match=model_type):
        memcalc.estimate(model)


@on_record
def every_field(model_type: str) -> dict[str, Any]:
    """The type's default configuration as transformers writes it; none where it cannot."""
    from transformers import AutoConfig

    try:
        return json.loads(json.dumps(AutoConfig.for_model(model_type).to_dict()))
    except ValueError:
        return {}


@pytest.mark.parametrize("model_type", [t for t in FAMILIES if t in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_a_configuration_with_every_field_is_the_default(model_type: str) -> None:
    """What `save_pretrained` writes has all fields, those that the type leaves out or computes among them."""
    try:
        short = memcalc.load_model({"model_type": model_type})
    except memcalc.InputError:
        short = None
    fields = every_field(model_type)
    if short is None or not fields:
        pytest.skip("transformers has no default of this type that it can build")
    assert memcalc.load_model(fields).weights() == short.weights()
