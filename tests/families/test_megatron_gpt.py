"""Megatron-LM's GPTModel as a model type: transformers has none to compare it with, so its weights are those of the GPTModel
on paper, which `tests/megatron` compares with the real one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from memcalc import InputError, estimate, load_model
from memcalc.families import FAMILIES, supporting
from memcalc.families.base.architecture import architecture_of
from memcalc.families.base.program import Program
from memcalc.megatron.gpt_model import GPTModel
from memcalc.megatron.layout import Layout

GPT: dict[str, Any] = {
    "model_type": "megatron_gpt", "num_layers": 3, "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 96,
    "vocab_size": 128, "max_position_embeddings": 32,
}  # fmt: skip
LLAMA = {**GPT, "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope"}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_layer_freq": [0, 1, 1]}
SHARED = {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True}
LATENT = {
    "multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
}  # fmt: skip
MODELS = {
    "gpt": GPT,
    "untied-swiglu-biases": {**GPT, "untie_embeddings_and_output_weights": True, "swiglu": True},
    "gqa-qk-norm": {**GPT, "num_query_groups": 2, "kv_channels": 16, "qk_layernorm": True, "add_bias_linear": False},
    "llama-qkv-bias": {**LLAMA, "add_qkv_bias": True},
    "experts": {**LLAMA, **EXPERTS},
    "gelu-experts": {**GPT, "add_bias_linear": False, **EXPERTS, **SHARED, "moe_layer_freq": None},
    "latent": {**LLAMA, **LATENT, **EXPERTS, **SHARED},
    "latent-queries": {**LLAMA, **LATENT, "q_lora_rank": 24},
    "latent-without-norms": {**LLAMA, **LATENT, "q_lora_rank": 24, "qk_layernorm": False},
    "latent-gpt": {**GPT, **LATENT, "q_lora_rank": 24},
    "two-more-tokens": {**LLAMA, "mtp_num_layers": 2},
    "more-tokens-by-experts": {**LLAMA, **EXPERTS, **SHARED, **LATENT, "mtp_num_layers": 1},
    "more-tokens-tied-gpt": {
        **GPT,
        **EXPERTS,
        "add_bias_linear": False,
        "moe_layer_freq": [1, 1, 0],
        "mtp_num_layers": 3,
    },
}


def sizes(program: Program) -> Counter[Any]:
    return Counter((w.name, w.layer, w.component, tuple(d.size for d in w.shape)) for w in program.weights())


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_gpt_models(name: str) -> None:
    model = load_model(MODELS[name])
    a = architecture_of(model.model_type, model.program.config)
    whole = GPTModel(a, Layout(layers=a.layers, routed=a.routed(0, a.layers)))
    assert sizes(model.program) == sizes(whole)
    parts = estimate(model, seq_len=32, precision="bf16-mixed").total("parameters")
    assert parts == 2 * model.num_parameters


def test_it_is_found_and_not_listed() -> None:
    """Lists are of transformers' types."""
    assert "megatron_gpt" in FAMILIES
    assert "megatron_gpt" not in tuple(FAMILIES)
    assert len(FAMILIES) == len(tuple(FAMILIES))
    assert "megatron_gpt" not in supporting(lambda support: support.architecture)


def test_active_parameters_are_those_of_the_chosen_experts() -> None:
    model = load_model(MODELS["experts"])
    of_experts = model.parameters_by_component()["experts"]
    assert model.active_parameters == model.num_parameters - of_experts // 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_attention_heads": 7}, "num_attention_heads 7"),
        ({"num_query_groups": 3}, "num_query_groups 3"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"normalization": "L2Norm"}, "normalization"),
        ({"hidden_dropout": 1}, "hidden_dropout"),
        ({"moe_layer_freq": [2]}, "moe_layer_freq"),
        ({**EXPERTS}, "add_bias_linear false"),
        ({**EXPERTS, "add_bias_linear": False, "moe_router_topk": None}, "moe_router_topk"),
        ({**EXPERTS, "add_bias_linear": False, "moe_router_topk": 5}, "moe_router_topk 5"),
        ({**EXPERTS, "add_bias_linear": False, "moe_layer_freq": [1]}, "moe_layer_freq has 1"),
        ({**EXPERTS, "add_bias_linear": False, "moe_shared_expert_gate": True}, "moe_shared_expert_gate"),
        ({**LATENT, "add_qkv_bias": True}, "multi_latent_attention is modelled without add_qkv_bias"),
        ({**LATENT, "num_query_groups": 2}, "without num_query_groups"),
        ({**LATENT, "v_head_dim": None}, "v_head_dim"),
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as error:
        load_model({**GPT, **fields})
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_of_transformers_is_the_same() -> None:
    """The same layers as gpt2's and llama's have the same bytes."""
    gpt2 = {
        "model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 8, "n_inner": 96, "vocab_size": 128, "n_positions": 32,
    }  # fmt: skip
    llama = {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8,
        "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    for own, other in ((GPT, gpt2), ({**LLAMA, "hidden_dropout": 0.0, "attention_dropout": 0.0}, llama)):
        for options in ({"gpus": 1}, {"gpus": 8, "tp": 2, "zero": 1}, {"gpus": 2, "attention": "eager"}):
            one, two = (estimate(model, engine="megatron", seq_len=32, **options) for model in (own, other))
            assert (one.peak, one.phases) == (two.peak, two.phases)
            assert [c.payload for c in one.collectives] == [c.payload for c in two.collectives]


@pytest.mark.parametrize("options", [{"lora_rank": 4}, {"engine": "fsdp2", "gpus": 2}, {"task": "sft"}])
def test_what_megatron_does_not_run_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"allowed: "):
        estimate(GPT, seq_len=32, **options)
