"""A model with another number of layers."""

from __future__ import annotations

from typing import Any

import pytest
from command import LLAMA

import memcalc
from memcalc.decisions.depth import with_layers
from memcalc.errors import InputError


@pytest.mark.parametrize("name", ["llama-7b", "gpt2", "mixtral-8x7b", "qwen3-0.6b", "bert-base", "pythia-1b"])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_only_the_depth_differs(name: str, count: int) -> None:
    model = memcalc.load_model(name)
    other = with_layers(model, count)
    assert other.layers == count
    per_layer = (model.num_parameters - with_layers(model, 1).num_parameters) // (model.layers - 1)
    assert other.num_parameters == model.num_parameters + (count - model.layers) * per_layer
    assert other.name == model.name
    assert with_layers(model, model.layers).weights() == model.weights()


def test_a_configuration_that_leaves_its_depth_out() -> None:
    fields = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}
    assert with_layers(memcalc.load_model(fields), 3).num_parameters == memcalc.load_model(LLAMA).num_parameters


def test_a_list_with_an_entry_for_each_layer_is_cut() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = memcalc.load_model(
        {**LLAMA, "model_type": "qwen2", "layer_types": kinds, "use_sliding_window": True, "sliding_window": 64}
    )
    assert with_layers(model, 2).layers == 2
    with pytest.raises(InputError, match="layer_types"):
        with_layers(model, 4)


@pytest.mark.parametrize(("model", "words"), [("t5-small", "two stacks"), ("resnet-50", "no field")])
def test_a_model_without_one_number_of_layers(model: Any, words: str) -> None:
    with pytest.raises(InputError, match=rf"^--solve layers: .*{words}.*; allowed: "):
        with_layers(memcalc.load_model(model), 3)
