"""The sizes that GPTModel is built from (megatron/core/transformer/transformer_config.py), read from a model's
configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memcalc.families import support_of


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts that replace a layer's MLP (megatron/core/transformer/moe)."""

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    """The option `--moe-shared-expert-intermediate-size`; 0 without shared experts."""
    shared_gate: bool = False
    normalised: bool = True
    """True if the softmax is over the chosen experts only (without `--moe-router-pre-softmax`)."""
    sigmoid: bool = False
    """True for `--moe-router-score-function sigmoid`, with a bias that balances the experts."""
    grouped: bool = False
    """True if a few groups of experts are chosen first."""
    scaled: bool = False
    """True with `--moe-router-topk-scaling-factor`."""
    dense: frozenset[int] = frozenset()
    """The layers that have an MLP (`--moe-layer-freq`)."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The dims of `--multi-latent-attention` (MLATransformerConfig)."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    normed: bool = True
    """True if the latents are normed (`--qk-layernorm`)."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The fields of TransformerConfig and GPTModel that sizes depend on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool
    """True for `--swiglu`: fc1 computes gate and up."""
    rms_norm: bool
    qkv_bias: bool
    linear_bias: bool
    """True if all other linear layers have biases."""
    qk_norm: bool
    positions: int | None
    """The rows of a learned position table; None with rotary positions."""
    tied: bool
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None
    squared_relu: bool = False
    """True for `--squared-relu`; False: GELU, or SwiGLU."""
    mtp: int = 0
    """The layers of multi-token prediction (`--mtp-num-layers`)."""

    @property
    def predicts_by_experts(self) -> bool:
        """Tell whether the layers of multi-token prediction have experts: they are as the decoder's last layer."""
        return bool(self.mtp) and self.experts is not None and self.layers - 1 not in self.experts.dense

    def routed(self, start: int, layers: int) -> tuple[bool, ...]:
        """Tell which of `layers` layers from `start` on have experts; () if the model has none."""
        experts = self.experts
        return () if experts is None else tuple(i not in experts.dense for i in range(start, start + layers))


def architecture_of(model_type: str, config: Any) -> Architecture:
    """Return the architecture of a configuration; the record of its type must have one."""
    read = support_of(model_type).architecture
    assert read is not None
    return read(config)


def llama_like(
    config: Any,
    *,
    qk_norm: bool = False,
    qkv_bias: bool | None = None,
    experts: Experts | None = None,
    latent: Latent | None = None,
) -> Architecture:
    """Return the architecture of a model that is Llama except for what is given."""
    bias = bool(getattr(config, "attention_bias", False))
    return Architecture(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        gated=True,
        rms_norm=True,
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        linear_bias=False,
        qk_norm=qk_norm,
        positions=None,
        tied=config.tie_word_embeddings,
        experts=experts,
        latent=latent,
    )


def qwen_moe(config: Any, *, qk_norm: bool = False, qkv_bias: bool | None = None) -> Architecture:
    """Return an architecture with experts named as in Qwen's configurations."""
    dense: list[int] = config.mlp_only_layers or []
    sparse_step = config.decoder_sparse_step
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    experts = Experts(
        count=getattr(config, "num_experts", None) or config.num_local_experts,
        per_token=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        shared_ffn=shared,
        shared_gate=bool(shared),
        normalised=config.norm_topk_prob,
        dense=frozenset(i for i in range(config.num_hidden_layers) if i in dense or (i + 1) % sparse_step),
    )
    return llama_like(config, experts=experts, qk_norm=qk_norm, qkv_bias=qkv_bias)


def deepseek(config: Any, *, sigmoid: bool) -> Architecture:
    """Return an architecture with latents and experts named as in DeepSeek's configurations."""
    experts = Experts(
        count=config.n_routed_experts,
        per_token=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        shared_ffn=config.n_shared_experts * config.moe_intermediate_size,
        normalised=False,
        sigmoid=sigmoid,
        grouped=sigmoid or config.topk_method == "group_limited_greedy",
        scaled=True,
        dense=frozenset(range(config.first_k_dense_replace)),
    )
    latent = Latent(
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
    )
    return llama_like(config, experts=experts, latent=latent)


def unfit(model_type: str, config: Any) -> str | None:
    """Return what a model has that GPTModel cannot have: biases of some linear layers only. Return None if it has
    none."""
    if getattr(config, "mlp_bias", False):
        return "mlp_bias"
    if not support_of(model_type).only_qkv_biases and getattr(config, "attention_bias", False):
        return "attention_bias (one of o_proj among them)"
    return None
