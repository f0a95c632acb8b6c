"""Llama 4's text model (models/llama4/modeling_llama4.py): chunked attention with rotations as complex numbers in most layers,
full attention without positions in the others, and experts beside a shared one in some or all layers.

Every expert runs over every token: what routes is a factor that is zero for the experts that were not chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from memcalc.core.dims import ONE_DIM, Dim, divided, merge
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.elementwise import cast, dropout, like, mean, power, rsqrt, scale, sigmoid, softmax
from memcalc.core.ops.matmul import bmm, matmul
from memcalc.core.ops.routing import add_, repeat_rows, scatter_, sum_first, topk
from memcalc.core.ops.shape import chunk, contiguous, expand, reshape, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, act, repeat_kv, sdpa_attention
from memcalc.families.base.complex_rotary import as_pairs, complex_rotary_embedding, turned
from memcalc.families.base.config import Activation, Bounds, Count, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.masks import causal_mask, chunked_causal_mask
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import SparseLayers, gated_mlp_weights
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

Kind = Literal["full_attention", "chunked_attention"]


@dataclass(frozen=True, kw_only=True)
class Llama4TextConfig(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/llama4/configuration_llama4.py, Llama4TextConfig."""

    vocab_size: Count = 202048
    hidden_size: Count = 5120
    intermediate_size: Count = 8192
    intermediate_size_mlp: Count = 16384
    num_hidden_layers: Layers = 48
    num_attention_heads: Count = 40
    num_key_value_heads: Count = 8
    head_dim: Count = 128
    hidden_act: Activation = "silu"
    max_position_embeddings: Annotated[int, Bounds(ge=1, le=10**9)] = 4096 * 32
    tie_word_embeddings: bool = False
    attention_dropout: Probability = 0.0
    attention_bias: bool = False
    num_experts_per_tok: Count = 1
    num_local_experts: Count = 16
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: Count = 1
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Count = 8192
    layer_types: list[Kind] | None = None
    attn_temperature_tuning: bool = True

    @property
    def rotated(self) -> list[int]:
        """Return 1 for each layer with rotary positions, else 0. transformers calls this list `no_rope_layers`."""
        if self.no_rope_layers:
            return self.no_rope_layers
        return [int((i + 1) % self.no_rope_layer_interval != 0) for i in range(self.num_hidden_layers)]

    @property
    def kinds(self) -> list[str]:
        """Return the kind of attention of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        return ["chunked_attention" if rotated else "full_attention" for rotated in self.rotated]

    @property
    def routed_layers(self) -> frozenset[int]:
        if self.moe_layers is not None:
            return frozenset(self.moe_layers)
        step = self.interleave_moe_layer_step
        return frozenset(range(step - 1, self.num_hidden_layers, step))

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        for name, entries in (("no_rope_layers", self.rotated), ("layer_types", self.kinds)):
            if len(entries) != self.num_hidden_layers:
                raise ValueError(f"{name} has {len(entries)} entries, num_hidden_layers is {self.num_hidden_layers}")


class Llama4Text(SparseLayers):
    """The program of Llama4ForCausalLM with a text configuration."""

    Config = Llama4TextConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.num_experts_per_tok, config.num_local_experts)
        self.per_token, self.experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.gate_up = Dim("2·ffn", 2 * self.ffn.size)
        self.dense_ffn = Dim("dense_ffn", config.intermediate_size_mlp)
        self.kinds: list[str] = config.kinds
        self.rotated: list[int] = config.rotated

    # --- weights and layers

    def sparse(self, i: int) -> bool:
        return i in self.config.routed_layers

    def variant(self, i: int) -> Hashable:
        return self.sparse(i), self.kinds[i], bool(self.rotated[i])

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        if self.sparse(i):
            yield Weight("feed_forward.experts.gate_up_proj", (self.experts, self.hidden, self.gate_up), "experts")
            yield Weight("feed_forward.experts.down_proj", (self.experts, self.ffn, self.hidden), "experts")
            yield from linear_weights("feed_forward.router", self.hidden, self.experts, "router", bias=False)
            yield from gated_mlp_weights("feed_forward.shared_expert", self.hidden, self.ffn)
        else:
            yield from gated_mlp_weights("feed_forward", self.hidden, self.dense_ffn)
        yield Weight("input_layernorm.weight", (self.hidden,), "norm")
        yield Weight("post_attention_layernorm.weight", (self.hidden,), "norm")

    def layer_kind(self, i: int) -> str:
        return self.kinds[i]

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        full = causal_mask(run)
        return {"full_attention": full, "chunked_attention": chunked_causal_mask(run, self.config.attention_chunk_size)}

    def branch(self, batch: int, seq: int) -> Hashable:
        return super().branch(batch, seq), seq >= self.config.attention_chunk_size

    # --- forward

    def position_embeddings(self, m: Module, positions: Tensor) -> Tensor:
        return complex_rotary_embedding(m, positions, self.rope_type)

    def rotary_embeddings(self, m: Module, positions: Tensor) -> dict[str, Any]:
        """Return the rotary embeddings by kind of layer: one serves both kinds."""
        return dict.fromkeys(("full_attention", "chunked_attention"), self.position_embeddings(m, positions))

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of Llama4TextRMSNorm."""
        with m:
            output = cast(_norm(cast(hidden_states, fp32)), hidden_states.dtype)
            return output * m.weight()

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Any, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        attention_states, _ = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + attention_states
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        assert m.layer is not None
        if self.sparse(m.layer):
            hidden_states, _ = self.routed_mlp(m / "feed_forward", hidden_states)
        else:
            hidden_states = self.dense_mlp(m / "feed_forward", hidden_states)
        return residual + view(hidden_states, *residual.shape)

    @module
    def attention(self, m: Module, hidden_states: Tensor, rotary: Any, mask: Tensor | None) -> Attended:
        batch, seq, _ = hidden_states.shape
        assert m.layer is not None
        use_rope = bool(self.rotated[m.layer])
        query_states = view((m / "q_proj").linear(hidden_states), batch, seq, self.heads, self.head_dim)
        key_states = view((m / "k_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        value_states = view((m / "v_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        value_states = transpose(value_states, 1, 2)
        if use_rope:
            query_states, key_states = apply_rotary_emb(query_states, key_states, rotary)
        if use_rope and self.config.use_qk_norm:
            query_states = l2_norm(query_states)
            key_states = l2_norm(key_states)
        if self.config.attn_temperature_tuning and not use_rope:
            _positions, attn_scales = attention_scales(m.run)
            attn_scales = expand(reshape(attn_scales, ONE_DIM, seq, ONE_DIM, ONE_DIM), batch, seq, ONE_DIM, ONE_DIM)
            query_states = cast(query_states * attn_scales, query_states.dtype)
        query_states = transpose(query_states, 1, 2)
        key_states = transpose(key_states, 1, 2)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, batch, seq, merge(self.heads, self.head_dim))
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights

    def attend(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        if m.run.attention == "eager":
            return eager_attention_without_upcast(q, k, v, mask, p=self.config.attention_dropout)
        return sdpa_attention(q, k, v, mask)

    @module
    def routed_mlp(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of Llama4TextMoe."""
        batch, seq, hidden = hidden_states.shape
        hidden_states = reshape(hidden_states, merge(batch, seq), hidden)
        router_scores, router_logits = self.router(m / "router", hidden_states)
        routed_in = repeat_rows(hidden_states, self.experts)
        routed_in = routed_in * reshape(transpose(router_scores, 0, 1), routed_in.shape[0], ONE_DIM)
        routed_out = self.run_experts(m / "experts", routed_in)
        out = self.dense_mlp(m / "shared_expert", hidden_states)
        out = add_(out, sum_first(reshape(routed_out, self.experts, *hidden_states.shape)))
        return out, router_logits

    @module
    def router(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of Llama4Router."""
        router_logits = m.linear(hidden_states)
        router_top_value, router_indices = topk(router_logits, self.per_token)
        router_scores = scatter_(like(router_logits, "router scores"), router_indices, router_top_value)
        router_scores = cast(sigmoid(cast(router_scores, fp32)), router_scores.dtype)
        m.run.collect(m.layer, router_logits)
        return router_scores, router_logits

    @module
    def run_experts(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of Llama4TextExperts."""
        rows, hidden = hidden_states.shape
        hidden_states = view(hidden_states, self.experts, divided(rows, self.experts.size), hidden)
        gate_up = bmm(hidden_states, m.weight("gate_up_proj"), "experts.gate_up_proj")
        gate, up = chunk(gate_up, 2)
        next_states = bmm(up * act(gate, self.config.hidden_act), m.weight("down_proj"), "experts.down_proj")
        return view(next_states, rows, hidden)


def _norm(x: Tensor) -> Tensor:
    return x * rsqrt(mean(power(x, 2)) + 1e-5)


def l2_norm(x: Tensor) -> Tensor:
    """Return the output of Llama4TextL2Norm, a norm without a weight."""
    return cast(_norm(cast(x, fp32)), x.dtype)


def apply_rotary_emb(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k (batch, seq, heads, head_dim), rotated in fp32."""
    q_pairs, k_pairs = as_pairs(q), as_pairs(k)
    q_out = turned(q_pairs, unsqueeze(freqs_cis, 2), q)
    k_out = turned(k_pairs, unsqueeze(freqs_cis, 2), k)
    return cast(q_out, q.dtype), cast(k_out, k.dtype)


def attention_scales(run: Run) -> tuple[Tensor, Tensor]:
    """Return log1p(floor((positions + 1) / floor_scale)) * attn_scale + 1, and the positions."""
    positions = like(new_tensor(run.memory, (run.seq,), int64, "positions"), "positions")
    scales = scale(cast(positions, fp32), "add")
    for op in ("div", "floor", "log1p", "mul", "add"):
        scales = like(scales, op)
    return positions, scales


def eager_attention_without_upcast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, p: float) -> Attended:
    """Return Llama 4's eager_attention_forward, whose softmax stays in the model's dtype."""
    key_states = repeat_kv(k, q.shape[1])
    value_states = repeat_kv(v, q.shape[1])
    attn_weights = scale(matmul(q, transpose(key_states, 2, 3), "attention scores"), "mul")
    if mask is not None:
        attn_weights = attn_weights + mask
    attn_weights = softmax(attn_weights)
    attn_weights = dropout(attn_weights, p)
    attn_output = matmul(attn_weights, value_states, "attention output")
    attn_output = contiguous(transpose(attn_output, 1, 2))
    return attn_output, attn_weights


FAMILY: Final = Family(
    "llama4_text",
    Llama4Text,
    Support(tensor_parallel_fails="changes a DTensor's local view in place, which autograd refuses"),
)
