"""GPT-NeoX and Pythia (models/gpt_neox/modeling_gpt_neox.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.shape import chunk, reshape, transpose, view
from memcalc.families.base.blocks import (
    Attended,
    act,
    attention,
    lm_head_loss,
    position_ids,
    rotary_buffers,
    rotary_embedding,
)
from memcalc.families.base.config import (
    Activation,
    Count,
    FamilyConfig,
    Layers,
    Probability,
    RotaryConfig,
    check_divides,
)
from memcalc.families.base.dropouts import dropout_module
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Buffer, Module, Run, Weight, module
from memcalc.families.base.rotary import apply_partial_rotary_pos_emb
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(RotaryConfig):
    """The fields and defaults of models/gpt_neox/configuration_gpt_neox.py."""

    pads_embedding: ClassVar[bool] = False
    rotates_part: ClassVar[bool] = True

    vocab_size: Count = 50432
    hidden_size: Count = 6144
    num_hidden_layers: Layers = 44
    num_attention_heads: Count = 64
    intermediate_size: Count = 24576
    head_dim: Count | None = None
    hidden_act: Activation = "gelu"
    attention_dropout: Probability = 0.0
    hidden_dropout: Probability = 0.0
    max_position_embeddings: Count = 2048
    tie_word_embeddings: bool = False
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rotary_pct: float = 0.25

    @property
    def default_rotary_factor(self) -> float:
        """Return `rotary_pct`, the field's name outside `rope_parameters`; `partial_rotary_factor` is only read inside."""
        return self.rotary_pct

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")
        width = self.hidden_size // self.num_attention_heads
        if self.head_dim not in (None, width):
            raise ValueError(f"head_dim {self.head_dim} fails in transformers; allowed: {width}, or leave it out")


class GPTNeoX(Llama):
    """The program of GPTNeoXForCausalLM."""

    Config: type[FamilyConfig] = GPTNeoXConfig
    embedding = "gpt_neox.embed_in"
    base = "gpt_neox"
    """The name of the model without its head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.qkv_of_head = Dim("3·head_dim", 3 * self.head_dim.size)

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield Weight("gpt_neox.embed_in.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("gpt_neox.layers")
        yield from norm_weights("gpt_neox.final_layer_norm", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        bias, qkv = self.config.attention_bias, merge(self.heads, self.qkv_of_head)
        yield from norm_weights("input_layernorm", self.hidden)
        yield from norm_weights("post_attention_layernorm", self.hidden)
        yield from linear_weights("attention.query_key_value", self.hidden, qkv, "attention", bias=bias)
        yield from linear_weights("attention.dense", self.hidden, self.hidden, "attention", bias=bias)
        yield from linear_weights("mlp.dense_h_to_4h", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("mlp.dense_4h_to_h", self.ffn, self.hidden, "mlp", bias=True)

    def buffers(self) -> Iterator[Buffer]:
        yield from rotary_buffers(
            "gpt_neox.rotary_emb", self.rotary_dim, self.rope_type, self.config.max_position_embeddings
        )

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return GPTNeoXForCausalLM.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        hidden_states = self.model(root / self.base, ids)
        run.memory.enter(run.memory.phase, None)
        return lm_head_loss(root / self.head_name, partial(self.head, root), hidden_states, ids)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "embed_in").embedding(ids)
        positions = position_ids(run)
        mask = causal_mask(run)
        hidden_states = dropout_module(inputs_embeds, self.config.hidden_dropout)
        position_embeddings = rotary_embedding(m / "rotary_emb", positions, self.rotary_dim, self.rope_type)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            hidden_states = self.call_layer(layer, hidden_states, position_embeddings, mask, positions)
        run.memory.enter(run.memory.phase, None)
        return (m / "final_layer_norm").layer_norm(hidden_states)

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        p = self.config.hidden_dropout
        normed = (m / "input_layernorm").layer_norm(hidden_states)
        attn_output, _weights = self.attention(m / "attention", normed, rotary, mask)
        del normed  # in the real code an argument without a name
        attn_output = dropout_module(attn_output, p)
        if self.config.use_parallel_residual:
            mlp_output = self.mlp(m / "mlp", (m / "post_attention_layernorm").layer_norm(hidden_states))
            mlp_output = dropout_module(mlp_output, p)
            hidden_states = mlp_output + attn_output + hidden_states
        else:
            attn_output = attn_output + hidden_states
            mlp_output = self.mlp(m / "mlp", (m / "post_attention_layernorm").layer_norm(attn_output))
            mlp_output = dropout_module(mlp_output, p)
            hidden_states = mlp_output + attn_output
        return hidden_states

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Attended:
        batch, seq, _ = hidden_states.shape
        qkv = (m / "query_key_value").linear(hidden_states)
        qkv = transpose(view(qkv, batch, seq, self.heads, self.qkv_of_head), 1, 2)
        query_states, key_states, value_states = chunk(qkv, 3)
        cos, sin = rotary
        query_states, key_states = apply_partial_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = attention(
            m.run, query_states, key_states, value_states, mask, p=self.config.attention_dropout
        )
        attn_output = reshape(attn_output, batch, seq, merge(self.heads, self.head_dim))
        attn_output = (m / "dense").linear(attn_output)
        return attn_output, attn_weights

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        hidden_states = (m / "dense_h_to_4h").linear(x)
        hidden_states = act(hidden_states, self.config.hidden_act)
        return (m / "dense_4h_to_h").linear(hidden_states)


FAMILY: Final = Family("gpt_neox", GPTNeoX, Support(chunked_loss=True))
