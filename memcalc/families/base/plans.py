"""The parts of transformers' tensor-parallel plans (`model.tp_plan`): the way in which each module is split."""

from __future__ import annotations

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

ENDS: Final[Plan] = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
ATTENTION: Final[Plan] = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
NORMED_HEADS: Final[Plan] = {
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
}
GATHERED_ATTENTION: Final[Plan] = {
    "model.layers.*.self_attn.q_proj": "colwise_gather_output",
    "model.layers.*.self_attn.k_proj": "colwise_gather_output",
    "model.layers.*.self_attn.v_proj": "colwise_gather_output",
    "model.layers.*.self_attn.o_proj": "rowwise_split_input",
}
MLP: Final[Plan] = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
GATED_MLP: Final[Plan] = {"model.layers.*.mlp.gate_proj": "colwise", **MLP}
JOINED_MLP: Final[Plan] = {
    "model.layers.*.mlp.gate_up_proj": "colwise_gather_output",
    "model.layers.*.mlp.down_proj": "rowwise_split_input",
}
LLAMA: Final[Plan] = {**ENDS, **ATTENTION, **GATED_MLP}
GLM: Final[Plan] = {**ENDS, **ATTENTION, **JOINED_MLP}
OLMO2: Final[Plan] = {**ENDS, **GATHERED_ATTENTION, **GATED_MLP}

UNGATED: Final[Plan] = {**ENDS, **ATTENTION, **MLP}
FC1: Final = "model.layers.*.mlp.fc1"
FC2: Final = "model.layers.*.mlp.fc2"

SHARED_EXPERTS: Final[Plan] = {
    "model.layers.*.mlp.shared_experts.gate_proj": "colwise",
    "model.layers.*.mlp.shared_experts.up_proj": "colwise",
    "model.layers.*.mlp.shared_experts.down_proj": "rowwise",
}


def _experts(path: str) -> Plan:
    """Return the plan for routed experts in the module at `path`: every rank has a part of the width of every
    expert."""
    plan: Plan = {f"{path}.gate_up_proj": "packed_colwise", f"{path}.down_proj": "rowwise", path: "moe_tp_experts"}
    return plan


EXPERTS: Final = _experts("model.layers.*.mlp.experts")
ONLY_EXPERTS: Final[Plan] = {**ENDS, **EXPERTS}
LATENT: Final[Plan] = {**ENDS, **GATED_MLP, **EXPERTS, **SHARED_EXPERTS}
"""A plan in which attention through latents stays whole."""
GRANITE_MOE: Final[Plan] = {**ENDS, **_experts("model.layers.*.block_sparse_moe.experts")}
SPLIT_LATENT: Final[Plan] = {
    **ENDS,
    "model.layers.*.self_attn.q_b_proj": "colwise",
    "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    **GATED_MLP,
    **EXPERTS,
}
LINEAR_OUT: Final = "model.layers.*.linear_attn.out_proj"
QWEN3_HYBRID: Final[Plan] = {
    **ENDS,
    **ATTENTION,
    **NORMED_HEADS,
    **EXPERTS,
    "model.layers.*.mlp.shared_expert.gate_proj": "colwise",
    "model.layers.*.mlp.shared_expert.up_proj": "colwise",
    "model.layers.*.mlp.shared_expert.down_proj": "rowwise",
    LINEAR_OUT: "colwise_gather_output",
}
PROJECTED_APART: Final[Plan] = {
    "model.layers.*.linear_attn.in_proj_qkv": "colwise_gather_output",
    "model.layers.*.linear_attn.in_proj_z": "colwise_gather_output",
    "model.layers.*.linear_attn.in_proj_b": "colwise_gather_output",
    "model.layers.*.linear_attn.in_proj_a": "colwise_gather_output",
}
FEED_FORWARD: Final[Plan] = {**ENDS, **_experts("model.layers.*.feed_forward.experts")}
