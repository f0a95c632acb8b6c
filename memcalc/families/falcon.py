"""Falcon (models/falcon/modeling_falcon.py): joined projections, one or few key/value heads, in-place residuals.

Its mask is always there. Where k and v have one head (`multi_query`), no fused kernel takes a mask and sdpa is computed op
by op in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import bf16, boolean, fp32, int64
from memcalc.core.ops.attention import math_attention, scaled_dot_product_attention
from memcalc.core.ops.elementwise import add_, cast, like, of_two, scale, scale_, softmax
from memcalc.core.ops.matmul import matmul, times
from memcalc.core.ops.routing import index_one
from memcalc.core.ops.selection import where
from memcalc.core.ops.shape import expand, part, reshape, select, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import (
    Attended,
    act,
    apply_rotary_pos_emb,
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
from memcalc.families.base.masks import boolean_mask, causal_mask, keys_of
from memcalc.families.base.module import Buffer, Module, Run, Weight, module
from memcalc.families.base.own_linear import own_linear
from memcalc.families.base.support import Family, Support
from memcalc.families.bloom import Bloom, dropout_add, with_n_embed
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class FalconConfig(RotaryConfig):
    """The fields and defaults of models/falcon/configuration_falcon.py."""

    computed: ClassVar[Sequence[str]] = ("head_dim", "rotary")
    pads_embedding: ClassVar[bool] = False
    head_dim: ClassVar[None] = None

    vocab_size: Count = 65024
    hidden_size: Count = 4544
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 71
    num_ln_in_parallel_attn: int | None = None
    hidden_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    num_kv_heads: Count | None = None
    alibi: bool = False
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    bias: bool = False
    max_position_embeddings: Count = 2048
    ffn_hidden_size: Count | None = None
    activation: Activation = "gelu"
    tie_word_embeddings: bool = True

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return with_n_embed(super().renamed(config))

    @property
    def two_norms(self) -> bool:
        """Return True if attention and MLP run side by side, each after its own norm."""
        norms = self.num_ln_in_parallel_attn
        return self.parallel_attn and (norms == 2 or (norms is None and self.new_decoder_architecture))

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")
        kv_heads, heads, norms = self.num_kv_heads, self.num_attention_heads, self.num_ln_in_parallel_attn
        if self.new_decoder_architecture:
            check_divides(self, "num_attention_heads", "num_kv_heads")
            if not self.parallel_attn or norms not in (None, 1, 2):
                raise ValueError(
                    f"parallel_attn {self.parallel_attn} with num_ln_in_parallel_attn {norms} fails with "
                    "new_decoder_architecture; allowed: True with 1, 2 or null"
                )
            return
        if self.parallel_attn and norms == 2:
            raise ValueError("num_ln_in_parallel_attn 2 fails without new_decoder_architecture; allowed: 1 or null")
        if not self.multi_query and kv_heads not in (None, heads):
            raise ValueError(f"num_kv_heads {kv_heads} fails without multi_query; allowed: {heads}, or leave it out")


class Falcon(Bloom):
    """The program of FalconForCausalLM."""

    Config: type[FamilyConfig] = FalconConfig
    attention_kinds = ("sdpa", "eager")

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers = config.num_hidden_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.hidden_size)
        self.ffn = Dim("ffn", config.ffn_hidden_size or 4 * config.hidden_size)
        self.heads = Dim("heads", config.num_attention_heads)
        self.head_dim = Dim("head_dim", config.hidden_size // config.num_attention_heads)
        if config.new_decoder_architecture:
            self.kv_heads = Dim("kv_heads", config.num_kv_heads or config.num_attention_heads)
        else:
            self.kv_heads = Dim("kv_heads", 1) if config.multi_query else self.heads
        self.rope_type: str = config.rope["rope_type"]
        self.max_seq_len = config.max_position_embeddings
        if config.alibi:
            self.no_static_cache = "with alibi fails in transformers, whose positions have another length than its mask"

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield Weight("transformer.word_embeddings.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("transformer.h")
        yield from norm_weights("transformer.ln_f", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        config, bias = self.config, self.config.bias
        qkv = Dim("(heads+2·kv_heads)·head_dim", (self.heads.size + 2 * self.kv_heads.size) * self.head_dim.size)
        yield from linear_weights("self_attention.query_key_value", self.hidden, qkv, "attention", bias=bias)
        yield from linear_weights("self_attention.dense", self.hidden, self.hidden, "attention", bias=bias)
        yield from linear_weights("mlp.dense_h_to_4h", self.hidden, self.ffn, "mlp", bias=bias)
        yield from linear_weights("mlp.dense_4h_to_h", self.ffn, self.hidden, "mlp", bias=bias)
        if not config.parallel_attn:
            yield from norm_weights("post_attention_layernorm", self.hidden)
        if config.two_norms:
            yield from norm_weights("ln_attn", self.hidden)
            yield from norm_weights("ln_mlp", self.hidden)
        else:
            yield from norm_weights("input_layernorm", self.hidden)

    def buffers(self) -> Iterator[Buffer]:
        yield from rotary_buffers(
            "transformer.rotary_emb", self.head_dim, self.rope_type, self.config.max_position_embeddings
        )

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "word_embeddings").embedding(ids)
        alibi = None
        if self.config.alibi:
            mask = run.attention_mask
            if mask is None:
                mask = new_tensor(run.memory, (run.batch, keys_of(run)), int64, "positions that count")
            alibi = self.alibi(run, mask)
        positions = position_ids(run)
        causal = causal_mask(run) if run.attention == "eager" else boolean_mask(run)
        if alibi is not None:
            assert causal is not None
            alibi = view(alibi, run.batch, self.heads, ONE_DIM, alibi.shape[2])
            causal = masked_alibi(alibi, causal)
        hidden_states = inputs_embeds
        rotary = rotary_embedding(m / "rotary_emb", positions, self.head_dim, self.rope_type)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.h.*", i)
            outputs = self.call_layer(layer, hidden_states, alibi, causal, rotary, positions)
            hidden_states = outputs[0]
        run.memory.enter(run.memory.phase, None)
        return (m / "ln_f").layer_norm(hidden_states)

    def alibi(self, run: Run, mask: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the output of build_alibi_tensor, (batch·heads, 1, seq), with positions counted by `mask`."""
        arange_tensor = scale(like(mask, "cumulated positions"), "sub") * mask
        keys = mask.shape[1]
        shape = (run.batch, self.heads, keys)
        alibi = new_tensor(run.memory, shape, bf16, "alibi")
        del arange_tensor
        return cast(reshape(alibi, merge(run.batch, self.heads), ONE_DIM, keys), run.dtype)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        m: Module,
        hidden_states: Tensor,
        alibi: Tensor | None,
        mask: Tensor,
        rotary: Rotary,
        positions: Tensor,
    ) -> Attended:
        config = self.config
        residual = hidden_states
        mlp_layernorm_out = None
        if config.two_norms:
            attention_layernorm_out = (m / "ln_attn").layer_norm(hidden_states)
            mlp_layernorm_out = (m / "ln_mlp").layer_norm(hidden_states)
        else:
            attention_layernorm_out = (m / "input_layernorm").layer_norm(hidden_states)
        attention_output, attn_weights = self.attention(
            m / "self_attention", attention_layernorm_out, alibi, mask, rotary
        )
        if not config.parallel_attn:
            residual = dropout_add(attention_output, residual, config.attention_dropout)
            mlp_layernorm_out = (m / "post_attention_layernorm").layer_norm(residual)
        elif mlp_layernorm_out is None:
            mlp_layernorm_out = attention_layernorm_out
        mlp_output = self.mlp(m / "mlp", mlp_layernorm_out)
        if config.parallel_attn:
            mlp_output = add_(mlp_output, attention_output)
        output = dropout_add(mlp_output, residual, config.hidden_dropout)
        return output, attn_weights

    @module
    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, alibi: Tensor | None, mask: Tensor, rotary: Rotary
    ) -> Attended:
        _fused_qkv = falcon_linear(m / "query_key_value", hidden_states)
        query_layer, key_layer, value_layer = self.split_qkv(_fused_qkv)
        if alibi is None:
            cos, sin = rotary
            query_layer, key_layer = apply_rotary_pos_emb(query_layer, key_layer, cos, sin)
        key_layer, value_layer = m.cached(key_layer, value_layer)
        if m.run.attention == "sdpa":
            attn_output = self.sdpa(query_layer, key_layer, value_layer, mask)
            attn_output = self.joined(attn_output)
            attn_output = falcon_linear(m / "dense", attn_output)
            return attn_output, None
        if alibi is not None:
            return self.alibi_attention(m, query_layer, key_layer, value_layer, alibi, mask)
        attention_scores = matmul(query_layer, transpose(key_layer, 2, 3), "attention scores")
        attention_scores = scale_(attention_scores)
        attention_scores = softmax(attention_scores + mask)
        attn_output = matmul(attention_scores, value_layer, "attention output")
        attn_output = self.joined(attn_output)
        attn_output = falcon_linear(m / "dense", attn_output)
        return attn_output, attention_scores

    def alibi_attention(
        self, m: Module, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, alibi: Tensor, mask: Tensor
    ) -> Attended:
        _matmul_result = matmul(query_layer, transpose(key_layer, 2, 3), "attention scores")
        attention_scores = view(_matmul_result, *_matmul_result.shape)
        attention_scores = cast(attention_scores, fp32)
        attention_logits = attention_scores + alibi
        attention_logits = scale_(attention_logits)
        masked = attention_logits + mask
        attention_probs = softmax(cast(masked, m.run.dtype))
        del masked  # in the real code an argument without a name
        attention_probs = dropout_module(attention_probs, self.config.attention_dropout)
        attn_output = matmul(attention_probs, value_layer, "attention output")
        attn_output = self.joined(attn_output)
        attn_output = falcon_linear(m / "dense", attn_output)
        return attn_output, attention_probs

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if k.shape[1].size != q.shape[1].size:
            return math_attention(q, k, v, mask)
        return scaled_dot_product_attention(q, k, v, mask)

    def joined(self, x: Tensor) -> Tensor:
        batch, _, seq, _ = x.shape
        return reshape(transpose(x, 1, 2), batch, seq, merge(self.heads, self.head_dim))

    def split_qkv(self, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each (batch, heads, seq, head_dim). With `multi_query`, k and v have one head."""
        batch, seq, _ = fused_qkv.shape
        if self.config.new_decoder_architecture:
            return self.split_groups(fused_qkv)
        if not self.config.multi_query:
            fused_qkv = view(fused_qkv, batch, seq, self.heads, Dim("3", 3), self.head_dim)
            query, key, value = select(fused_qkv, 3), select(fused_qkv, 3), select(fused_qkv, 3)
        else:
            fused_qkv = view(fused_qkv, batch, seq, Dim("heads+2", self.heads.size + 2), self.head_dim)
            query = part(fused_qkv, self.heads, 2)
            key, value = index_one(fused_qkv, 2, "key"), index_one(fused_qkv, 2, "value")
        return self.heads_first(query), self.heads_first(key), self.heads_first(value)

    def split_groups(self, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v. Each group of heads has one key and value, which are repeated for its heads."""
        batch, seq, _ = fused_qkv.shape
        group = self.heads.size // self.kv_heads.size
        qkv = view(fused_qkv, batch, seq, self.kv_heads, Dim("heads/kv_heads+2", group + 2), self.head_dim)
        query = part(qkv, Dim("heads/kv_heads", group), 3)
        key, value = index_one(qkv, 3, "key"), index_one(qkv, 3, "value")
        key, value = expand(key, *query.shape), expand(value, *query.shape)
        query, key, value = (reshape(x, batch, seq, self.heads, self.head_dim) for x in (query, key, value))
        return self.heads_first(query), self.heads_first(key), self.heads_first(value)

    def heads_first(self, x: Tensor) -> Tensor:
        x = transpose(x, 1, 2)
        return reshape(x, *x.shape)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = act(falcon_linear(m / "dense_h_to_4h", x), self.config.activation)
        return falcon_linear(m / "dense_4h_to_h", x)


def falcon_linear(m: Module, x: Tensor) -> Tensor:
    """Return the output of FalconLinear, with its adapter if it has one."""
    return own_linear(m, x, _falcon_linear)


def _falcon_linear(m: Module, x: Tensor) -> Tensor:
    """Run FalconLinear.forward, which adds its bias in a second step."""
    with m:
        hidden_states = times(x, transpose(m.weight(), 0, 1), m.path)
        bias = m.optional("bias")
        return hidden_states if bias is None else hidden_states + bias


def masked_alibi(alibi: Tensor, causal: Tensor) -> Tensor:
    """Return (batch, heads, seq, seq): alibi where the causal mask allows attention, the lowest number elsewhere."""
    if causal.dtype is boolean:
        causal = where(causal, new_tensor(alibi.memory, (), alibi.dtype, "zero"), "additive mask")
    scaled = scale(alibi, "div")
    return of_two(scaled, like(causal, "masked positions", boolean), "causal alibi", alibi.dtype)


FAMILY: Final = Family("falcon", Falcon, Support(tensor_parallel={}))
