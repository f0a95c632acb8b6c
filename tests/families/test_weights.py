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
from cases import AUTO_CLASSES, parameter_cases

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
    auto = getattr(transformers, AUTO_CLASSES.get(kept["model_type"], "AutoModelForCausalLM"))
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
