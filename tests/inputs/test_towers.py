"""The text tower of a composite configuration is the model that transformers builds from its text_config."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import step_cases

from memcalc import load_model
from memcalc.errors import InputError
from memcalc.families import FAMILIES
from memcalc.inputs.towers import DEFAULT_TEXT_TYPES


@pytest.mark.parametrize("model_type", [t for t in DEFAULT_TEXT_TYPES if DEFAULT_TEXT_TYPES[t] in FAMILIES])
def test_the_type_of_a_tower_without_one_is_transformers_own(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    assert CONFIG_MAPPING[model_type](text_config={}).text_config.model_type == DEFAULT_TEXT_TYPES[model_type]


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "mistral3"])
def test_a_tower_is_the_model_of_its_text_config(model_type: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = step_cases(DEFAULT_TEXT_TYPES[model_type])[0].fields
    fields = {name: value for name, value in fields.items() if name != "model_type"}
    whole: dict[str, Any] = {"model_type": model_type, "text_config": fields, "vision_config": {"hidden_size": 32}}
    ours = load_model(whole)
    config = CONFIG_MAPPING[model_type](text_config=deepcopy(fields)).text_config
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert [(name, shape) for name, shape, _ in ours.weights()] == [
        (name, tuple(p.shape)) for name, p in theirs.named_parameters()
    ]
    assert "text tower" in ours.name
    assert ours.model_type == DEFAULT_TEXT_TYPES[model_type]


def test_a_tower_is_tied_as_the_whole_is() -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100}
    names = [
        [name for name, _, _ in load_model(fields | {"model_type": "llava"}).weights()]
        for fields in (
            {"text_config": text},
            {"text_config": text, "tie_word_embeddings": True},
            {"text_config": text | {"tie_word_embeddings": False}, "tie_word_embeddings": True},
        )
    ]
    assert ["lm_head.weight" in each for each in names] == [True, False, True]


@pytest.mark.parametrize("text", [None, [], "llama", {"model_type": 3}, {"model_type": "llama", "hidden_size": "x"}])
def test_nonsense_in_text_config_is_refused_in_one_line(text: Any) -> None:
    with pytest.raises(InputError) as caught:
        load_model({"model_type": "no_such_type", "text_config": text})
    assert "\n" not in str(caught.value)
