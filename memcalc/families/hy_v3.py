"""Hunyuan 3 (models/hy_v3/modeling_hy_v3.py): Llama with norms over heads, and sigmoids that choose among experts beside a
shared one, added up in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, sigmoid, sum_last
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.routing import div, gather, topk
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.config import Activation, Count, CountOrNone, DecimalProbability, Layers, check_divides
from memcalc.families.base.experts import REFUSED, Experts, SigmoidRouter, check_experts
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.normed_heads import NormedHeads
from memcalc.families.base.plans import EXPERTS, LLAMA, NORMED_HEADS, SHARED_EXPERTS
from memcalc.families.base.sparse import MlpTypesConfig, SparseLayers, gated_mlp_weights
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class HYV3Config(MlpTypesConfig):
    """The fields and defaults of models/hy_v3/configuration_hy_v3.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 120832
    hidden_size: Count = 4096
    intermediate_size: Count = 13312
    num_hidden_layers: Layers = 80
    num_attention_heads: Count = 64
    num_key_value_heads: Count = 8
    head_dim: Count = 128
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 131072
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: DecimalProbability = 0.0
    mlp_bias: bool = False
    num_experts: Count = 192
    num_experts_per_tok: Count = 8
    num_shared_experts: CountOrNone = 1
    moe_intermediate_size: Count = 1536
    enable_moe_fp32_combine: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_experts", "hidden_size", "moe_intermediate_size")


class HYV3Router(SigmoidRouter):
    """A module like HYV3TopKRouter, which works in fp32."""

    @module
    def forward(self, m: Module, hidden_states: Tensor, correction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = reshape(hidden_states, *hidden_states.shape)
        router_logits = linear(cast(hidden_states, fp32), cast(m.weight(), fp32))
        routing_weights = sigmoid(router_logits)
        scores_for_choice = routing_weights + correction
        _values, top_k_index = topk(scores_for_choice, self.per_token)
        top_k_weights = gather(routing_weights, top_k_index)
        top_k_weights = div(top_k_weights, sum_last(top_k_weights) + 1e-20)
        top_k_weights = top_k_weights * 2.826
        m.run.collect(m.layer, router_logits)
        return router_logits, top_k_weights, top_k_index


class HYV3(SparseLayers, NormedHeads):
    """The program of HYV3ForCausalLM."""

    Config = HYV3Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.num_experts_per_tok, config.num_experts)
        self.router = HYV3Router(Dim("experts", self.routed[1]), Dim("experts_per_token", self.routed[0]), self.hidden)
        expert_ffn = Dim("expert_ffn", config.moe_intermediate_size)
        self.experts = Experts(self.router.count, self.router.per_token, self.hidden, expert_ffn, config.hidden_act)
        self.shared_ffn = Dim("shared_ffn", config.moe_intermediate_size * config.num_shared_experts or self.ffn.size)

    def sparse_weights(self) -> Iterator[Weight]:
        yield from self.router.weights("mlp.gate")
        yield from self.experts.weights("mlp.experts")
        yield from gated_mlp_weights("mlp.shared_experts", self.hidden, self.shared_ffn, bias=self.config.mlp_bias)

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        if self.sparse(i):
            yield Buffer("mlp.e_score_correction_bias", (self.experts.count,))

    def buffers(self) -> Iterator[Buffer]:
        yield from self.buffer_stack("model.layers")
        yield from super().buffers()

    @module
    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of HYV3MoE."""
        batch, seq, hidden = x.shape
        hidden_states = view(x, merge(batch, seq), hidden)
        correction = m.buffer("e_score_correction_bias")
        _logits, top_k_weights, top_k_index = self.router.forward(m / "gate", hidden_states, correction)
        routed_output = self.experts.forward(m / "experts", hidden_states, top_k_index, top_k_weights)
        hidden_states = self.combine(m, routed_output, hidden_states)
        return reshape(hidden_states, batch, seq, hidden)

    def combine(self, m: Module, routed_output: Tensor, hidden_states: Tensor) -> Tensor:
        if not self.config.enable_moe_fp32_combine:
            return routed_output + self.dense_mlp(m / "shared_experts", hidden_states)
        return cast(
            cast(routed_output, fp32) + cast(self.dense_mlp(m / "shared_experts", hidden_states), fp32),
            hidden_states.dtype,
        )


FAMILY: Final = Family(
    "hy_v3",
    HYV3,
    Support(
        tensor_parallel={**LLAMA, **NORMED_HEADS, **EXPERTS, **SHARED_EXPERTS},
        context_parallel=True,
        ulysses=True,
        stages=True,
    ),
)
