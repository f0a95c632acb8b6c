"""accelerate's table against accelerate's own functions on the same configuration."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import step_cases

import memcalc
from memcalc.families import FAMILIES
from memcalc.inference.dtype_table import _NO_BASE, Line, dtype_table

OWN = [family for family in FAMILIES if family not in _NO_BASE]
ACCELERATE = {"fp32": "float32", "fp16": "float16", "int8": "int8", "int4": "int4"}


def of_accelerate(fields: dict[str, Any]) -> dict[str, tuple[float, float, float | None]]:
    """The data of `accelerate estimate-memory`, whose model comes from a configuration and not from the Hub."""
    import transformers

    pytest.importorskip("accelerate")
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    kept = deepcopy(fields)
    config = transformers.AutoConfig.for_model(kept.pop("model_type"), **kept)
    with init_empty_weights():
        model = transformers.AutoModel.from_config(config, dtype=torch.float32)
    total, (largest, _) = calculate_maximum_sizes(model)
    out: dict[str, tuple[float, float, float | None]] = {}
    for ours, theirs in ACCELERATE.items():
        share = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}[theirs]
        usage = max(estimate_training_usage(total, theirs).values())
        out[ours] = largest / share, total / share, None if usage == -1 else usage
    return out


def lines(model: Any) -> dict[str, Line]:
    return {line.dtype: line for line in dtype_table(memcalc.load_model(model))}


def check(family: str) -> None:
    fields = step_cases(family)[0].fields
    ours, theirs = lines(fields), of_accelerate(fields)
    assert {name: tuple(ours[name].accelerate or ()) for name in theirs} == theirs


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "t5", "opt", "gpt_neo", "qwen3_next", "ctrl"])
def test_the_numbers_of_accelerate(family: str) -> None:
    check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
def test_the_numbers_of_accelerate_of_every_family(family: str) -> None:
    check(family)


def test_the_exact_numbers_have_the_head_and_the_scales() -> None:
    of = lines("llama-7b")
    model = memcalc.load_model("llama-7b")
    assert {name: line.exact.total for name, line in of.items() if line.exact} | {"int8": 0, "int4": 0} == {
        "fp32": 4 * model.num_parameters, "fp16": 2 * model.num_parameters, "bf16": 2 * model.num_parameters,
        "int8": 0, "int4": 0,
    }  # fmt: skip
    for name in ("int8", "int4"):
        exact, said = of[name].exact, of[name].accelerate
        assert exact is not None and said is not None
        assert exact.total > said.total and exact.training is None and said.training is None


def test_models_whose_automodel_is_another_one() -> None:
    bert = lines("bert-base")
    assert bert["fp32"].accelerate is None and bert["fp32"].exact is not None
    mamba = lines("mamba-130m")
    assert mamba["int4"].exact is None and mamba["int4"].accelerate is not None
