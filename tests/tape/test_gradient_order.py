"""The order in which backward has the gradients ready, against torch's own engine: buckets are filled in it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import auto_class, model_types, step_cases

import memcalc
from memcalc.tape.profile import gradients_in_order

OFTEN = ("gpt2", "llama", "qwen2")
"""The types of a default run: with transformers' Conv1D, without biases, with some."""
TYPES = [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in model_types() if step_cases(name)
]


def batch_of(model_type: str, config: Any) -> dict[str, Any]:
    """A batch of 16 tokens, or of what else the type takes."""
    import torch

    if model_type == "resnet":
        image = torch.randn(2, config.num_channels, 64, 64)
        return {"pixel_values": image, "labels": torch.zeros(2, dtype=torch.int64)}
    if model_type == "whisper":
        sound = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": sound, "labels": torch.zeros(1, 8, dtype=torch.int64)}
    ids = torch.randint(0, config.vocab_size, (1, 16))
    return {"input_ids": ids, "labels": ids}


def torchs_order(fields: dict[str, Any]) -> list[str]:
    """The names of the parameters as their gradients come, for a model of transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    model_type = fields["model_type"]
    own = {name: value for name, value in fields.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(model_type, **own)
    model = getattr(transformers, auto_class(fields)).from_config(config).train()
    order: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(**batch_of(model_type, config)).loss.backward()
    return order


@pytest.mark.parametrize("model_type", TYPES)
def test_gradients_come_in_torchs_order(model_type: str) -> None:
    fields = step_cases(model_type)[0].fields
    ours = [name for name, _ in gradients_in_order(memcalc.load_model(fields).program)]
    assert [without_numbers(name) for name in ours] == [without_numbers(name) for name in torchs_order(fields)]


def without_numbers(name: str) -> str:
    """A name without the numbers of layers, experts and the like."""
    return re.sub(r"\.(\d+|\*)(?=\.)", ".*", name)
