"""The block that DeepSpeed's AutoEP puts in the place of transformers' own: its weights, and what is modelled of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from auto_ep_cases import CONFIGS
from meta_models import Built, shapes_of
from oracle import build
from records import on_record

import memcalc
from memcalc.families import FAMILIES, support_of, supporting
from memcalc.inputs.model import Model
from memcalc.layout.auto_ep import on_rank
from memcalc.validate.auto_ep import auto_ep_of_a_gpu

PRESETS = {name: support_of(name).auto_ep for name in supporting(lambda s: s.auto_ep is not None)}


@on_record
def of_auto_ep(config: dict[str, Any]) -> Built:
    """The model on a rank that has half of the experts."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig

    with auto_ep_of_a_gpu():
        model = build(config, "sdpa", torch.float32)
        auto_ep = AutoEP(model, AutoEPConfig(enabled=True, autoep_size=2))
        auto_ep.replace_moe_layers(auto_ep.ep_parser(), ep_size=2, ep_rank=0)
    return shapes_of(model)


@pytest.mark.parametrize("model_type", sorted(PRESETS))
def test_weights_and_buffers_are_those_of_auto_ep(model_type: str) -> None:
    """Names, shapes and their order on a rank that has half of the experts."""
    config = {"model_type": model_type, **CONFIGS[model_type]}
    real = of_auto_ep(config)
    own = memcalc.load_model(config)
    rank = on_rank(own.program, model_type, 2, 1.0)
    named = [(w.name.replace("*", str(w.layer), 1), tuple(d.size for d in w.shape)) for w in rank.weights()]
    assert named == real.parameters
    buffers = {b.full_name: tuple(d.size for d in b.shape) for b in rank.buffers() if b.registered}
    assert buffers == dict(real.buffers)


@pytest.mark.live
def test_the_presets_are_those_of_deepspeed() -> None:
    """Every model type of its registry that has a program here."""
    from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS

    known = {name for preset in PRESET_MODELS.values() for name in preset.hf_model_types}
    assert set(PRESETS) == known & set(FAMILIES)
    for preset in PRESET_MODELS.values():
        for name in set(preset.hf_model_types) & set(FAMILIES):
            assert PRESETS[name].sigmoid == (preset.score_func == "sigmoid")
            assert (preset.score_apply, preset.expert_activation, preset.gate_bias) == ("post", "swiglu", False)


@pytest.mark.parametrize("model_type", sorted(PRESETS))
def test_ranks_have_equal_parts_of_the_experts(model_type: str) -> None:
    model = memcalc.load_model({"model_type": model_type, **CONFIGS[model_type]})

    def sizes(ranks: int) -> tuple[int, int]:
        """Of the experts, and of all else."""
        rank = Model("", model_type, on_rank(model.program, model_type, ranks, 1.0))
        by = rank.parameters_by_component()
        return by.pop("experts"), sum(by.values())

    assert sum(sizes(1)) == model.num_parameters
    for ranks in (2, 4, 8):
        assert sizes(ranks) == (sizes(1)[0] // ranks, sizes(1)[1])


def test_one_profile_serves_all_lengths_of_a_remainder() -> None:
    """Padding depends on the rows modulo 8: what an earlier estimate of a model has kept changes nothing."""
    config = {"model_type": "mixtral", **CONFIGS["mixtral"]}
    model = memcalc.load_model(config)
    how: dict[str, Any] = {"gpus": 4, "ep": 2, "engine": "deepspeed", "micro_batch_size": 2}
    for seq in (16, 17, 18, 19, 40, 41):
        fresh = memcalc.estimate(config, seq_len=seq, **how)
        assert memcalc.estimate(model, seq_len=seq, **how).phases == fresh.phases
