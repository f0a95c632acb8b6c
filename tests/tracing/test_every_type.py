"""Every causal language model of transformers by its default configuration: its parameters, or one line that says why not."""

from __future__ import annotations

import pytest
from causal import TYPES, cut, real
from traces import traced

import memcalc

REJECTED = {
    "cohere_compass_text", "dbrx", "dots1", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "lfm2_moe", "ministral", "musicgen", "musicgen_melody", "nemotron", "qwen4_exp", "qwen4_exp_text",
    "reformer",
}  # fmt: skip
"""What transformers 5.23 does not build from its own default."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [t for t in TYPES if t not in REJECTED])
def test_parameters_are_transformers_own(model_type: str) -> None:
    fields = cut(model_type)
    model = traced(fields)
    expected = [(name, tuple(p.shape), None) for name, p in real(fields).named_parameters()]
    assert model.weights() == expected
    assert model.num_parameters == sum(torch_numel(shape) for _, shape, _ in expected)
    assert 0 < model.active_parameters <= model.num_parameters
    assert sum(model.parameters_by_component().values()) == model.num_parameters


def torch_numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


@pytest.mark.parametrize("model_type", sorted(REJECTED))
def test_what_transformers_rejects_is_one_line(model_type: str) -> None:
    with pytest.raises(memcalc.InputError) as refused:
        traced({"model_type": model_type})
    line = str(refused.value)
    assert line.isprintable()
    assert len(line) < 400
    assert f"cannot build this {model_type}: " in line
