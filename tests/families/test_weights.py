"""Names, order and shapes of parameters and buffers against transformers' own models on the meta device."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import paper
import pytest
import torch

from memcalc.families import FAMILIES

SPECS = Path(__file__).resolve().parents[2] / "model_specs"

ODD: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "mlp_bias": True},
        {"hidden_size": 48, "num_attention_heads": 6, "attention_bias": True, "tie_word_embeddings": True},
    ],
    "mistral": [{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}],
    "qwen2": [{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": True}],
    "qwen3": [{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": True}],
    "gemma2": [
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": True},
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": False},
    ],
    "phi3": [
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "partial_rotary_factor": 0.75},
        {"hidden_size": 48, "num_attention_heads": 3, "tie_word_embeddings": True}
        | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
    ],
    "gpt2": [
        {"n_embd": 48, "n_head": 6, "n_inner": 50},
        {"hidden_size": 48, "n_head": 3, "tie_word_embeddings": False},
    ],
    "gpt_neox": [
        {"hidden_size": 48, "num_attention_heads": 6, "attention_bias": False, "tie_word_embeddings": True},
        {"hidden_size": 48, "num_attention_heads": 6, "rotary_pct": 0.5},
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ],
    "opt": [
        {"hidden_size": 48, "num_attention_heads": 6, "word_embed_proj_dim": 20, "do_layer_norm_before": False},
        {"hidden_size": 48, "num_attention_heads": 6, "word_embed_proj_dim": 48, "enable_bias": False},
        {"hidden_size": 48, "num_attention_heads": 6, "layer_norm_elementwise_affine": False},
        {"hidden_size": 48, "num_attention_heads": 6, "_remove_final_layer_norm": True, "tie_word_embeddings": False},
    ],
    "mixtral": [
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "num_experts": 5},
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 12, "num_local_experts": 3},
    ],
}
LAYERS = {"gpt2": "n_layer"}
SAMPLE = [
    "llama-3.2-1b", "mistral-7b", "qwen2-0.5b", "qwen3-0.6b", "gemma-2-2b", "phi-3-mini", "phi-4", "gpt2", "pythia-70m",
    "gpt-neox-20b", "opt-350m", "opt-6.7b", "mixtral-8x7b",
]  # fmt: skip


def configs() -> list[Any]:
    params = [pytest.param({"model_type": family}, id=f"{family}-default") for family in FAMILIES]
    for family, odd in ODD.items():
        layers = LAYERS.get(family, "num_hidden_layers")
        params += [
            pytest.param(
                {"model_type": family, "vocab_size": 90, "pad_token_id": 0, layers: 2} | fields, id=f"{family}-{i}"
            )
            for i, fields in enumerate(odd)
        ]
    for name in SAMPLE:
        path = SPECS / f"{name}.json"
        if path.exists():
            params.append(pytest.param(json.loads(path.read_text(encoding="utf-8"))["config"], id=name))
    return params


def meta_model(fields: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    kept = deepcopy(fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kept.pop("model_type"), **kept))


def with_layers(program: Any) -> list[tuple[str, list[int]]]:
    """The program's weights with each layered one in its place, as `named_parameters` runs through the layers."""
    weights = list(program.weights())
    layered = [weight for weight in weights if weight.layered]
    first = weights.index(layered[0])
    named = [(w.name, [d.size for d in w.shape]) for w in weights[:first]]
    for i in range(program.layers):
        named += [(w.name.replace("*", str(i)), [d.size for d in w.shape]) for w in layered]
    return named + [(w.name, [d.size for d in w.shape]) for w in weights[first + len(layered) :]]


@pytest.mark.parametrize("fields", configs())
def test_weights_and_buffers_are_transformers_own(fields: dict[str, Any]) -> None:
    model = meta_model(fields)
    program = paper.program_of(fields)
    assert with_layers(program) == [(name, list(p.shape)) for name, p in model.named_parameters()]
    buffers = [(b.name, [d.size for d in b.shape]) for b in program.buffers() if b.registered]
    assert buffers == [(name, list(b.shape)) for name, b in model.named_buffers()]


def test_the_sample_is_there() -> None:
    assert [name for name in SAMPLE if not (SPECS / f"{name}.json").exists()] == []
