"""ERNIE 4.5 (models/ernie4_5_moe/modeling_ernie4_5_moe.py): Llama with experts from some layer on, rotated in fp32 by pairs of
neighbouring dims.

transformers leaves the routers of a loaded checkpoint in fp32. Here they have the model's dtype, as after `model.to(dtype)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, softmax, sum_last
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.routing import div, gather, topk
from memcalc.core.ops.selection import clamp
from memcalc.core.ops.shape import reshape, unsqueeze, view
from memcalc.core.tensor import Autocast
from memcalc.families.base.blocks import rotary_embedding
from memcalc.families.base.config import Activation, Bounds, Count, Layers, RotaryConfig, check_divides
from memcalc.families.base.experts import REFUSED, Experts, check_experts
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.rotary import repeat_pairs, rotate_pairs
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import SparseLayers, gated_mlp_weights
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class Ernie4_5_MoeConfig(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/ernie4_5_moe/configuration_ernie4_5_moe.py."""

    given: ClassVar[Sequence[str]] = ()
    null_head_dim: ClassVar[bool] = False
    attribute_map: ClassVar[Mapping[str, str]] = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED
    attention_dropout: ClassVar[float] = 0.0

    vocab_size: Count = 103424
    pad_token_id: int | None = 0
    hidden_size: Count = 2560
    intermediate_size: Count = 12288
    num_hidden_layers: Layers = 28
    num_attention_heads: Count = 20
    num_key_value_heads: Count = 4
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 131072
    tie_word_embeddings: bool = True
    use_bias: bool | None = False
    moe_intermediate_size: Count = 1536
    moe_k: Count = 6
    moe_num_experts: Count = 64
    moe_num_shared_experts: Annotated[int, Bounds(ge=0, le=10**7)] = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: Count = 1

    @property
    def attention_bias(self) -> bool:
        return bool(self.use_bias)

    @property
    def mlp_bias(self) -> bool:
        return bool(self.use_bias)

    @property
    def lm_head_bias(self) -> bool:
        return bool(self.use_bias)

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "moe_num_experts", "hidden_size", "moe_intermediate_size", per_token="moe_k")


class Ernie4_5_Moe(SparseLayers):
    """The program of Ernie4_5_MoeForCausalLM."""

    Config = Ernie4_5_MoeConfig
    balances = True

    @property
    def untrained(self) -> Collection[str]:
        """Return the biases that balance the experts: they get no gradient."""
        return ("model.layers.*.mlp.gate.moe_statics.e_score_correction_bias",)

    @property
    def frozen(self) -> Collection[str]:
        return self.untrained

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.moe_k, config.moe_num_experts)
        self.router = ErnieRouter(Dim("experts", self.routed[1]), Dim("experts_per_token", self.routed[0]), self.hidden)
        expert_ffn = Dim("expert_ffn", config.moe_intermediate_size)
        self.experts = Experts(self.router.count, self.router.per_token, self.hidden, expert_ffn, config.hidden_act)
        self.shared_ffn = Dim("shared_ffn", config.moe_intermediate_size * config.moe_num_shared_experts)

    def sparse(self, i: int) -> bool:
        config = self.config
        last = config.num_hidden_layers - 1 if config.moe_layer_end_index == -1 else config.moe_layer_end_index
        return (i + 1) % config.moe_layer_interval == 0 and config.moe_layer_start_index <= i <= last

    def sparse_weights(self) -> Iterator[Weight]:
        yield from self.router.weights("mlp.gate")
        yield from self.experts.weights("mlp.experts")
        if self.shared_ffn.size:
            bias = self.config.mlp_bias
            yield from gated_mlp_weights("mlp.shared_experts", self.hidden, self.shared_ffn, bias=bias)

    def position_embeddings(self, m: Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_embedding(m, positions, self.rotary_dim, self.rope_type, dtype=fp32)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
        cos, sin = repeat_pairs(cos), repeat_pairs(sin)
        q_embed = (cast(q, fp32) * cos) + (cast(rotate_pairs(q), fp32) * sin)
        k_embed = (cast(k, fp32) * cos) + (cast(rotate_pairs(k), fp32) * sin)
        return cast(q_embed, q.dtype), cast(k_embed, k.dtype)

    @module
    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of Ernie4_5_MoeSparseMoeBlock."""
        batch, seq, hidden = x.shape
        hidden_states = view(x, merge(batch, seq), hidden)
        shared_output = self.dense_mlp(m / "shared_experts", hidden_states) if self.shared_ffn.size else None
        _logits, top_k_weights, top_k_index = self.router.forward(m / "gate", hidden_states)
        final_hidden_states = self.experts.forward(m / "experts", hidden_states, top_k_index, top_k_weights)
        if shared_output is not None:
            final_hidden_states = final_hidden_states + shared_output
        return reshape(final_hidden_states, batch, seq, hidden)


@dataclass(frozen=True)
class ErnieRouter:
    """A module like Ernie4_5_MoeTopKRouter: corrected probabilities choose the experts, whose weights are normalised to 1."""

    count: Dim
    per_token: Dim
    hidden: Dim

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", (self.count, self.hidden), "router")
        yield Weight(f"{path}.moe_statics.e_score_correction_bias", (ONE_DIM, self.count), "router")

    @module
    def forward(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's logits, the weights of the chosen experts, and their indices."""
        with Autocast(m.run.memory, None):
            router_logits = linear(cast(hidden_states, fp32), cast(m.weight(), fp32))
            routing_weights = softmax(router_logits)
            corrected = routing_weights + reshape((m / "moe_statics").weight("e_score_correction_bias"), self.count)
            _values, selected_experts = topk(corrected, self.per_token)
            del corrected  # in the real code an argument without a name
            routing_weights = gather(routing_weights, selected_experts)
            routing_weights = div(routing_weights, clamp(sum_last(routing_weights), 1))
        m.run.collect(m.layer, router_logits)
        return router_logits, cast(routing_weights, hidden_states.dtype), selected_experts


FAMILY: Final = Family("ernie4_5_moe", Ernie4_5_Moe, Support(ulysses=True))
