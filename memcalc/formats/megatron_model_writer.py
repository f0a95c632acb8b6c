"""A model as Megatron-LM's arguments: the GPTModel that is built from its architecture.

Source: core_transformer_config_from_args of megatron/training/argument_utils.py, core/transformer/transformer_config.py,
NVIDIA/Megatron-LM at d98e8a64.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from memcalc.families.base.architecture import architecture_of
from memcalc.formats.megatron_vocabulary import padded
from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.families.base.architecture import Architecture, Experts, Latent
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

Flags = dict[str, object]
"""Options and their values; True for a switch, None for one that is left out."""

_ROWS: Final = 128
"""The default of `--make-vocab-size-divisible-by`."""
_GROUPS: Final = ("n_group", "moe_router_num_groups")
_CHOSEN_GROUPS: Final = ("topk_group", "moe_router_group_topk")
_SCALES: Final = ("routed_scaling_factor", "moe_router_topk_scaling_factor")
"""The fields of configurations that an `Architecture` has no numbers of."""


def model_flags(setup: Setup, model: Model) -> Flags:
    """Return the options of the model. Raises InputError for a router that Megatron refuses."""
    a = architecture_of(model.model_type, model.program.config)
    if a.experts is not None:
        _check_router(a.experts, model)
    return {
        **_sizes(a),
        **_layers(a),
        **_ends(a, setup, model),
        **(_latent(a.latent) if a.latent is not None else {}),
        **(_experts(a.experts, a, model) if a.experts is not None else {}),
    }


def _sizes(a: Architecture) -> Flags:
    grouped = a.latent is None and a.kv_heads != a.heads
    derived, rest = divmod(a.hidden, a.heads)
    is_derived = not rest and (a.latent is not None or a.head_dim == derived)  # latents have widths of their own
    return {
        "--num-layers": a.layers,
        "--hidden-size": a.hidden,
        "--num-attention-heads": a.heads,
        "--group-query-attention": grouped or None,
        "--num-query-groups": a.kv_heads if grouped else None,
        "--kv-channels": None if is_derived else a.head_dim,
        "--ffn-hidden-size": a.ffn,
    }


def _layers(a: Architecture) -> Flags:
    """Return what the layers are made of. Megatron's dropouts are 0.1 where none are given."""
    return {
        "--normalization": "RMSNorm" if a.rms_norm else "LayerNorm",
        "--swiglu": a.gated or None,
        "--squared-relu": a.squared_relu or None,
        "--disable-bias-linear": not a.linear_bias or None,
        "--add-qkv-bias": (a.qkv_bias and not a.linear_bias) or None,
        "--qk-layernorm": (a.qk_norm or (a.latent is not None and a.latent.normed)) or None,
        "--hidden-dropout": float(a.hidden_dropout),
        "--attention-dropout": float(a.attention_dropout),
    }


def _ends(a: Architecture, setup: Setup, model: Model) -> Flags:
    """Return the positions, the vocabulary and the head. Megatron wants at least as many positions as a sequence has,
    also where they are no table."""
    length = setup.seq_len or 1
    longest = max(length, model.program.max_seq_len or length)
    return {
        "--position-embedding-type": "rope" if a.positions is None else "learned_absolute",
        "--max-position-embeddings": longest if a.positions is None else a.positions,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": _tokens(a.vocab, _ROWS * setup.tp),
        "--untie-embeddings-and-output-weights": not a.tied or None,
        "--mtp-num-layers": a.mtp or None,
    }


def _tokens(vocabulary: int, multiple: int) -> int:
    """Return the size with which NullTokenizer, which has one token more up to 0.16, makes the same rows of all
    versions."""
    return min(vocabulary, padded(vocabulary, multiple) - 1)


def _latent(latent: Latent) -> Flags:
    return {
        "--multi-latent-attention": True,
        "--q-lora-rank": latent.q_rank,
        "--kv-lora-rank": latent.kv_rank,
        "--qk-head-dim": latent.nope_dim,
        "--qk-pos-emb-head-dim": latent.rope_dim,
        "--v-head-dim": latent.v_dim,
    }


# --- experts


def _experts(e: Experts, a: Architecture, model: Model) -> Flags:
    """Return the options of experts, with the dispatcher and the kernels that are modelled."""
    return {
        "--num-experts": e.count,
        "--moe-layer-freq": _pattern(e.dense, a.layers) if e.dense else None,
        "--moe-ffn-hidden-size": e.ffn,
        "--moe-shared-expert-intermediate-size": e.shared_ffn or None,
        "--moe-shared-expert-gate": e.shared_gate or None,
        "--moe-router-topk": e.per_token,
        "--moe-router-pre-softmax": not e.normalised or None,
        "--moe-router-score-function": "sigmoid" if e.sigmoid else None,
        "--moe-router-enable-expert-bias": e.sigmoid or None,
        "--moe-router-num-groups": _field(model, _GROUPS) if e.grouped else None,
        "--moe-router-group-topk": _field(model, _CHOSEN_GROUPS) if e.grouped else None,
        "--moe-router-topk-scaling-factor": (_field(model, _SCALES) or 1.0) if e.scaled else None,
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-grouped-gemm": True,
        "--moe-permute-fusion": True,
    }


def _pattern(dense: frozenset[int], layers: int) -> str:
    """Return a list with 1 for each layer with experts: "[0]*3+[1]*58"."""
    runs = groupby(int(i not in dense) for i in range(layers))
    return "+".join(f"[{routed}]*{len(list(run))}" for routed, run in runs)


def _field(model: Model, names: tuple[str, ...]) -> object:
    """Return the first of some fields that the model's configuration has; None if it has none of them."""
    given = model.fields or {}
    values = (getattr(model.program.config, name, given.get(name)) for name in names)
    return next((value for value in values if value is not None), None)


def _check_router(experts: Experts, model: Model) -> None:
    if experts.per_token == 1 and experts.normalised and not experts.sigmoid:
        name = model.name or f"this {model.model_type}"
        why = f"Megatron refuses a softmax over the one expert that {name} chooses (moe_router_topk 1)"
        refuse("engine", "megatron", f"{why}; allowed: another engine, or a model with two experts per token")
