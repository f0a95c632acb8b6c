"""LFM2 (models/lfm2/modeling_lfm2.py): Llama with short gated convolutions in the place of attention in some layers, and norms
over each head of q and k.

The path in plain torch, as runs without the package causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.ops.axes import chunk_dim, narrow
from memcalc.core.ops.shape import contiguous, reshape, transpose, view
from memcalc.families.base.blocks import QKV, Attended, Rotary, act, apply_mask_to_padding_states
from memcalc.families.base.config import Bounds, Count, Layers, check_divides
from memcalc.families.base.hybrid import LinearOrFullLayers
from memcalc.families.base.layer_types import LayerTypesConfig
from memcalc.families.base.module import Module, State, Weight, module
from memcalc.families.base.support import Family
from memcalc.families.llama import linear_weights
from memcalc.families.mamba import CONVOLUTION, cached_conv1d, causal_conv1d

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.core.tensor import Tensor

ConvOrFull = Literal["conv", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(LayerTypesConfig):
    """The fields that LFM2 and LFM2 with experts share."""

    null_head_dim: ClassVar[bool] = False

    vocab_size: Count = 65536
    pad_token_id: int | None = 0
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 8
    head_dim: Count | None = None
    max_position_embeddings: Count = 128_000
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: Count = 3
    layer_types: list[ConvOrFull] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        named = super().renamed(config)
        if "tie_embedding" in named:
            older = named.pop("tie_embedding")
            if isinstance(
                named.get("tie_word_embeddings", True), bool
            ):  # one that is overruled is checked all the same
                named["tie_word_embeddings"] = older
        return named

    @property
    def hidden_act(self) -> str:
        return "silu"

    @property
    def kinds(self) -> list[ConvOrFull]:
        """Return the kind of each layer: short convolution or full attention."""
        return list(self.layer_types or ())

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ShortConvConfig):
    """The fields and defaults of models/lfm2/configuration_lfm2.py."""

    hidden_size: Count = 2560
    intermediate_size: Count = 12288
    num_hidden_layers: Layers = 32
    block_multiple_of: Count = 256
    block_ffn_dim_multiplier: Annotated[float, Bounds(ge=0, le=10**7)] = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        named = super().renamed(config)
        if "block_ff_dim" in named:
            older = named.pop("block_ff_dim")
            if type(named.get("intermediate_size", 1)) is int:
                named["intermediate_size"] = older
        return named

    @property
    def kinds(self) -> list[ConvOrFull]:
        if self.layer_types is not None:
            return list(self.layer_types)
        layers = range(self.num_hidden_layers)
        full = layers if self.full_attn_idxs is None else self.full_attn_idxs
        return ["full_attention" if i in full else "conv" for i in layers]

    @property
    def ffn(self) -> int:
        """Return the inner width of the MLP (Lfm2MLP)."""
        width = self.intermediate_size
        if self.block_auto_adjust_ff_dim:
            width = int(2 * width / 3)
            width = int(self.block_ffn_dim_multiplier * width)
            width = self.block_multiple_of * -(-width // self.block_multiple_of)
        return width

    def check(self) -> None:
        super().check()
        if not self.ffn:
            raise ValueError(f"intermediate_size {self.intermediate_size} leaves an MLP of width 0")


class Lfm2(LinearOrFullLayers):
    """The program of Lfm2ForCausalLM."""

    Config = Lfm2Config
    polynomial = True
    final_norm = "embedding_norm"
    other_kind = "conv"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.ffn = Dim("ffn", self.mlp_width())
        self.kernel = Dim("conv_kernel", config.conv_L_cache)

    def states(self, i: int) -> tuple[State, ...]:
        return (State(CONVOLUTION, (self.hidden, self.kernel)),) if self.linear(i) else ()

    def mlp_width(self) -> int:
        return self.config.ffn

    # --- weights

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.conv_weights() if self.linear(i) else self.attention_weights()
        yield from self.feed_forward_weights(i)
        yield from self.norm_weights("operator_norm")
        yield from self.norm_weights("ffn_norm")

    def conv_weights(self) -> Iterator[Weight]:
        """Yield the parameters of Lfm2ShortConv."""
        bias = self.config.conv_bias
        yield Weight("conv.conv.weight", (self.hidden, ONE_DIM, self.kernel), "mixer")
        if bias:
            yield Weight("conv.conv.bias", (self.hidden,), "mixer")
        yield from linear_weights(
            "conv.in_proj", self.hidden, Dim("3·hidden", 3 * self.hidden.size), "mixer", bias=bias
        )
        yield from linear_weights("conv.out_proj", self.hidden, self.hidden, "mixer", bias=bias)

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=False)
        yield from linear_weights("self_attn.out_proj", q, self.hidden, "attention", bias=False)
        yield Weight("self_attn.q_layernorm.weight", (self.head_dim,), "norm")
        yield Weight("self_attn.k_layernorm.weight", (self.head_dim,), "norm")

    def feed_forward_weights(self, i: int) -> Iterator[Weight]:
        yield from linear_weights("feed_forward.w1", self.hidden, self.ffn, "mlp", bias=False)
        yield from linear_weights("feed_forward.w3", self.hidden, self.ffn, "mlp", bias=False)
        yield from linear_weights("feed_forward.w2", self.ffn, self.hidden, "mlp", bias=False)

    # --- forward

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        assert m.layer is not None
        residual = hidden_states
        if self.linear(m.layer):
            hidden_states = self.short_conv(m / "conv", self.norm(m / "operator_norm", hidden_states), mask)
        else:
            hidden_states, _weights = self.attention(
                m / "self_attn", self.norm(m / "operator_norm", hidden_states), rotary, mask
            )
        hidden_states = hidden_states + residual
        return hidden_states + self.mlp(m / "feed_forward", self.norm(m / "ffn_norm", hidden_states))

    @module
    def short_conv(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output of Lfm2ShortConv."""
        hidden_states = apply_mask_to_padding_states(hidden_states, mask)
        projected = transpose((m / "in_proj").linear(hidden_states), 1, 2)
        b, c, x = chunk_dim(projected, 1, 3)
        hidden_states = b * x
        if m.run.cache is not None and m.run.cache.state(m, CONVOLUTION) is None:
            seq = hidden_states.shape[2]
            hidden_states = m.run.cache.update_conv_state(m, hidden_states, self.kernel)
            hidden_states = narrow(causal_conv1d(m / "conv", hidden_states, "linear"), 2, seq)
        else:
            hidden_states = cached_conv1d(m, m / "conv", hidden_states, "linear")
        y = c * hidden_states
        y = contiguous(transpose(y, 1, 2))
        return (m / "out_proj").linear(y)

    @module
    def attention(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None) -> Attended:
        query_states, key_states, value_states = self.rotated_qkv(m, hidden_states, rotary)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim))
        return (m / "out_proj").linear(attn_output), attn_weights

    def qkv(self, m: Module, hidden_states: Tensor) -> QKV:
        batch, seq, _ = hidden_states.shape
        q = view((m / "q_proj").linear(hidden_states), batch, seq, self.heads, self.head_dim)
        q = transpose(self.norm(m / "q_layernorm", q), 1, 2)
        k = view((m / "k_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        k = transpose(self.norm(m / "k_layernorm", k), 1, 2)
        v = transpose(view((m / "v_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim), 1, 2)
        return q, k, v

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        return (m / "w2").linear(act((m / "w1").linear(x), "silu") * (m / "w3").linear(x))


FAMILY: Final = Family("lfm2", Lfm2)
