"""transformers' tensor-parallel plans (`model.tp_plan`): which module is split how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Style = Literal[
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "colwise_gather_input",
    "packed_colwise",
    "rowwise_split_input",
    "mla_kv_a_proj",
    "moe_tp_experts",
]
Plan = dict[str, Style]

_ENDS: Final[Plan] = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
_ATTENTION: Final[Plan] = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
_NORMED_HEADS: Final[Plan] = {
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
}
_GATHERED_ATTENTION: Final[Plan] = {
    "model.layers.*.self_attn.q_proj": "colwise_gather_output",
    "model.layers.*.self_attn.k_proj": "colwise_gather_output",
    "model.layers.*.self_attn.v_proj": "colwise_gather_output",
    "model.layers.*.self_attn.o_proj": "rowwise_split_input",
}
_MLP: Final[Plan] = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
_GATED_MLP: Final[Plan] = {"model.layers.*.mlp.gate_proj": "colwise", **_MLP}
_JOINED_MLP: Final[Plan] = {
    "model.layers.*.mlp.gate_up_proj": "colwise_gather_output",
    "model.layers.*.mlp.down_proj": "rowwise_split_input",
}
_LLAMA: Final[Plan] = {**_ENDS, **_ATTENTION, **_GATED_MLP}
_GLM: Final[Plan] = {**_ENDS, **_ATTENTION, **_JOINED_MLP}
_OLMO2: Final[Plan] = {**_ENDS, **_GATHERED_ATTENTION, **_GATED_MLP}

_UNGATED: Final[Plan] = {**_ENDS, **_ATTENTION, **_MLP}
_FC1: Final = "model.layers.*.mlp.fc1"
_FC2: Final = "model.layers.*.mlp.fc2"

_SHARED_EXPERTS: Final[Plan] = {
    "model.layers.*.mlp.shared_experts.gate_proj": "colwise",
    "model.layers.*.mlp.shared_experts.up_proj": "colwise",
    "model.layers.*.mlp.shared_experts.down_proj": "rowwise",
}


def _experts(path: str) -> Plan:
    """Every rank has a part of the width of every routed expert in the module at `path`."""
    plan: Plan = {f"{path}.gate_up_proj": "packed_colwise", f"{path}.down_proj": "rowwise", path: "moe_tp_experts"}
    return plan


_EXPERTS: Final = _experts("model.layers.*.mlp.experts")
_ONLY_EXPERTS: Final[Plan] = {**_ENDS, **_EXPERTS}
_LATENT: Final[Plan] = {**_ENDS, **_GATED_MLP, **_EXPERTS, **_SHARED_EXPERTS}
"""Attention through latents stays whole."""
_GRANITE_MOE: Final[Plan] = {**_ENDS, **_experts("model.layers.*.block_sparse_moe.experts")}
_SPLIT_LATENT: Final[Plan] = {
    **_ENDS,
    "model.layers.*.self_attn.q_b_proj": "colwise",
    "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    **_GATED_MLP,
    **_EXPERTS,
}
_LINEAR_OUT: Final = "model.layers.*.linear_attn.out_proj"
_QWEN3_HYBRID: Final[Plan] = {
    **_ENDS,
    **_ATTENTION,
    **_NORMED_HEADS,
    **_EXPERTS,
    "model.layers.*.mlp.shared_expert.gate_proj": "colwise",
    "model.layers.*.mlp.shared_expert.up_proj": "colwise",
    "model.layers.*.mlp.shared_expert.down_proj": "rowwise",
    _LINEAR_OUT: "colwise_gather_output",
}
_PROJECTED_APART: Final[Plan] = {
    "model.layers.*.linear_attn.in_proj_qkv": "colwise_gather_output",
    "model.layers.*.linear_attn.in_proj_z": "colwise_gather_output",
    "model.layers.*.linear_attn.in_proj_b": "colwise_gather_output",
    "model.layers.*.linear_attn.in_proj_a": "colwise_gather_output",
}
_FEED_FORWARD: Final[Plan] = {**_ENDS, **_experts("model.layers.*.feed_forward.experts")}

PLANS: Final[Mapping[str, Plan]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_NORMED_HEADS},
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3_text": {**_LLAMA, **_NORMED_HEADS},
    "vaultgemma": _LLAMA,
    "olmo": _LLAMA,
    "granite": _LLAMA,
    "cohere": _LLAMA,
    "cohere2": _LLAMA,
    "smollm3": _LLAMA,
    "ernie4_5": _LLAMA,
    "seed_oss": _LLAMA,
    "cwm": _LLAMA,
    "hyperclovax": _LLAMA,
    "ministral": _LLAMA,
    "ministral3": _LLAMA,
    "internlm3": _LLAMA,
    "iquestcoder": _LLAMA,
    "exaone4": {**_LLAMA, **_NORMED_HEADS},
    "nemotron": _UNGATED,
    "arcee": _UNGATED,
    "jais2": _UNGATED,
    "apertus": {**_UNGATED, **_NORMED_HEADS},
    "nanochat": {**_ENDS, **_ATTENTION, _FC1: "colwise", _FC2: "rowwise"},
    "starcoder2": {
        **_ENDS,
        **_ATTENTION,
        "model.layers.*.mlp.c_fc": "colwise",
        "model.layers.*.mlp.c_proj": "rowwise",
    },
    "phi": {
        **_ENDS,
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.dense": "rowwise",
        _FC1: "colwise",
        _FC2: "rowwise",
    },
    "phi3": {
        **_ENDS,
        "model.layers.*.self_attn.qkv_proj": "colwise_gather_output",
        "model.layers.*.self_attn.o_proj": "rowwise_split_input",
        **_JOINED_MLP,
    },
    "glm": _GLM,
    "glm4": _GLM,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmo_hybrid": _OLMO2,
    "helium": _LLAMA,
    "mixtral": {**_ENDS, **_ATTENTION, **_EXPERTS},
    "qwen2_moe": {**_LLAMA, **_EXPERTS},
    "qwen3_moe": {**_LLAMA, **_NORMED_HEADS, **_EXPERTS},
    "glm4_moe": {**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS},
    "dots1": {**_LLAMA, **_NORMED_HEADS, **_EXPERTS, **_SHARED_EXPERTS},
    "hy_v3": {**_LLAMA, **_NORMED_HEADS, **_EXPERTS, **_SHARED_EXPERTS},
    "exaone_moe": {**_LLAMA, **_NORMED_HEADS, **_EXPERTS},
    "solar_open": {**_ENDS, **_ATTENTION, **_EXPERTS},
    "deepseek_v3": _LATENT,
    "axk1": _LATENT,
    "glm4_moe_lite": _SPLIT_LATENT,
    "deepseek_v2": {**_SPLIT_LATENT, "model.layers.*.self_attn.q_proj": "colwise", **_SHARED_EXPERTS},
    "olmoe": {**_ENDS, **_GATHERED_ATTENTION, **_EXPERTS},
    "flex_olmo": {**_ENDS, **_GATHERED_ATTENTION, **_EXPERTS},
    "minimax_m2": {**_ENDS, **_GATHERED_ATTENTION, **_EXPERTS},
    "gpt_oss": {"lm_head": "colwise_gather_output"},
    "qwen3_next": {
        **_QWEN3_HYBRID,
        **_GATED_MLP,
        "model.layers.*.linear_attn.in_proj_qkvz": "colwise_gather_output",
        "model.layers.*.linear_attn.in_proj_ba": "colwise_gather_output",
    },
    "qwen3_5_text": {**_LLAMA, **_NORMED_HEADS, **_PROJECTED_APART, _LINEAR_OUT: "colwise_gather_output"},
    "qwen3_5_moe_text": {**_QWEN3_HYBRID, **_PROJECTED_APART},
    "nemotron_h": {
        "model.embeddings": "embedding_rowwise",
        "model.layers.*.mixer.experts.up_proj": "colwise",
        "model.layers.*.mixer.experts.down_proj": "rowwise",
        "model.layers.*.mixer.experts": "moe_tp_experts",
    },
    "hunyuan_v1_moe": _ONLY_EXPERTS,
    "phimoe": _ONLY_EXPERTS,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoehybrid": _GRANITE_MOE,
    "jamba": _FEED_FORWARD,
    "lfm2_moe": _FEED_FORWARD,
}
"""Each model type's plan, as transformers' `model.tp_plan` has it."""

WITHOUT: Final = (
    "gpt2", "stablelm", "persimmon", "gptj", "codegen", "gpt_neo", "mpt", "gpt_bigcode", "bloom", "falcon", "opt", "bitnet",
    "bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "roc_bert", "biogpt",
    "xglm", "openai-gpt", "ctrl", "gpt_neox_japanese", "rwkv", "mamba", "mamba2", "zamba2", "recurrent_gemma", "falcon_mamba",
    "modernbert", "deberta-v2", "t5", "bart", "whisper", "resnet",
)  # fmt: skip
"""Model types that transformers splits nothing of: its `model.tp_plan` is empty."""

NOT_RUN: Final[Mapping[str, str]] = {
    "cohere": "use_qk_norm", "olmo": "clip_qkv", "olmoe": "clip_qkv", "flex_olmo": "clip_qkv",
}  # fmt: skip
"""Fields with which transformers' own step fails: norms of all heads are not split; DTensors are not clamped in place."""

FAILS: Final[Mapping[str, str]] = {"llama4_text": "changes a DTensor's local view in place, which autograd refuses"}
"""Model types whose own step transformers' plan breaks, and what it does."""
