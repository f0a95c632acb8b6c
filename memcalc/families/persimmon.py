"""Persimmon (models/persimmon/modeling_persimmon.py): joined projections, norms on q and k, a part of each head rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.elementwise import dropout
from memcalc.core.ops.shape import select, transpose, view
from memcalc.families.base.blocks import act
from memcalc.families.base.config import Activation, Count, Fraction, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import Llama, linear_weights
from memcalc.families.phi import Phi

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class PersimmonConfig(RotaryConfig):
    """The fields and defaults of models/persimmon/configuration_persimmon.py."""

    rotates_part: ClassVar[bool] = True
    head_dim: ClassVar[None] = None

    vocab_size: Count = 262144
    hidden_size: Count = 4096
    intermediate_size: Count = 16384
    num_hidden_layers: Layers = 36
    num_attention_heads: Count = 64
    hidden_act: Activation = "relu2"
    max_position_embeddings: Count = 16384
    partial_rotary_factor: Fraction = 0.5
    tie_word_embeddings: bool = False
    qk_layernorm: bool = True
    hidden_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")


class Persimmon(Phi):
    """The program of PersimmonForCausalLM."""

    Config = PersimmonConfig

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("model.embed_tokens.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("model.layers")
        yield from norm_weights("model.final_layernorm", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        qkv = merge(self.heads, Dim("3", 3), self.head_dim)
        yield from linear_weights("self_attn.query_key_value", self.hidden, qkv, "attention", bias=True)
        yield from linear_weights("self_attn.dense", self.hidden, self.hidden, "attention", bias=True)
        if self.config.qk_layernorm:
            yield from norm_weights("self_attn.q_layernorm", self.head_dim)
            yield from norm_weights("self_attn.k_layernorm", self.head_dim)
        yield from linear_weights("mlp.dense_h_to_4h", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("mlp.dense_4h_to_h", self.ffn, self.hidden, "mlp", bias=True)
        yield from norm_weights("input_layernorm", self.hidden)
        yield from norm_weights("post_attention_layernorm", self.hidden)

    # --- forward

    head = Llama.head

    def drop_embeds(self, inputs_embeds: Tensor) -> Tensor:
        return inputs_embeds

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        hidden_states = dropout(hidden_states, self.config.hidden_dropout)
        return hidden_states + residual

    def qkv(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, seq, _ = hidden_states.shape
        fused_qkv = (m / "query_key_value").linear(hidden_states)
        fused_qkv = view(fused_qkv, batch, seq, self.heads, Dim("3", 3), self.head_dim)
        q, k, v = select(fused_qkv, 3), select(fused_qkv, 3), select(fused_qkv, 3)
        if self.config.qk_layernorm:
            q = (m / "q_layernorm").layer_norm(q)
            k = (m / "k_layernorm").layer_norm(k)
        return transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2), fused_qkv

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        hidden_states = (m / "dense_h_to_4h").linear(x)
        hidden_states = act(hidden_states, self.config.hidden_act)
        return (m / "dense_4h_to_h").linear(hidden_states)


FAMILY: Final = Family("persimmon", Persimmon, Support(tensor_parallel={}, context_parallel=True))
