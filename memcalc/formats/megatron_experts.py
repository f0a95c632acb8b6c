"""Experts and latent attention in Megatron-LM's arguments, as the config.json of a model type that has them.

Source: core/transformer/transformer_config.py (TransformerConfig, MLATransformerConfig), moe_freq_type of
megatron/training/arguments.py, core/models/gpt/gpt_layer_specs.py.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Final, cast

from memcalc.formats.megatron_section import Arguments

_COUNT: Final = "--num-experts"
_FREQUENCY: Final = "--moe-layer-freq"
_SHARED: Final = "--moe-shared-expert-intermediate-size"
_GATE: Final = "--moe-shared-expert-gate"
_SCORES: Final = "--moe-router-score-function"
_GROUPS: Final = "--moe-router-num-groups"
_LONGEST: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model."""

    count: int
    per_token: int
    ffn: int
    shared: int
    """The width of the shared experts; 0 without them."""
    gated: bool
    normalised: bool
    """True if the softmax is over the chosen experts only."""
    sigmoid: bool
    groups: int | None
    chosen_groups: int | None
    dense: tuple[int, ...]
    """The layers without experts."""


def experts_of(a: Arguments, layers: int, ffn: int, notes: list[str]) -> Experts | None:
    """Return the experts; None without them. Raises InputError."""
    count = a.whole(_COUNT, 0, 10**6)
    if not count:
        return None
    shared = a.whole(_SHARED, 0, 10**7) or 0
    per_token = a.whole("--moe-router-topk", 1, 10**6) or 2
    if per_token > count:
        a.reject("--moe-router-topk", f"there are {count} experts; allowed: 1 to {count}")
    scores = a.choice(_SCORES, ("softmax", "sigmoid", "sqrtsoftplus")) or "softmax"
    if scores == "sqrtsoftplus":
        notes.append(f"{a.shown(_SCORES)}: counted as sigmoid")
    return Experts(
        count=count,
        per_token=per_token,
        ffn=a.whole("--moe-ffn-hidden-size", 1, 10**7) or ffn,
        shared=shared,
        gated=bool(shared) and a.on(_GATE),
        normalised=not a.on("--moe-router-pre-softmax"),
        sigmoid=scores != "softmax",
        groups=a.whole(_GROUPS, 1, 10**6),
        chosen_groups=a.whole("--moe-router-group-topk", 1, 10**6),
        dense=_dense_layers(a, layers),
    )


def _dense_layers(a: Arguments, layers: int) -> tuple[int, ...]:
    """Return the layers without experts. N is experts in each N-th layer from the first on; a list has 1 for experts."""
    value = a.raw(_FREQUENCY)
    if value is None:
        return ()
    text = str(value).strip(" '\"")
    if "[" not in text:
        every = a.whole(_FREQUENCY, 1, 10**6) or 1
        return tuple(i for i in range(layers) if i % every)
    try:
        pattern = _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        a.refuse(_FREQUENCY, "allowed: a whole number, or lists of 0 and 1 with + and *, such as ([0]*3+[1]*58)")
    if len(pattern) != layers:
        a.refuse(_FREQUENCY, f"it has {len(pattern)} layers; allowed: {layers}")
    return tuple(i for i, routed in enumerate(pattern) if not routed)


def _pattern(node: ast.expr) -> list[int]:
    """Return the list that an expression of lists, + and * is. Raises ValueError for another expression."""
    if isinstance(node, ast.List):
        values = [one.value if isinstance(one, ast.Constant) else None for one in node.elts]
        if not all(value in (0, 1) for value in values):
            raise ValueError("no 0 and 1")
        return [int(cast("int", value)) for value in values]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _short(_pattern(node.left) + _pattern(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        one, other = (node.left, node.right) if isinstance(node.right, ast.Constant) else (node.right, node.left)
        if isinstance(other, ast.Constant) and isinstance(other.value, int) and 0 <= other.value <= _LONGEST:
            return _short(_pattern(one) * int(other.value))
    raise ValueError("another expression")


def _short(pattern: list[int]) -> list[int]:
    if len(pattern) > _LONGEST:
        raise ValueError("too long")
    return pattern


def own_experts(a: Arguments, experts: Experts, layers: int) -> dict[str, Any]:
    """Return the fields of a megatron_gpt's experts."""
    dense = set(experts.dense)
    return {
        "num_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(i not in dense) for i in range(layers)],
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_shared_expert_gate": experts.gated,
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        "moe_router_num_groups": experts.groups,
        "moe_router_topk_scaling_factor": a.number("--moe-router-topk-scaling-factor"),
    }


def routed_type(experts: Experts, *, normed: bool, biased: bool) -> dict[str, Any] | None:
    """Return the type of a model with experts and usual attention; None if there is none."""
    if (experts.shared and (not experts.gated or normed)) or experts.sigmoid:
        return None
    common = {"num_experts_per_tok": experts.per_token}
    if experts.dense == () and not experts.shared and experts.normalised and not normed and not biased:
        width = {"intermediate_size": experts.ffn}  # every layer has experts, so no other width is there
        return {"model_type": "mixtral", "num_local_experts": experts.count, "sliding_window": None, **width, **common}
    common |= {
        "moe_intermediate_size": experts.ffn,
        "norm_topk_prob": experts.normalised,
        "mlp_only_layers": list(experts.dense),
        "decoder_sparse_step": 1,
        "num_experts": experts.count,
    }
    if normed:
        return {"model_type": "qwen3_moe", **common}
    if not experts.shared:  # a qwen2_moe has a gate of shared experts even if it has none
        return None
    return {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": experts.shared,
        "qkv_bias": biased,
        **common,
    }


def check_latent(a: Arguments) -> None:
    """Raise InputError for other layers than those that `--multi-latent-attention` is modelled with."""
    for key in ("--add-qkv-bias", "--group-query-attention"):
        if a.on(key):
            a.reject(key, "is not modelled with --multi-latent-attention; allowed: leave it out")


def latent_dims(a: Arguments) -> dict[str, int | None]:
    """Return the dims of `--multi-latent-attention` under Megatron's names, which a megatron_gpt has too."""
    return {
        "q_lora_rank": a.whole("--q-lora-rank", 1, 10**7),
        "kv_lora_rank": a.whole("--kv-lora-rank", 1, 10**7) or 32,
        "qk_head_dim": a.whole("--qk-head-dim", 1, 10**7) or 128,
        "qk_pos_emb_head_dim": a.whole("--qk-pos-emb-head-dim", 1, 10**7) or 64,
        "v_head_dim": a.whole("--v-head-dim", 1, 10**7) or 128,
    }


def latent_type(a: Arguments, experts: Experts | None, layers: int, ffn: int) -> dict[str, Any] | None:
    """Return DeepSeek-V2 or V3 with the dims of `--multi-latent-attention`; None for other experts than theirs."""
    dims = latent_dims(a)
    names = {"qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim"}
    config: dict[str, Any] = {names.get(name, name): size for name, size in dims.items()}
    if experts is None:  # all layers are those before the first with experts
        return config | {
            "model_type": "deepseek_v2", "first_k_dense_replace": layers, "moe_intermediate_size": ffn,
            "n_routed_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": 0,
        }  # fmt: skip
    if experts.dense != tuple(range(len(experts.dense))) or experts.gated or experts.shared % experts.ffn:
        return None
    return config | _deepseek(experts)


def _deepseek(experts: Experts) -> dict[str, Any]:
    groups, chosen = experts.groups or 1, experts.chosen_groups or 1
    config: dict[str, Any] = {
        "model_type": "deepseek_v3" if experts.sigmoid else "deepseek_v2",
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.ffn,
        "n_shared_experts": experts.shared // experts.ffn,
        "first_k_dense_replace": len(experts.dense),
        "n_group": groups,
        "topk_group": chosen,
    }
    if not experts.sigmoid:
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return config
