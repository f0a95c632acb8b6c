"""Hunyuan-A13B (models/hunyuan_v1_moe/modeling_hunyuan_v1_moe.py): Llama with norms over each head of q and k after they are
rotated, and with experts beside a shared one in all layers.

transformers makes the routers in fp32. Here they have the model's dtype, as in a loaded checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.blocks import rms_norm
from memcalc.families.base.config import Activation, Count, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.experts import REFUSED, Experts, SoftmaxRouter, check_experts, check_given
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import ONLY_EXPERTS
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.base.sparse import gated_mlp_weights
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import Attended


@dataclass(frozen=True, kw_only=True)
class HunYuanMoEV1Config(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/hunyuan_v1_moe/configuration_hunyuan_v1_moe.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_experts_per_tok": "moe_topk",
        "num_local_experts": "num_experts",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 290943
    pad_token_id: int | None = 0
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
    num_experts: Count = 1
    moe_topk: Count | list[Count] = 1

    @property
    def experts_per_token(self) -> int:
        """Return the number of experts per token. The field has one number for all layers or one for each."""
        return self.moe_topk if isinstance(self.moe_topk, int) else self.moe_topk[0]

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_given(self, "head_dim")
        if isinstance(self.moe_topk, list):
            if len(self.moe_topk) < self.num_hidden_layers:
                raise ValueError(f"moe_topk has {len(self.moe_topk)} entries for {self.num_hidden_layers} layers")
            if len(set(self.moe_topk)) > 1:
                raise ValueError("moe_topk differs between layers, which is not modelled; allowed: one number for all")
        check_experts(self, "num_experts", "hidden_size", "intermediate_size", per_token="experts_per_token")


class HunYuanMoEV1(RouterOutputs):
    """The program of HunYuanMoEV1ForCausalLM."""

    Config = HunYuanMoEV1Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.experts_per_token, config.num_experts)
        per_token, experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.router = SoftmaxRouter(experts, per_token, self.hidden, normalised=True)
        self.experts = Experts(experts, per_token, self.hidden, self.ffn, config.hidden_act)

    def attention_weights(self) -> Iterator[Weight]:
        yield from super().attention_weights()
        yield Weight("self_attn.query_layernorm.weight", (self.head_dim,), "norm")
        yield Weight("self_attn.key_layernorm.weight", (self.head_dim,), "norm")

    def mlp_weights(self) -> Iterator[Weight]:
        yield from self.router.weights("mlp.gate.wg")
        yield from self.experts.weights("mlp.experts")
        yield from gated_mlp_weights("mlp.shared_mlp", self.hidden, self.ffn)

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Attended:
        query_states, key_states, value_states = self.qkv(m, hidden_states)
        cos, sin = rotary
        query_states, key_states = self.rotate(query_states, key_states, cos, sin)
        query_states = rms_norm(m / "query_layernorm", query_states)
        key_states = rms_norm(m / "key_layernorm", key_states)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim))
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of HunYuanMoEV1Moe."""
        batch, seq, hidden = x.shape
        hidden_states_mlp = super().mlp(m / "shared_mlp", x)
        hidden_states = view(x, merge(batch, seq), hidden)
        _logits, routing_weights, selected_experts = self.router.forward(m / "gate" / "wg", hidden_states)
        final_hidden_states = self.experts.forward(m / "experts", hidden_states, selected_experts, routing_weights)
        return reshape(final_hidden_states, batch, seq, hidden) + hidden_states_mlp


FAMILY: Final = Family(
    "hunyuan_v1_moe",
    HunYuanMoEV1,
    Support(
        tensor_parallel=ONLY_EXPERTS, context_parallel=True, ulysses=True, ulysses_wants_head_dim=True, stages=True
    ),
)
