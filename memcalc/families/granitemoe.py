"""Granite-MoE (models/granitemoe/modeling_granitemoe.py): Llama with experts in all layers, and with embeddings, residuals
and logits scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, scale, softmax
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.routing import topk
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.config import Activation, Count, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.experts import REFUSED, Experts, check_experts
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import GRANITE_MOE
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/granitemoe/configuration_granitemoe.py."""

    given: ClassVar[Sequence[str]] = ()
    null_head_dim: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 32000
    hidden_size: Count = 4096
    intermediate_size: Count = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    embedding_multiplier: float | None = 1.0
    logits_scaling: float | None = 1.0
    residual_multiplier: float | None = 1.0
    attention_multiplier: float | None = 1.0
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        if self.num_local_experts:
            check_experts(self, "num_local_experts", "hidden_size", "intermediate_size")


class GraniteMoe(RouterOutputs):
    """The program of GraniteMoeForCausalLM."""

    Config = GraniteMoeConfig
    balances = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.num_experts_per_tok, config.num_local_experts)
        self.router = GraniteRouter(
            Dim("experts", self.routed[1]), Dim("experts_per_token", self.routed[0]), self.hidden
        )
        self.experts = Experts(self.router.count, self.router.per_token, self.hidden, self.ffn, config.hidden_act)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield Weight("input_layernorm.weight", (self.hidden,), "norm")
        yield Weight("post_attention_layernorm.weight", (self.hidden,), "norm")
        yield from self.mlp_weights()

    def mlp_weights(self) -> Iterator[Weight]:
        yield from self.router.weights("block_sparse_moe.router")
        yield from self.experts.weights("block_sparse_moe.experts")

    def embed(self, m: Module, ids: Tensor) -> Tensor:
        return scale(super().embed(m, ids), "mul", "scaled embeddings")

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        return scale(super().head(root, hidden_states), "div", "scaled logits")

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + hidden_states * 0.22
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states, _moe_hidden_states = self.feed_forward(m, hidden_states)
        return residual + hidden_states * 0.22

    def feed_forward(self, m: Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output, and the experts' output, which the layer's frame keeps."""
        moe_hidden_states = self.sparse_mlp(m / "block_sparse_moe", x)
        return moe_hidden_states, moe_hidden_states

    @module
    def sparse_mlp(self, m: Module, layer_input: Tensor) -> Tensor:
        """Return the output of GraniteMoeMoE."""
        batch, seq, hidden = layer_input.shape
        hidden_states = reshape(layer_input, merge(batch, seq), hidden)
        _logits, top_k_weights, top_k_index = self.router.forward(m / "router", hidden_states)
        layer_output = self.experts.forward(m / "experts", hidden_states, top_k_index, top_k_weights)
        return view(layer_output, batch, seq, hidden)


@dataclass(frozen=True)
class GraniteRouter:
    """A module like GraniteMoeTopKRouter: its softmax is over the chosen logits."""

    count: Dim
    per_token: Dim
    hidden: Dim

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", (self.count, self.hidden), "router")

    @module
    def forward(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's logits, the weights of the chosen experts, and their indices."""
        router_logits = cast(linear(hidden_states, m.weight()), fp32)
        top_k_logits, top_k_index = topk(router_logits, self.per_token)
        top_k_weights = cast(softmax(top_k_logits), hidden_states.dtype)
        m.run.collect(m.layer, router_logits)
        return router_logits, top_k_weights, top_k_index


FAMILY: Final = Family(
    "granitemoe", GraniteMoe, Support(tensor_parallel=GRANITE_MOE, context_parallel=True, ulysses=True)
)
