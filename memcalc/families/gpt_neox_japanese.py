"""GPT-NeoX Japanese (models/gpt_neox_japanese/modeling_gpt_neox_japanese.py): a bias in the last layer's attention alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.elementwise import dropout, softmax
from memcalc.core.ops.matmul import baddbmm, matmul
from memcalc.core.ops.shape import cat, contiguous, expand, part, reshape, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import (
    Attended,
    act,
    apply_rotary_pos_emb,
    position_ids,
    rotary_buffers,
    rotary_embedding,
)
from memcalc.families.base.config import Activation, Count, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Buffer, Module, Run, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.gpt_neox import GPTNeoX
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping


@dataclass(frozen=True, kw_only=True)
class GPTNeoXJapaneseConfig(RotaryConfig):
    """The fields and defaults of models/gpt_neox_japanese/configuration_gpt_neox_japanese.py."""

    pads_embedding: ClassVar[bool] = False
    rotates_part: ClassVar[bool] = True
    head_dim: ClassVar[None] = None

    vocab_size: Count = 32000
    hidden_size: Count = 2560
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    intermediate_multiple_size: Count = 4
    hidden_act: Activation = "gelu"
    max_position_embeddings: Count = 2048
    attention_dropout: Probability = 0.1
    hidden_dropout: Probability = 0.0
    tie_word_embeddings: bool = True

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with `rotary_pct`, the name that is read outside `rope_parameters`."""
        named = {name: value for name, value in super().renamed(config).items() if name != "partial_rotary_factor"}
        return {**named, "partial_rotary_factor": named["rotary_pct"]} if "rotary_pct" in named else named

    @property
    def intermediate_size(self) -> int:
        return self.hidden_size * self.intermediate_multiple_size

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")


class GPTNeoXJapanese(GPTNeoX):
    """The program of GPTNeoXJapaneseForCausalLM."""

    Config = GPTNeoXJapaneseConfig
    embedding = "gpt_neox_japanese.embed_in"
    unembedding = "embed_out"
    base = "gpt_neox_japanese"
    attention_kinds = ("eager",)
    recomputes = False

    def variant(self, i: int) -> Hashable:
        return self.has_bias(i)

    def has_bias(self, i: int) -> bool:
        return i == self.config.num_hidden_layers - 1

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield Weight("gpt_neox_japanese.embed_in.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("gpt_neox_japanese.layers")
        yield from norm_weights("gpt_neox_japanese.final_layer_norm", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("embed_out.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        qkv = merge(self.heads, self.qkv_of_head)
        yield from norm_weights("input_layernorm", self.hidden)
        yield from norm_weights("post_attention_layernorm", self.hidden)
        if self.has_bias(i):
            yield Weight("attention.dense_bias", (self.hidden,), "attention")
        yield from linear_weights("attention.query_key_value", self.hidden, qkv, "attention", bias=False)
        yield from linear_weights("attention.dense", self.hidden, self.hidden, "attention", bias=False)
        yield from linear_weights("mlp.dense_h_to_4h", self.hidden, self.ffn, "mlp", bias=False)
        yield from linear_weights("mlp.dense_4h_to_h", self.ffn, self.hidden, "mlp", bias=False)

    def buffers(self) -> Iterator[Buffer]:
        yield from rotary_buffers(
            "gpt_neox_japanese.rotary_emb", self.rotary_dim, self.rope_type, self.config.max_position_embeddings
        )

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "embed_in").embedding(ids)
        positions = position_ids(run)
        mask = causal_mask(run)
        hidden_states = inputs_embeds
        position_embeddings = rotary_embedding(m / "rotary_emb", positions, self.rotary_dim, self.rope_type)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            outputs = self.call_layer(layer, hidden_states, position_embeddings, mask)
            hidden_states = outputs[0]
        run.memory.enter(run.memory.phase, None)
        return (m / "final_layer_norm").layer_norm(hidden_states)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Attended:
        p = self.config.hidden_dropout
        residual = hidden_states
        ln_out = (m / "input_layernorm").layer_norm(hidden_states)
        attn_output, attn_weights = self.attention(m / "attention", ln_out, rotary, mask)
        bias = (m / "attention").optional("dense_bias")
        if bias is not None:
            bias = expand(unsqueeze(unsqueeze(bias, 0), 0), *residual.shape)
        attn_output = bias_dropout_add(attn_output, bias, residual, p)
        mlp_output = self.mlp(m / "mlp", (m / "post_attention_layernorm").layer_norm(attn_output))
        attn_output = bias_dropout_add(mlp_output, None, attn_output, p)
        return attn_output, attn_weights

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Attended:
        batch, seq, hidden = hidden_states.shape
        qkv = view((m / "query_key_value").linear(hidden_states), batch, seq, self.heads, self.qkv_of_head)
        query, key, value = (transpose(part(qkv, self.head_dim), 1, 2) for _ in range(3))
        rest = Dim("head_dim-rotary_dim", self.head_dim.size - self.rotary_dim.size)
        query_rot, query_pass = part(query, self.rotary_dim), part(query, rest)
        key_rot, key_pass = part(key, self.rotary_dim), part(key, rest)
        cos, sin = rotary
        query, key = apply_rotary_pos_emb(query_rot, key_rot, cos, sin)
        query = cat((query, query_pass), self.head_dim)
        key = cat((key, key_pass), self.head_dim)
        key, value = m.cached(key, value)
        attn_output, attn_weights = self.weigh(m.run, query, key, value, mask)
        attn_output = reshape(contiguous(transpose(attn_output, 1, 2)), batch, seq, hidden)
        attn_output = (m / "dense").linear(attn_output)
        return attn_output, attn_weights

    def weigh(self, run: Run, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Attended:
        batch, heads, seq, width = query.shape
        flat, keys = merge(batch, heads), key.shape[2]
        query, key = view(query, flat, seq, width), view(key, flat, keys, width)
        attn_scores = new_tensor(run.memory, (flat, seq, keys), query.dtype, "zeros")
        attention_scores = baddbmm(attn_scores, query, transpose(key, 1, 2), "attention scores")
        attention_scores = view(attention_scores, batch, heads, seq, keys)
        if mask is not None:
            attention_scores = attention_scores + mask
        attn_weights = softmax(attention_scores)
        attn_weights = dropout(attn_weights, self.config.attention_dropout)
        return matmul(attn_weights, value, "attention output"), attn_weights

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        intermediate = (m / "dense_h_to_4h").linear(x)
        intermediate = act(intermediate, self.config.hidden_act)
        return (m / "dense_4h_to_h").linear(intermediate)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    """Return residual + dropout(x + bias)."""
    if bias is not None:
        x = x + bias
    return residual + dropout(x, p)


FAMILY: Final = Family("gpt_neox_japanese", GPTNeoXJapanese, Support(tensor_parallel={}))
