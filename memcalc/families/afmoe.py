"""Trinity (models/afmoe/modeling_afmoe.py): four norms a layer, gated attention that rotates in windows only, and sigmoids that
choose among experts beside shared ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, scale, sigmoid, sum_last
from memcalc.core.ops.routing import div, gather, topk
from memcalc.core.ops.shape import transpose, view
from memcalc.families.base.blocks import Attended, rms_norm_in_fp32
from memcalc.families.base.config import Activation, Count, CountOrNone, Layers, Probability, check_divides
from memcalc.families.base.experts import REFUSED, Experts, check_experts
from memcalc.families.base.layer_types import LayerTypesConfig
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.normed_heads import NormedHeads
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import SparseLayers, gated_mlp_weights
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class AfmoeConfig(RouterOutputsConfig, LayerTypesConfig):
    """The fields and defaults of models/afmoe/configuration_afmoe.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 200192
    hidden_size: Count = 2048
    intermediate_size: Count = 6144
    moe_intermediate_size: Count = 1408
    num_hidden_layers: Layers = 32
    num_dense_layers: int = 1
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = None
    head_dim: Count = 128
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 16384
    tie_word_embeddings: bool = False
    num_experts: Count = 64
    num_experts_per_tok: Count = 6
    num_shared_experts: CountOrNone = 2
    global_attn_every_n_layers: Count = 4
    sliding_window: Count = 1024
    attention_dropout: Probability = 0.0
    attention_bias: bool = False
    mup_enabled: bool | None = False

    @property
    def kinds(self) -> list[str]:
        """Return the kind of attention of each layer."""
        every = self.global_attn_every_n_layers
        if self.layer_types is not None:
            return list(self.layer_types)
        return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(self.num_hidden_layers)]

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_experts", "hidden_size", "moe_intermediate_size")


class Afmoe(SparseLayers, NormedHeads):
    """The program of AfmoeForCausalLM."""

    Config = AfmoeConfig

    @property
    def untrained(self) -> Collection[str]:
        """Return the biases that balance the experts: they get no gradient."""
        return ("model.layers.*.mlp.expert_bias",)

    @property
    def frozen(self) -> Collection[str]:
        return self.untrained

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kinds: list[str] = config.kinds
        self.routed = (config.num_experts_per_tok, config.num_experts)
        self.per_token, experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        expert_ffn = Dim("expert_ffn", config.moe_intermediate_size)
        self.experts = Experts(experts, self.per_token, self.hidden, expert_ffn, config.hidden_act)
        self.shared_ffn = Dim("shared_ffn", config.moe_intermediate_size * config.num_shared_experts)

    # --- weights and layers

    def attention_weights(self) -> Iterator[Weight]:
        yield from super().attention_weights()
        q = merge(self.heads, self.head_dim)
        yield from linear_weights("self_attn.gate_proj", self.hidden, q, "attention", bias=False)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        for name in ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"):
            yield Weight(f"{name}.weight", (self.hidden,), "norm")
        yield from self.sparse_weights() if self.sparse(i) else self.mlp_weights()

    def sparse_weights(self) -> Iterator[Weight]:
        yield Weight("mlp.expert_bias", (self.experts.count,), "router")
        yield from linear_weights("mlp.router.gate", self.hidden, self.experts.count, "router", bias=False)
        yield from gated_mlp_weights("mlp.shared_experts", self.hidden, self.shared_ffn)
        yield from self.experts.weights("mlp.experts")

    def sparse(self, i: int) -> bool:
        return i >= self.config.num_dense_layers

    def variant(self, i: int) -> Hashable:
        return super().variant(i), self.kinds[i]

    def layer_kind(self, i: int) -> str:
        return self.kinds[i]

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        full = causal_mask(run)
        return {"full_attention": full, "sliding_attention": causal_mask(run, self.config.sliding_window)}

    # --- forward

    def before_layers(self, m: Module, hidden_states: Tensor) -> Tensor:
        return scale(hidden_states, "mul", "scaled embeddings") if self.config.mup_enabled else hidden_states

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return rms_norm_in_fp32(m, hidden_states)

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "pre_mlp_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        hidden_states = self.norm(m / "post_mlp_layernorm", hidden_states)
        return residual + hidden_states

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Attended:
        batch, seq, _ = hidden_states.shape
        query_states = view((m / "q_proj").linear(hidden_states), batch, seq, self.heads, self.head_dim)
        key_states = view((m / "k_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        value_states = view((m / "v_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        gate_states = (m / "gate_proj").linear(hidden_states)
        query_states = transpose(self.norm(m / "q_norm", query_states), 1, 2)
        key_states = transpose(self.norm(m / "k_norm", key_states), 1, 2)
        value_states = transpose(value_states, 1, 2)
        assert m.layer is not None
        if self.kinds[m.layer] == "sliding_attention":
            cos, sin = rotary
            query_states, key_states = self.rotate(query_states, key_states, cos, sin)
        key_states, value_states = m.cached(key_states, value_states)
        output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        output = view(output, batch, seq, merge(self.heads, self.head_dim))
        output = output * sigmoid(gate_states)
        attn_output = (m / "o_proj").linear(output)
        return attn_output, attn_weights

    @module
    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of AfmoeSparseMoeBlock."""
        batch, seq, hidden = x.shape
        hidden_states_flat = view(x, merge(batch, seq), hidden)
        _logits, top_scores, selected_experts = self.router(m / "router", x, m.weight("expert_bias"))
        shared_output = view(self.dense_mlp(m / "shared_experts", hidden_states_flat), batch, seq, hidden)
        routed_output = self.experts.forward(m / "experts", hidden_states_flat, selected_experts, top_scores)
        return shared_output + view(routed_output, batch, seq, hidden)

    @module
    def router(self, m: Module, hidden_states: Tensor, expert_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of AfmoeTokenChoiceRouter."""
        batch, seq, hidden = hidden_states.shape
        hidden_states = view(hidden_states, merge(batch, seq), hidden)
        router_logits = cast((m / "gate").linear(hidden_states), fp32)
        scores = sigmoid(router_logits)
        _values, selected_experts = topk(scores + expert_bias, self.per_token)
        top_scores = gather(scores, selected_experts)
        denominator = sum_last(top_scores) + 1e-20
        top_scores = div(top_scores, denominator)
        top_scores = top_scores * 1.0
        m.run.collect(m.layer, router_logits)
        return router_logits, top_scores, selected_experts


FAMILY: Final = Family("afmoe", Afmoe, Support(ulysses=True, ulysses_wants_head_dim=True))
