"""Mutated configurations: memcalc agrees with transformers about the parameters, or refuses in one line."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import step_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc import load_model
from memcalc.errors import InputError

NONSENSE = ("x", "", [], [1], {}, {"a": 1}, True, False, None, -1, 0, 1, 1.5, 3, 7, float("inf"), 10**9, "8")


def mutations(name: str, value: Any) -> st.SearchStrategy[dict[str, Any] | None]:
    """What becomes of a field: dropped, null, another type, negated, larger, nested, or one more or less."""
    choices: list[Any] = [*NONSENSE, {name: value}, [value], str(value)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        choices += [-value, value + 1, value - 1, 2 * value, 3 * value, value / 2, float(value)]
    return st.one_of(st.none(), st.sampled_from(choices).map(lambda v: {name: v}))


@st.composite
def mutated(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A valid configuration with one to three fields changed; fields of other families among them."""
    case = draw(st.sampled_from(step_cases(family)))
    fields = deepcopy(case.fields)
    more = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "hidden_act": "relu",
        "rope_scaling": None,
    }
    names = sorted({*fields, *more} - {"model_type"})
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        change = draw(mutations(name, fields.get(name, more.get(name))))
        fields.pop(name, None)
        fields |= change or {}
    return fields


def transformers_parameters(fields: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]] | Exception:
    """Names and shapes as transformers builds them, or what it raises."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kept = deepcopy(fields)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kept.pop("model_type"), **kept))
    except Exception as error:
        return error
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


FUZZED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gpt2", "gpt_neox", "opt", "mixtral")


@pytest.mark.parametrize("family", FUZZED)
def test_a_mutated_configuration_is_agreed_on_or_refused(family: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(fields=mutated(family))
    def check(fields: dict[str, Any]) -> None:
        try:
            model = load_model(fields)
        except InputError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 600
            return
        theirs = transformers_parameters(fields)
        assert not isinstance(theirs, Exception), f"memcalc answers where transformers raises {theirs!r}"
        assert [(name, shape) for name, shape, _ in model.weights()] == theirs

    check()
