"""LFM2 with experts (models/lfm2_moe/modeling_lfm2_moe.py) in all but the first layers, chosen by sigmoids.

As LFM2, the path in plain torch, as runs without the package causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.elementwise import sigmoid, sum_last
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.routing import div, gather, topk
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.config import Count, Layers
from memcalc.families.base.experts import REFUSED, Experts, check_experts, check_given
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.plans import FEED_FORWARD
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.base.support import Family, Support
from memcalc.families.lfm2 import Lfm2, ShortConvConfig

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import Rotary


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(RouterOutputsConfig, ShortConvConfig):
    """The fields and defaults of models/lfm2_moe/configuration_lfm2_moe.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    hidden_size: Count = 2048
    intermediate_size: Count = 7168
    moe_intermediate_size: Count = 1792
    num_hidden_layers: Layers = 32
    num_dense_layers: int = 2
    num_experts_per_tok: Count = 4
    num_experts: Count = 32
    use_expert_bias: bool = True
    norm_topk_prob: bool = True

    def check(self) -> None:
        super().check()
        check_given(self, "layer_types")
        check_experts(self, "num_experts", "hidden_size", "moe_intermediate_size")


class Lfm2Moe(RouterOutputs, Lfm2):
    """The program of Lfm2MoeForCausalLM."""

    Config = Lfm2MoeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.num_experts_per_tok, config.num_experts)
        per_token, experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.experts = Experts(experts, per_token, self.hidden, Dim("expert_ffn", config.moe_intermediate_size), "silu")

    def mlp_width(self) -> int:
        return self.config.intermediate_size

    def sparse(self, i: int) -> bool:
        """Return True if layer `i` has experts."""
        return i >= self.config.num_dense_layers

    def variant(self, i: int) -> Hashable:
        return super().variant(i), self.sparse(i)

    def feed_forward_weights(self, i: int) -> Iterator[Weight]:
        if not self.sparse(i):
            yield from super().feed_forward_weights(i)
            return
        yield from self.experts.weights("feed_forward.experts")
        yield Weight("feed_forward.gate.weight", (self.experts.count, self.hidden), "router")

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        if self.sparse(i) and self.config.use_expert_bias:
            yield Buffer("feed_forward.expert_bias", (self.experts.count,))

    def buffers(self) -> Iterator[Buffer]:
        yield from self.buffer_stack("model.layers")
        for buffer in self.frequencies():
            yield buffer._replace(name=buffer.name.replace("rotary_emb", "pos_emb"))

    def position_embeddings(self, m: Module, positions: Tensor) -> Rotary:
        return super().position_embeddings(Module(m.run, "model.pos_emb"), positions)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        assert m.layer is not None
        return self.sparse_mlp(m, x) if self.sparse(m.layer) else super().mlp(m, x)

    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of Lfm2MoeSparseMoeBlock."""
        batch, seq, hidden = x.shape
        hidden_states_reshaped = view(x, merge(batch, seq), hidden)
        expert_bias = m.buffer("expert_bias") if self.config.use_expert_bias else None
        _logits, routing_weights, selected_experts = self.router(m / "gate", hidden_states_reshaped, expert_bias)
        final_hidden_states = self.experts.forward(
            m / "experts", hidden_states_reshaped, selected_experts, routing_weights
        )
        return reshape(final_hidden_states, batch, seq, hidden)

    @module
    def router(self, m: Module, hidden_states: Tensor, expert_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of Lfm2MoeTopKRouter."""
        router_logits = linear(hidden_states, m.weight())
        routing_weights = sigmoid(router_logits)
        if expert_bias is None:
            routing_weights, selected_experts = topk(routing_weights, self.experts.per_token)
        else:
            scores_for_routing = routing_weights + expert_bias
            _values, selected_experts = topk(scores_for_routing, self.experts.per_token)
            routing_weights = gather(routing_weights, selected_experts)
        if self.config.norm_topk_prob:
            routing_weights = div(routing_weights, sum_last(routing_weights) + 1e-6)
        routing_weights = routing_weights * 1.0
        m.run.collect(m.layer, router_logits)
        return router_logits, routing_weights, selected_experts


FAMILY: Final = Family("lfm2_moe", Lfm2Moe, Support(tensor_parallel=FEED_FORWARD))
