"""A small configuration of every model type that DeepSpeed's AutoEP knows."""

from __future__ import annotations

from typing import Any

LAYERS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 300, "num_experts_per_tok": 2}  # fmt: skip
LATENT = {**LAYERS, "intermediate_size": 96, "moe_intermediate_size": 40, "num_key_value_heads": 4,
          "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 8}  # fmt: skip
SHARED = {**LAYERS, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48, "num_experts": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**LAYERS, "intermediate_size": 96, "num_local_experts": 8},
    "qwen2_moe": {**SHARED, "intermediate_size": 96},
    "qwen3_moe": {**LAYERS, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16,
                  "mlp_only_layers": [0], "norm_topk_prob": True},
    "qwen3_5_moe_text": {**SHARED, "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4,
                         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "mlp_bias": True},
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1},
}  # fmt: skip
