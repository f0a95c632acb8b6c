"""Each family's configuration: transformers' defaults, its other names, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import paper
import pytest

import memcalc
from memcalc.families import FAMILIES
from memcalc.families.base.stack import pattern_of

TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}


def family_of(model_type: str) -> Any:
    return FAMILIES[model_type].program


DERIVED = {
    "ffn_act_fn", "head_dim", "layer_types", "mlp_layer_types", "mlp_only_layers", "moe_layer_end_index", "moe_layers",
    "no_rope_layers", "num_key_value_heads", "rope_parameters", "sliding_window", "word_embed_proj_dim",
    "attn_config", "attention_types", "hidden_sizes", "num_kv_heads", "ffn_hidden_size",
    "time_step_rank", "mamba_dt_rank", "mamba_d_head", "num_decoder_layers", "attention_multiplier",
    "block_types", "lru_width",
    "attention_hidden_size", "intermediate_size", "layers_block_type", "full_attn_idxs",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
}  # fmt: skip
"""Fields that transformers fills in once it has a configuration; its classes' own defaults are compared for these."""

ELSEWHERE: dict[str, Any] = {
    "rope_theta": 10000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": None,
    "rotary_pct": 0.25,
    "head_dim": None,
    "sliding_window_pattern": 4,
    "full_attention_interval": 4,
}
"""What transformers reads from a config.json although its class has no such field."""

ELSEWHERE_OF: dict[str, dict[str, Any]] = {
    "zamba2": dict.fromkeys(("attention_head_dim", "attention_hidden_size", "hybrid_layer_ids", "mamba_headdim")),
    "modernbert": {"global_attn_every_n_layers": 3},
    "deberta-v2": {
        "attention_head_size": None,
        "conv_act": "tanh",
        "conv_groups": 1,
        "conv_kernel_size": 0,
        "embedding_size": None,
        "norm_rel_ebd": "none",
        "position_buckets": -1,
        "share_att_key": False,
    },
    "axk1": {"first_k_dense_replace": 1, "moe_layer_freq": 1},
    "falcon_mamba": {"intermediate_size": None},
    "mamba": {"intermediate_size": None},
    "t5": dict.fromkeys(("dense_act_fn", "is_gated_act", "scale_decoder_outputs")),
    "dbrx": {"rope_theta": None},
    "minimax_m2": {"rotary_dim": None},
    "nemotron": {"partial_rotary_factor": 0.5},
    "persimmon": {"partial_rotary_factor": 0.5},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"partial_rotary_factor": 1.0},
}
"""The same for one type."""


def holder(theirs: Any, key: str) -> Any:
    """The configuration that has a field: that of the model, or one inside it."""
    inner = [getattr(theirs, name) for name in ("attn_config", "ffn_config") if hasattr(theirs, name)]
    return next((place for place in (theirs, *inner) if hasattr(place, key)), theirs)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_transformers_own(model_type: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type)
    config = family_of(model_type).Config
    other = {name: key for key, name in config.attribute_map.items() if key.startswith("_")}
    for field in fields(config):
        name, key = field.name, other.get(field.name, field.name)
        place = holder(theirs, key)
        if key in ELSEWHERE_OF.get(model_type, {}):
            expected = ELSEWHERE_OF[model_type][key]
        elif key in DERIVED and hasattr(type(place), key):
            expected = getattr(type(place), key)
        elif key in ELSEWHERE:
            expected = ELSEWHERE[key]
        else:
            expected = getattr(place, key)
        assert field.default == expected, name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_other_names_are_transformers_own(model_type: str) -> None:
    from transformers import AutoConfig

    ours = {key: name for key, name in family_of(model_type).Config.attribute_map.items() if not key.startswith("_")}
    assert ours == type(AutoConfig.for_model(model_type)).attribute_map


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama", "hidden_act": "prelu"}, "hidden_act"),
    ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}, "hidden_size 100"),
    ({"model_type": "llama", "num_key_value_heads": 5}, "num_key_value_heads 5"),
    ({"model_type": "llama", "head_dim": 9}, "head_dim 9"),
    ({"model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers"),
    ({"model_type": "llama", "vocab_size": "32000"}, "vocab_size"),
    ({"model_type": "llama", "is_causal": False}, "is_causal False"),
    ({"model_type": "llama", "output_hidden_states": True}, "output_hidden_states True"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "spiral"}}, "'spiral'"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "linear"}}, "'factor'"),
    (
        {"model_type": "llama", "head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "2 rotated dims of a head (head_dim 2)",
    ),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ({"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, "layer_types"),
    ({"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "use_sliding_window"),
    ({"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ({"model_type": "gemma2", "sliding_window": None}, "sliding_window"),
    ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ({"model_type": "gemma", "num_key_value_heads": None}, "num_key_value_heads None"),
    ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window is None"),
    ({"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "spiral"}}}, "'spiral'"),
    ({"model_type": "olmo", "num_key_value_heads": 5}, "num_key_value_heads 5"),
    ({"model_type": "olmo3", "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ({"model_type": "glm", "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
    ({"model_type": "glm4", "head_dim": 10}, "5 rotated dims"),
    ({"model_type": "cohere2", "sliding_window": None}, "sliding_window is None"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
    ({"model_type": "exaone4", "sliding_window": None}, "needs layer_types"),
    ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "'LLLG' needs layer_types"),
    ({"model_type": "helium", "head_dim": 64}, "hidden_size 2560"),
    ({"model_type": "hunyuan_v1_dense"}, "head_dim None"),
    ({"model_type": "nemotron"}, "num_key_value_heads None"),
    ({"model_type": "internlm3", "qkv_bias": True}, "qkv_bias True"),
    ({"model_type": "iquestcoder", "clip_qkv": 8.0}, "clip_qkv 8.0"),
    ({"model_type": "cwm", "num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size 6144"),
    ({"model_type": "ministral"}, "head_dim None"),
    ({"model_type": "ministral", "head_dim": 128, "sliding_window": None}, "sliding_window is None"),
    ({"model_type": "ministral3", "rope_parameters": {"rope_type": "default"}}, "'llama_4_scaling_beta'"),
    (
        {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": 0.1}},
        "'original_max_position_embeddings'",
    ),
    ({"model_type": "vaultgemma", "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ({"model_type": "bitnet", "head_dim": 64}, "hidden_size 2560"),
    ({"model_type": "phi3", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
    (
        {"model_type": "phi3", "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor: 1 factors; they have to be 48 numbers",
    ),
    ({"model_type": "phi3", "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
    ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention True"),
    ({"model_type": "gpt2", "n_head": 7}, "n_head 7"),
    ({"model_type": "gpt2", "n_embd": 64, "hidden_size": 128}, "hidden_size 128"),
    ({"model_type": "gpt_neox", "head_dim": 64}, "head_dim 64"),
    ({"model_type": "gpt_neox", "rotary_pct": 0.0}, "partial_rotary_factor 0.0"),
    ({"model_type": "opt", "layerdrop": 0.1}, "layerdrop 0.1"),
    ({"model_type": "phi", "head_dim": 32, "qk_layernorm": True}, "head_dim 32"),
    ({"model_type": "phi", "partial_rotary_factor": 0.05}, "3 rotated dims"),
    ({"model_type": "stablelm", "num_key_value_heads": 5}, "num_key_value_heads 5"),
    ({"model_type": "persimmon", "num_attention_heads": 7}, "num_attention_heads 7"),
    ({"model_type": "gptj", "rotary_dim": 258}, "rotary_dim 258"),
    ({"model_type": "gptj", "rotary_dim": None}, "rotary_dim None"),
    ({"model_type": "codegen", "n_head": 2}, "n_head 2 is not divisible by 4"),
    ({"model_type": "gpt_neo", "num_layers": 2}, "attention_types name 24 layers"),
    ({"model_type": "gpt_neo", "attention_types": [["global", 24]]}, "attention_types"),
    ({"model_type": "gpt_neo", "attention_types": [[["far"], 24]]}, "allowed: 'global', 'local'"),
    ({"model_type": "mpt", "attn_config": {"attn_pdrop": 1}}, "attn_pdrop 1"),
    ({"model_type": "gpt_bigcode", "add_cross_attention": True}, "add_cross_attention True"),
    ({"model_type": "bloom", "slow_but_exact": True}, "slow_but_exact True"),
    ({"model_type": "bloom", "n_embed": 60}, "hidden_size 60"),
    ({"model_type": "falcon", "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2"),
    ({"model_type": "falcon", "multi_query": False, "num_kv_heads": 8}, "num_kv_heads 8"),
    ({"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn False"),
    ({"model_type": "opt", "dropout": 1.0}, "dropout"),
    ({"model_type": "bert", "add_cross_attention": True}, "add_cross_attention True"),
    ({"model_type": "bert", "chunk_size_feed_forward": 8}, "chunk_size_feed_forward 8"),
    ({"model_type": "roberta", "pad_token_id": 511}, "pad_token_id 511"),
    ({"model_type": "electra", "hidden_size": 130}, "hidden_size 130"),
    ({"model_type": "roc_bert", "concat_input": False}, "concat_input False"),
    ({"model_type": "modernbert", "sparse_prediction": True}, "sparse_prediction True"),
    ({"model_type": "modernbert", "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ({"model_type": "deberta-v2", "attention_head_size": 32}, "attention_head_size 32"),
    ({"model_type": "deberta-v2", "conv_kernel_size": 4}, "conv_kernel_size 4"),
    ({"model_type": "deberta-v2", "relative_attention": True, "position_buckets": 1}, "position_buckets 1"),
    ({"model_type": "deberta-v2", "legacy": False, "embedding_size": 32}, "embedding_size 32"),
    ({"model_type": "deberta-v2", "embedding_size": None}, "embedding_size null"),
    ({"model_type": "deberta-v2", "conv_kernel_size": 3, "conv_groups": 5}, "conv_groups 5"),
    ({"model_type": "t5", "feed_forward_proj": "gated-glu"}, "feed_forward_proj 'gated-glu'"),
    ({"model_type": "t5", "feed_forward_proj": "fast-gelu", "dense_act_fn": "gelu"}, "feed_forward_proj 'fast-gelu'"),
    ({"model_type": "t5", "dense_act_fn": None}, "dense_act_fn null"),
    ({"model_type": "mamba", "intermediate_size": None}, "intermediate_size null"),
    ({"model_type": "t5", "relative_attention_num_buckets": 3}, "relative_attention_num_buckets 3"),
    ({"model_type": "t5", "d_model": 64, "hidden_size": 32}, "d_model 64"),
    ({"model_type": "bart", "decoder_layerdrop": 0.1}, "decoder_layerdrop 0.1"),
    ({"model_type": "bart", "decoder_attention_heads": 7}, "decoder_attention_heads 7"),
    ({"model_type": "whisper", "apply_spec_augment": True}, "apply_spec_augment True"),
    (
        {"model_type": "whisper", "d_model": 45, "encoder_attention_heads": 5, "decoder_attention_heads": 5},
        "d_model 45",
    ),
    ({"model_type": "resnet", "num_labels": 1}, "num_labels"),
    ({"model_type": "resnet", "num_labels": 3, "id2label": {"0": "a", "1": "b"}}, "num_labels 3"),
    ({"model_type": "resnet", "depths": [1, 1]}, "depths has 2 entries"),
    ({"model_type": "resnet", "depths": [1, 1, 1, 1, 1], "hidden_sizes": [4, 4, 4, 4, 3]}, "hidden_sizes 3"),
    ({"model_type": "resnet", "depths": [1] * 7, "hidden_sizes": [8] * 7}, "one pixel"),
    ({"model_type": "resnet", "problem_type": "regression"}, "problem_type 'regression'"),
    ({"model_type": "biogpt", "layerdrop": 0.1}, "layerdrop 0.1"),
    ({"model_type": "xglm", "attention_heads": 7}, "attention_heads 7"),
    ({"model_type": "openai-gpt", "afn": "gelu_new"}, "afn"),
    ({"model_type": "ctrl", "n_embd": 15, "n_head": 5}, "n_embd 15"),
    ({"model_type": "gpt_neox_japanese", "rotary_pct": 0.04}, "3 rotated dims"),
    ({"model_type": "mixtral", "output_router_logits": None}, "output_router_logits null"),
    ({"model_type": "mixtral", "router_jitter_noise": 0.01}, "router_jitter_noise 0.01"),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok 9"),
    ({"model_type": "mixtral", "intermediate_size": 100}, "intermediate_size 100"),
    ({"model_type": "mixtral", "experts_implementation": "eager"}, "experts_implementation 'eager'"),
    ({"model_type": "qwen3_moe", "moe_intermediate_size": 100}, "moe_intermediate_size 100"),
    ({"model_type": "qwen3_moe", "num_experts": 4}, "num_experts_per_tok 8 is above num_local_experts 4"),
    ({"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": None}, "sliding_window"),
    (
        {"model_type": "qwen2_moe", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "use_sliding_window true",
    ),
    ({"model_type": "deepseek_v3", "n_group": 256}, "n_group 256 equal groups of 2"),
    ({"model_type": "deepseek_v3", "topk_group": 9}, "topk_group 9"),
    ({"model_type": "deepseek_v3", "num_key_value_heads": 8}, "num_key_value_heads 8"),
    ({"model_type": "deepseek_v2"}, "num_experts_per_tok None"),
    ({"model_type": "deepseek_v2", "num_experts_per_tok": 6}, "moe_intermediate_size 1407"),
    ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method"),
    (
        {
            "model_type": "deepseek_v2",
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "topk_method": "group_limited_greedy",
        },
        "n_group and topk_group",
    ),
    ({"model_type": "gpt_oss", "sliding_window": None}, "sliding_window"),
    ({"model_type": "glm4_moe"}, "21 rotated dims"),
    ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
    ({"model_type": "glm4_moe_lite", "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"model_type": "olmoe", "hidden_size": 100, "num_attention_heads": 7}, "hidden_size 100"),
    ({"model_type": "granitemoe", "intermediate_size": 100}, "intermediate_size 100"),
    ({"model_type": "granitemoeshared", "shared_intermediate_size": -1}, "shared_intermediate_size"),
    (
        {
            "model_type": "phimoe",
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64},
        },
        "short_mscale",
    ),
    ({"model_type": "ernie4_5_moe", "moe_k": 65}, "moe_k 65 is above moe_num_experts 64"),
    ({"model_type": "hunyuan_v1_moe"}, "head_dim None"),
    ({"model_type": "hunyuan_v1_moe", "head_dim": 128, "moe_topk": [1] * 8}, "moe_topk has 8 entries"),
    (
        {"model_type": "hunyuan_v1_moe", "head_dim": 128, "num_experts": 8, "moe_topk": [1, 2] * 16},
        "moe_topk differs between layers",
    ),
    ({"model_type": "dbrx"}, "clip_qkv of attn_config"),
    ({"model_type": "dbrx", "attn_config": 8}, "attn_config 8"),
    ({"model_type": "dbrx", "hidden_size": 64}, "d_model"),
    (
        {"model_type": "dbrx", "attn_config": {"clip_qkv": 8, "rope_theta": 1e4}, "ffn_config": {"moe_top_k": 5}},
        "moe_top_k 5",
    ),
    ({"model_type": "llama4_text", "attention_chunk_size": None}, "attention_chunk_size"),
    ({"model_type": "llama4_text", "no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
    ({"model_type": "minimax_m2", "router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
    ({"model_type": "minimax_m2", "rotary_dim": 130}, "partial_rotary_factor"),
    ({"model_type": "dots1"}, "n_shared_experts None"),
    ({"model_type": "exaone_moe", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern 'LLLG'"),
    ({"model_type": "axk1", "topk_group": 9}, "topk_group 9"),
    ({"model_type": "hy_v3", "mlp_layer_types": ["wide"]}, "mlp_layer_types"),
    ({"model_type": "afmoe", "num_key_value_heads": 3}, "num_key_value_heads 3"),
    ({"model_type": "solar_open", "head_dim": 7}, "head_dim 7"),
    ({"model_type": "flex_olmo", "num_experts_per_tok": 8}, "num_experts_per_tok 8"),
    ({"model_type": "mamba", "time_step_rank": "8"}, "time_step_rank"),
    ({"model_type": "falcon", "head_dim": 64}, "head_dim"),
    ({"model_type": "jamba", "layer_types": None}, "layer_types"),
    ({"model_type": "qwen3_moe", "head_dim": None}, "head_dim null"),
    ({"model_type": "stablelm", "head_dim": 16}, "head_dim 16"),
    ({"model_type": "llama", "rope_theta": None}, "rope_theta None"),
    ({"model_type": "llama", "rope_parameters": {"rope_type": []}}, "rope_type"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor '2'"),
    ({"model_type": "glm4", "vocab_size": 100}, "pad_token_id 151329"),
    ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": 1.5}}, "full_attention 1.5"),
    ({"model_type": "olmo", "clip_qkv": 8}, "clip_qkv"),
    ({"model_type": "granite", "residual_multiplier": "1"}, "residual_multiplier"),
    ({"model_type": "mamba", "expand": 1.5}, "expand"),
    ({"model_type": "mamba2", "hidden_size": 100}, "hidden_size 100 * expand 2"),
    ({"model_type": "mamba2", "n_groups": 3}, "n_groups 3"),
    ({"model_type": "mamba2", "state_size": 1}, "state_size 1"),
    ({"model_type": "bamba", "mamba_chunk_size": 1}, "mamba_chunk_size 1"),
    ({"model_type": "granitemoehybrid", "mamba_n_heads": 100}, "mamba_n_heads 100"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "'MX'"),
    ({"model_type": "nemotron_h", "n_groups": 3}, "n_groups 3"),
    ({"model_type": "lfm2", "head_dim": None}, "head_dim null"),
    ({"model_type": "granitemoehybrid", "num_experts_per_tok": 0}, "num_experts_per_tok 0"),
    ({"model_type": "lfm2", "layer_types": ["conv"]}, "layer_types has 1 entries"),
    ({"model_type": "lfm2_moe"}, "layer_types None"),
    ({"model_type": "qwen3_5_text", "linear_num_key_heads": 3}, "linear_num_value_heads 32"),
    ({"model_type": "qwen3_5_moe_text", "num_experts": 4}, "num_experts_per_tok 8"),
    ({"model_type": "apertus", "num_key_value_heads": 5}, "num_key_value_heads 5"),
    ({"model_type": "olmo_hybrid", "num_hidden_layers": 1, "layer_types": ["full_attention"]}, "need both"),
    ({"model_type": "rwkv", "num_hidden_layers": 1}, "num_hidden_layers 1"),
    ({"model_type": "qwen3_next", "linear_num_key_heads": 3}, "linear_num_value_heads 32"),
    ({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "layer_types has 1 entries"),
    ({"model_type": "minimax", "num_key_value_heads": None}, "num_key_value_heads None"),
    ({"model_type": "jamba", "attn_layer_offset": 8}, "attn_layer_offset 8"),
    ({"model_type": "jamba", "head_dim": None}, "head_dim null"),
    ({"model_type": "zamba2", "num_hidden_layers": 6}, "layers_block_type has 54 entries"),
    ({"model_type": "zamba2", "mamba_headdim": 64}, "mamba_headdim 64 has to be 640"),
    ({"model_type": "zamba2", "tie_word_embeddings": False}, "tie_word_embeddings false"),
    (
        {"model_type": "zamba2", "use_shared_attention_adapter": True, "num_key_value_heads": 8},
        "use_shared_attention_adapter",
    ),
    ({"model_type": "recurrent_gemma", "lru_width": 2561}, "lru_width 2561"),
    ({"model_type": "recurrent_gemma", "block_types": []}, "block_types has 0 entries"),
    ({"model_type": "recurrent_gemma", "logits_soft_cap": 30}, "logits_soft_cap 30"),
    ({"model_type": "nemotron_h", "tie_word_embeddings": None}, "tie_word_embeddings None"),
    ({"model_type": "bart", "scale_embedding": "x"}, "scale_embedding 'x'"),
    ({"model_type": "dbrx", "ffn_hidden_size": 10752}, "ffn_hidden_size is a field of ffn_config"),
    ({"model_type": "dbrx", "attn_config": {"moe_top_k": 2}, "moe_top_k": 2}, "moe_top_k is a field of ffn_config"),
    ({"model_type": "modernbert", "rope_parameters": {"rope_type": "default"}}, "rope_parameters has 'rope_type'"),
    ({"model_type": "resnet", "layer_types": None}, "layer_types"),
    ({"model_type": "stablelm", "partial_rotary_factor": None}, "partial_rotary_factor None"),
    ({"model_type": "phi3", "original_max_position_embeddings": 1, "rope_scaling": LONGROPE}, "embeddings 1 has a log"),
    ({"model_type": "nemotron_h", "layer_types": None}, "layers_block_type None"),
    ({"model_type": "recurrent_gemma", "head_dim": None}, "head_dim null"),
    ({"model_type": "lfm2", "block_ffn_dim_multiplier": None}, "block_ffn_dim_multiplier None"),
    ({"model_type": "biogpt", "scale_embedding": 1}, "scale_embedding 1"),
    ({"model_type": "recurrent_gemma", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    ({"model_type": "bamba", "z_loss_coefficient": 0.1}, "z_loss_coefficient 0.1"),
    ({"model_type": "bamba", "mamba_d_head": 63}, "mamba_d_head 63"),
    ({"model_type": "falcon_h1", "mamba_n_heads": 100}, "mamba_n_heads 100"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=[f"{f['model_type']}-{n}" for f, n in REFUSED])
def test_what_is_not_modelled_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        paper.program_of(fields, dropout=True)
    message = str(caught.value).replace("field `", "").replace("` is ", " ")
    assert named in message
    assert "\n" not in message


def test_upcast_attention_of_gpt2_is_not_offered() -> None:
    assert paper.program_of({"model_type": "gpt2", "reorder_and_upcast_attn": True}).attention_kinds == ("sdpa",)
    assert paper.program_of({"model_type": "gpt2"}).attention_kinds == ("sdpa", "eager")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model_type": "t5"}, "more than one stack"),
        ({"model_type": "zamba2"}, "share weights"),
        ({"model_type": "bert", "tie_word_embeddings": False}, "no gradient"),
    ],
)
def test_fsdp2_is_refused_where_it_is_not_written_out(fields: dict[str, Any], why: str) -> None:
    assert memcalc.estimate(fields, gpus=2, zero=3, seq_len=16).peak
    with pytest.raises(memcalc.InputError, match=f"--engine fsdp2: .*{why}.*allowed: deepspeed"):
        memcalc.estimate(fields, gpus=2, zero=3, engine="fsdp2", seq_len=16)


def test_recomputing_is_refused_where_transformers_does_not_offer_it() -> None:
    fields = {"model_type": "openai-gpt", "n_layer": 2}
    assert memcalc.estimate(fields, recompute="none").peak
    with pytest.raises(memcalc.InputError, match="--recompute full: transformers does not offer it for openai-gpt"):
        memcalc.estimate(fields, recompute="full")


def test_a_sequence_of_images_is_refused() -> None:
    fields = {"model_type": "resnet"}
    assert memcalc.estimate(fields, micro_batch_size=2).setup.seq_len == 1
    with pytest.raises(memcalc.InputError, match="--seq-len 8: a resnet is trained on images; allowed: leave it out"):
        memcalc.estimate(fields, seq_len=8)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"model_type": "gpt2", "n_positions": 77}, 77),
        ({"model_type": "opt"}, 2048),
        ({"model_type": "llama"}, None),
        ({"model_type": "mpt", "max_seq_len": 77}, 77),
        ({"model_type": "roberta", "max_position_embeddings": 514}, 512),
    ],
)
def test_positions_limit(fields: dict[str, Any], limit: int | None) -> None:
    program = paper.program_of(fields)
    assert program.positions_limit == limit
    assert limit is None or program.max_seq_len == limit


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"model_type": "llama"}, (0, 1)),
        ({"model_type": "gemma2"}, (0, 1)),
        ({"model_type": "qwen2"}, (0, 1)),
        ({"model_type": "qwen2", "use_sliding_window": True}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20}, (20, 1)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, (0, 1)),
        ({"model_type": "qwen3_moe"}, (0, 1)),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, (0, 2)),
        ({"model_type": "deepseek_v3"}, (3, 1)),
        ({"model_type": "llama4_text"}, (0, 4)),
        (TINY | {"model_type": "qwen3", "num_key_value_heads": 4, "layer_types": ["full_attention"] * 4}, None),
    ],
)
def test_pattern(fields: dict[str, Any], pattern: tuple[int, int] | None) -> None:
    assert paper.program_of(fields).pattern() == pattern


@pytest.mark.parametrize(
    ("variants", "pattern"),
    [
        ("aaaaaa", (0, 1)),
        ("aaaaa", None),
        ("abababababab", (0, 2)),
        ("ababababababa", (0, 2)),
        ("babbbbbb", (2, 1)),
        ("aaaaaab", None),
        ("cababababababab", (1, 2)),
        ("aabaabaabaabaabaab", (0, 3)),
        ("", None),
    ],
)
def test_pattern_of(variants: str, pattern: tuple[int, int] | None) -> None:
    assert pattern_of(variants) == pattern
