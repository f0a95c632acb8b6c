"""Qwen3-Next (models/qwen3_next/modeling_qwen3_next.py): the gated delta rule in most layers, gated attention in the others,
experts beside a gated shared one.

As `delta` says, the path in plain torch, as runs without the packages fla and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.elementwise import sigmoid
from memcalc.core.ops.shape import chunk, contiguous, reshape, transpose, view
from memcalc.families.base.blocks import Attended, Rotary
from memcalc.families.base.config import Activation, Count, CountOrNone, Layers, Probability, check_divides
from memcalc.families.base.delta import GatedDeltaNet
from memcalc.families.base.experts import REFUSED, check_experts
from memcalc.families.base.hybrid import LinearOrFull, LinearOrFullConfig, LinearOrFullLayers
from memcalc.families.base.module import Module, State, Weight, module
from memcalc.families.base.plans import GATED_MLP, QWEN3_HYBRID
from memcalc.families.base.rotary import apply_partial_rotary_pos_emb
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import GatedSharedExpert
from memcalc.families.base.support import Family, Support
from memcalc.families.gemma import Gemma
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(LinearOrFullConfig):
    """The fields of the layers with the gated delta rule."""

    full_attention_interval: Count = 4
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32

    def default_kind(self, i: int) -> LinearOrFull:
        return "linear_attention" if (i + 1) % self.full_attention_interval else "full_attention"

    def check(self) -> None:
        super().check()
        check_divides(self, "linear_num_value_heads", "linear_num_key_heads")


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(RouterOutputsConfig, DeltaConfig):
    """The fields and defaults of models/qwen3_next/configuration_qwen3_next.py."""

    rotates_part: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 151936
    pad_token_id: int | None = None
    hidden_size: Count = 2048
    intermediate_size: Count = 5632
    num_hidden_layers: Layers = 48
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 2
    head_dim: Count = 256
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    decoder_sparse_step: Count = 1
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: CountOrNone = 512
    num_experts_per_tok: Count = 10
    num_experts: CountOrNone = 512
    norm_topk_prob: bool = True
    mlp_only_layers: list[int] | None = None

    @property
    def default_rotary_factor(self) -> float:
        return 0.25 if self.partial_rotary_factor is None else self.partial_rotary_factor

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_experts", "hidden_size", "moe_intermediate_size")


class DeltaLayers(LinearOrFullLayers):
    """Llama's stack, with the gated delta rule in some layers and gated attention in the others. The configuration is a
    DeltaConfig."""

    delta_net: type[GatedDeltaNet] = GatedDeltaNet
    norm = Gemma.norm

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.delta = self.delta_net(
            hidden=self.hidden, key_heads=config.linear_num_key_heads, value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim, value_dim=config.linear_value_head_dim,
            kernel=config.linear_conv_kernel_dim, activation=config.hidden_act,
        )  # fmt: skip
        self.query_gate = Dim("2·heads·head_dim", 2 * self.heads.size * self.head_dim.size)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        linear = self.linear(i)
        for weight in super().layer_weights(i):
            if not (linear and weight.name.startswith("self_attn")):
                yield weight
            elif weight.name == "self_attn.q_proj.weight":
                yield from self.delta.weights("linear_attn")

    def states(self, i: int) -> tuple[State, ...]:
        return self.delta.states() if self.linear(i) else ()

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        bias = self.config.attention_bias
        for name, out in (("q_proj", self.query_gate), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=bias)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=bias)
        yield Weight("self_attn.q_norm.weight", (self.head_dim,), "norm")
        yield Weight("self_attn.k_norm.weight", (self.head_dim,), "norm")

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        assert m.layer is not None
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        if self.linear(m.layer):
            hidden_states = self.delta.forward(m / "linear_attn", hidden_states, mask)
        else:
            hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual + hidden_states

    @module
    def attention(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None) -> Attended:
        """Return the output of Qwen3NextAttention. It has a gate for each dim of each head, projected with the queries."""
        batch, seq, _ = hidden_states.shape
        width = merge(self.heads, self.head_dim)
        query_and_gate = Dim("2·head_dim", 2 * self.head_dim.size)
        projected = view((m / "q_proj").linear(hidden_states), batch, seq, self.heads, query_and_gate)
        query_states, gate = chunk(projected, 2)
        del projected
        gate = reshape(gate, batch, seq, width)
        query_states = transpose(self.norm(m / "q_norm", query_states), 1, 2)
        key_states, value_states = self.normed_kv(m, hidden_states)
        cos, sin = rotary
        query_states, key_states = apply_partial_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = contiguous(reshape(attn_output, batch, seq, width))
        attn_output = attn_output * sigmoid(gate)
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights

    def normed_kv(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return k after a norm over each head, and v."""
        batch, seq, _ = hidden_states.shape
        key_states = view((m / "k_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        key_states = transpose(self.norm(m / "k_norm", key_states), 1, 2)
        value_states = view((m / "v_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        return key_states, transpose(value_states, 1, 2)


class Qwen3Next(DeltaLayers, GatedSharedExpert):
    """The program of Qwen3NextForCausalLM."""

    Config = Qwen3NextConfig


FAMILY: Final = Family(
    "qwen3_next",
    Qwen3Next,
    Support(
        tensor_parallel={
            **QWEN3_HYBRID,
            **GATED_MLP,
            "model.layers.*.linear_attn.in_proj_qkvz": "colwise_gather_output",
            "model.layers.*.linear_attn.in_proj_ba": "colwise_gather_output",
        },
        uses_weights_within=True,
    ),
)
