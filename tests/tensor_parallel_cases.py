"""Small models whose parts are equal on two or four tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from cases import DROPOUTS, step_cases

from memcalc.families import support_of

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
_EXPERTS = {"moe_intermediate_size": 32}
_LATENT = {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
"""Keys as wide as values: of others the CPU has no fused kernel."""


def config_of(model_type: str) -> dict[str, Any]:
    """A family's first case with such sizes, without dropout and without what transformers cannot split."""
    fields = step_cases(model_type)[0].fields
    own: dict[str, Any] = dict.fromkeys(DROPOUTS, 0.0) | _SIZES
    without = support_of(model_type).tensor_parallel_without
    if without is not None:
        own[without] = None
    if "head_dim" in fields:
        own["head_dim"] = 16
    own |= {name: size for name, size in _EXPERTS.items() if name in fields}
    return fields | own | (_LATENT if "kv_lora_rank" in fields else {})
