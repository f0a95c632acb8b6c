"""What GPTModel is built from (megatron/core/transformer/transformer_config.py), read off a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
    """`--swiglu`: fc1 makes gate and up."""
    rms_norm: bool
    qkv_bias: bool
    linear_bias: bool
    """Of all other linear layers."""
    qk_norm: bool
    positions: int | None
    """Rows of a learned position table; None with rotary positions."""
    tied: bool
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0


def _llama_like(config: Any, *, qk_norm: bool = False, qkv_bias: bool | None = None) -> Architecture:
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
    )


def _gpt2(config: Any) -> Architecture:
    return Architecture(
        layers=config.n_layer,
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        ffn=config.n_inner or 4 * config.n_embd,
        vocab=config.vocab_size,
        gated=False,
        rms_norm=False,
        qkv_bias=True,
        linear_bias=True,
        qk_norm=False,
        positions=config.n_positions,
        tied=config.tie_word_embeddings,
        hidden_dropout=config.resid_pdrop,
        attention_dropout=config.attn_pdrop,
    )


def unfit(model_type: str, config: Any) -> str | None:
    """What a model has that no GPTModel has: biases of some linear layers and not of the others."""
    if getattr(config, "mlp_bias", False):
        return "mlp_bias"
    if model_type != "qwen2" and getattr(config, "attention_bias", False):
        return "attention_bias (one of o_proj among them)"
    return None


ARCHITECTURES: Final[Mapping[str, Callable[[Any], Architecture]]] = {
    "llama": _llama_like,
    "mistral": _llama_like,
    "qwen2": lambda config: _llama_like(config, qkv_bias=True),
    "qwen3": lambda config: _llama_like(config, qk_norm=True),
    "gpt2": _gpt2,
}
"""`model_type` -> its architecture."""
