"""Phi (models/phi/modeling_phi.py): Llama's attention on a part of each head, GPT's layer norms and MLP, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.shape import cat, contiguous, part, reshape
from memcalc.families.base.blocks import Attended, act, apply_rotary_pos_emb, position_ids, rotary_embedding
from memcalc.families.base.config import (
    Activation,
    Count,
    FamilyConfig,
    Fraction,
    Layers,
    Probability,
    RotaryConfig,
    check_divides,
)
from memcalc.families.base.dropouts import dropout_module
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import ENDS, FC1, FC2
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class PhiConfig(RotaryConfig):
    """The fields and defaults of models/phi/configuration_phi.py."""

    null_head_dim: ClassVar[bool] = False
    rotates_part: ClassVar[bool] = True

    vocab_size: Count = 51200
    hidden_size: Count = 2048
    intermediate_size: Count = 8192
    num_hidden_layers: Layers = 24
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    resid_pdrop: Probability = 0.0
    embd_pdrop: Probability = 0.0
    attention_dropout: Probability = 0.0
    hidden_act: Activation = "gelu_new"
    max_position_embeddings: Count = 2048
    partial_rotary_factor: Fraction = 0.5
    tie_word_embeddings: bool = False
    qk_layernorm: bool = False

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        width = self.hidden_size // self.num_attention_heads
        if self.qk_layernorm and self.head_dim not in (None, width):
            raise ValueError(f"head_dim {self.head_dim} fails with qk_layernorm; allowed: {width}, or leave it out")


class Phi(Llama):
    """The program of PhiForCausalLM."""

    Config: type[FamilyConfig] = PhiConfig
    output = "dense"
    """The name of attention's last projection."""
    final_norm = "final_layernorm"

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("model.embed_tokens.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("model.layers")
        yield from norm_weights("model.final_layernorm", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")
        yield Weight("lm_head.bias", (self.vocab,), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=True)
        yield from linear_weights("self_attn.dense", q, self.hidden, "attention", bias=True)
        if self.config.qk_layernorm:
            yield from norm_weights("self_attn.q_layernorm", self.head_dim)
            yield from norm_weights("self_attn.k_layernorm", self.head_dim)
        yield from linear_weights("mlp.fc1", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("mlp.fc2", self.ffn, self.hidden, "mlp", bias=True)
        yield from norm_weights("input_layernorm", self.hidden)

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = self.embed(m, ids)
        positions = position_ids(run)
        mask = causal_mask(run)
        inputs_embeds = self.drop_embeds(inputs_embeds)
        hidden_states = inputs_embeds
        position_embeddings = rotary_embedding(m / "rotary_emb", positions, self.rotary_dim, self.rope_type)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            hidden_states = self.call_layer(layer, hidden_states, position_embeddings, mask, positions)
        run.memory.enter(run.memory.phase, None)
        return self.norm(m / self.final_norm, hidden_states)

    def drop_embeds(self, inputs_embeds: Tensor) -> Tensor:
        return dropout_module(inputs_embeds, self.config.embd_pdrop)

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return m.layer_norm(hidden_states)

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        p = self.config.resid_pdrop
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        attn_outputs, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        attn_outputs = dropout_module(attn_outputs, p)
        feed_forward_hidden_states = dropout_module(self.mlp(m / "mlp", hidden_states), p)
        return attn_outputs + feed_forward_hidden_states + residual

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Attended:
        query_states, key_states, value_states, *_fused = self.qkv(m, hidden_states)
        cos, sin = rotary
        rest = Dim("head_dim-rotary_dim", self.head_dim.size - self.rotary_dim.size)
        query_rot, query_pass = part(query_states, self.rotary_dim), part(query_states, rest)
        key_rot, key_pass = part(key_states, self.rotary_dim), part(key_states, rest)
        query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, cos, sin)
        query_states = cat((query_rot, query_pass), self.head_dim)
        key_states = cat((key_rot, key_pass), self.head_dim)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        width = merge(self.heads, self.head_dim)
        attn_output = contiguous(reshape(attn_output, *hidden_states.shape[:-1], width))
        attn_output = (m / self.output).linear(attn_output)
        return attn_output, attn_weights

    def qkv(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, *tuple[Tensor, ...]]:
        """Return q, k and v, and what the attention's frame holds besides."""
        q, k, v = super().qkv(m, hidden_states)
        if self.config.qk_layernorm:
            q = self.norm_heads(m / "q_layernorm", q)
            k = self.norm_heads(m / "k_layernorm", k)
        return q, k, v

    @module
    def norm_heads(self, m: Module, states: Tensor) -> Tensor:
        return m.layer_norm(states)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        hidden_states = (m / "fc1").linear(x)
        hidden_states = act(hidden_states, self.config.hidden_act)
        return (m / "fc2").linear(hidden_states)


FAMILY: Final = Family(
    "phi",
    Phi,
    Support(
        tensor_parallel={
            **ENDS,
            "model.layers.*.self_attn.q_proj": "colwise",
            "model.layers.*.self_attn.k_proj": "colwise",
            "model.layers.*.self_attn.v_proj": "colwise",
            "model.layers.*.self_attn.dense": "rowwise",
            FC1: "colwise",
            FC2: "rowwise",
        },
        sequence_parallel=True,
        context_parallel=True,
        ulysses=True,
    ),
)
