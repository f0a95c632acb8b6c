"""Mutated configurations: memcalc agrees with transformers about the parameters, or refuses in one line."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from cases import auto_class, step_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc import load_model
from memcalc.errors import InputError
from memcalc.families import FAMILIES

NONSENSE = ("x", "", [], [1], {}, {"a": 1}, True, False, None, -1, 0, 1, 1.5, 3, 7, float("inf"), 10**9, "8")


def mutations(name: str, value: Any) -> st.SearchStrategy[dict[str, Any] | None]:
    """What becomes of a field: dropped, null, another type, negated, larger, nested, or one more or less."""
    choices: list[Any] = [*NONSENSE, {name: value}, [value], str(value)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        choices += [-value, value + 1, value - 1, 2 * value, 3 * value, value / 2, float(value)]
    return st.one_of(st.none(), st.sampled_from(choices).map(lambda v: {name: v}))


FIELDS_OF_OTHERS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "hidden_act": "relu",
    "attention_bias": True,
    "layer_types": None,
    "pad_token_id": 0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
}


def own_fields(family: str) -> dict[str, Any]:
    """What the family's configuration reads, with its defaults."""
    config = FAMILIES[family].program.Config
    return {field.name: None if field.default is MISSING else field.default for field in fields(config)}


@st.composite
def mutated(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A valid configuration with one or two fields changed, or a field of an object in it; other families' among them."""
    given = deepcopy(draw(st.sampled_from(step_cases(family))).fields)
    known = {**FIELDS_OF_OTHERS, **own_fields(family), **given}
    names = sorted(known.keys() - {"model_type"})
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        value = given.pop(name, known[name])
        if isinstance(value, dict) and value and draw(st.booleans()):
            inner = draw(st.sampled_from(sorted(value)))
            rest = {key: deepcopy(kept) for key, kept in value.items() if key != inner}
            given[name] = rest | (draw(mutations(inner, value[inner])) or {})
        else:
            given |= draw(mutations(name, value)) or {}
    return given


def transformers_parameters(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]] | Exception:
    """Names and shapes as transformers builds them, or what it raises."""
    import transformers

    kept = deepcopy(config)
    auto = getattr(transformers, auto_class(kept))
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = auto.from_config(transformers.AutoConfig.for_model(kept.pop("model_type"), **kept))
    except Exception as error:
        return error
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mutated_configuration_is_agreed_on_or_refused(family: str) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(config=mutated(family))
    def check(config: dict[str, Any]) -> None:
        try:
            model = load_model(config)
        except InputError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 600
            return
        theirs = transformers_parameters(config)
        assert not isinstance(theirs, Exception), f"memcalc answers where transformers raises {theirs!r}"
        assert [(name, shape) for name, shape, _ in model.weights()] == theirs

    check()
