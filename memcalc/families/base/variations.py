"""Variations on Llama that several families use. Each overrides one thing; a family combines the ones that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast
from memcalc.core.ops.shape import chunk
from memcalc.families.base.blocks import (
    QKV,
    Rotary,
    act,
    apply_rotary_pos_emb,
    gated_halves,
    rotary_buffers,
    rotary_embedding,
)
from memcalc.families.base.config import LAYER_TYPES, LayerType
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Buffer, Module, Run, Weight, module
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.core.tensor import Tensor


# --- the kinds of layers


class Windowed(Llama):
    """Layers that attend to everything or to a window, as `layer_types` says. The configuration is a WindowedConfig."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kinds: list[LayerType] = config.kinds

    def variant(self, i: int) -> Hashable:
        # Eager attention adds a mask of the same size in every layer.
        return self.kinds[i] if "sdpa" in self.attention_kinds else None

    def layer_kind(self, i: int) -> str:
        return self.kinds[i]

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        masks = {"full_attention": causal_mask(run)}
        if self.config.masks_both or "sliding_attention" in self.kinds:
            masks["sliding_attention"] = causal_mask(run, self.config.sliding_window)
        return masks


class RotaryByKind(Windowed):
    """Layers with rotary frequencies for each kind (Gemma3RotaryEmbedding, models/gemma3/modeling_gemma3.py). The
    configuration is a RotaryByKindConfig."""

    @property
    def rope_types(self) -> dict[LayerType, str]:
        """Return the rotary types of the kinds that the model has."""
        return {kind: self.config.rope_of(kind)["rope_type"] for kind in LAYER_TYPES if kind in self.kinds}

    def frequencies(self) -> Iterator[Buffer]:
        for kind, rope_type in self.rope_types.items():
            yield from rotary_buffers(
                "model.rotary_emb", self.rotary_dim, rope_type, self.config.max_position_embeddings, prefix=f"{kind}_"
            )

    def rotary_embeddings(self, m: Module, positions: Tensor) -> dict[str, Rotary]:
        dtype = self.rotary_dtype
        return {
            kind: rotary_embedding(m, positions, self.rotary_dim, rope_type, prefix=f"{kind}_", dtype=dtype)
            for kind, rope_type in self.rope_types.items()
        }


class PostNorm(Llama):
    """Layers that norm the outputs of attention and MLP instead of their inputs."""

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield from self.mlp_weights()
        yield from self.norm_weights("post_attention_layernorm")
        yield from self.norm_weights("post_feedforward_layernorm")

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.mlp(m / "mlp", hidden_states)
        hidden_states = self.norm(m / "post_feedforward_layernorm", hidden_states)
        return residual + hidden_states


# --- norms


class LayerNorm(Llama):
    """Norms as nn.LayerNorm, with a weight and a bias."""

    def norm_weights(self, name: str) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (self.hidden,), "norm")
        yield Weight(f"{name}.bias", (self.hidden,), "norm")

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return m.layer_norm(hidden_states)


class HeadNorm(Llama):
    """A norm over each head of q and k, laid out as attention takes them, before they are rotated."""

    def attention_weights(self) -> Iterator[Weight]:
        yield from super().attention_weights()
        yield Weight("self_attn.q_norm.weight", (self.head_dim,), "norm")
        yield Weight("self_attn.k_norm.weight", (self.head_dim,), "norm")

    def qkv(self, m: Module, hidden_states: Tensor) -> QKV:
        q, k, v = super().qkv(m, hidden_states)
        q = self.norm(m / "q_norm", q)
        k = self.norm(m / "k_norm", k)
        return q, k, v


# --- rotary positions


class RotaryInFp32(Llama):
    """Rotary positions with cos and sin in fp32, so that q and k are rotated in fp32 and cast back
    (models/olmo/modeling_olmo.py)."""

    rotary_dtype = fp32

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q_type, k_type = q.dtype, k.dtype
        q_embed, k_embed = apply_rotary_pos_emb(q, k, cos, sin)
        return cast(q_embed, q_type), cast(k_embed, k_type)


# --- MLPs


class PlainMLP(Llama):
    """An MLP without a gate: down(act(up(x)))."""

    def mlp_weights(self) -> Iterator[Weight]:
        bias = getattr(self.config, "mlp_bias", False)
        yield from linear_weights("mlp.up_proj", self.hidden, self.ffn, "mlp", bias=bias)
        yield from linear_weights("mlp.down_proj", self.ffn, self.hidden, "mlp", bias=bias)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        return (m / "down_proj").linear(act((m / "up_proj").linear(x), self.config.hidden_act))


class JoinedMLP(Llama):
    """An MLP with gate and up as one projection (models/phi3/modeling_phi3.py)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_up = Dim("2·ffn", 2 * self.ffn.size)

    def mlp_weights(self) -> Iterator[Weight]:
        yield from linear_weights("mlp.gate_up_proj", self.hidden, self.gate_up, "mlp", bias=False)
        yield from linear_weights("mlp.down_proj", self.ffn, self.hidden, "mlp", bias=False)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        up_states = (m / "gate_up_proj").linear(x)
        gate, up_states = chunk(up_states, 2)
        up_states = gated_halves(gate, up_states, self.config.hidden_act)
        return (m / "down_proj").linear(up_states)
