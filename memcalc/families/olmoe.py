"""OLMoE (models/olmoe/modeling_olmoe.py): Llama with experts in all layers and a norm over the whole of q and of k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.selection import clamp_
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.config import Activation, Count, Decimal, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.experts import REFUSED, Experts, SoftmaxRouter, check_experts
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.normed_projections import NormedProjections
from memcalc.families.base.plans import ENDS, EXPERTS, GATHERED_ATTENTION
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/olmoe/configuration_olmoe.py."""

    null_head_dim: ClassVar[bool] = False
    attribute_map: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 50304
    pad_token_id: int | None = 1
    hidden_size: Count = 2048
    intermediate_size: Count = 2048
    num_hidden_layers: Layers = 16
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    clip_qkv: Decimal | None = None
    num_experts_per_tok: Count = 8
    num_experts: Count = 64
    norm_topk_prob: bool = False

    def check(self) -> None:
        super().check()
        self.check_heads()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_experts", "hidden_size", "intermediate_size")

    def check_heads(self) -> None:
        """Raise ValueError if q is not as wide as the hidden states: its norm is."""
        check_divides(self, "hidden_size", "num_attention_heads")
        width = self.hidden_size // self.num_attention_heads
        if self.head_dim not in (None, width):
            raise ValueError(f"head_dim {self.head_dim} has to be hidden_size/num_attention_heads {width}")


class Olmoe(RouterOutputs, NormedProjections):
    """The program of OlmoeForCausalLM."""

    Config = OlmoeConfig
    balances = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.num_experts_per_tok, config.num_experts)
        per_token, experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.router = SoftmaxRouter(experts, per_token, self.hidden, normalised=config.norm_topk_prob)
        self.experts = Experts(experts, per_token, self.hidden, self.ffn, config.hidden_act)

    def mlp_weights(self) -> Iterator[Weight]:
        yield from self.router.weights("mlp.gate")
        yield from self.experts.weights("mlp.experts")

    def clipped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.config.clip_qkv is None:
            return q, k, v
        return clamp_(q, 2), clamp_(k, 2), clamp_(v, 2)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of OlmoeSparseMoeBlock."""
        batch, seq, hidden = x.shape
        hidden_states = view(x, merge(batch, seq), hidden)
        _logits, top_k_weights, top_k_index = self.router.forward(m / "gate", hidden_states)
        final_hidden_states = self.experts.forward(m / "experts", hidden_states, top_k_index, top_k_weights)
        return reshape(final_hidden_states, batch, seq, hidden)


FAMILY: Final = Family(
    "olmoe",
    Olmoe,
    Support(
        tensor_parallel={**ENDS, **GATHERED_ATTENTION, **EXPERTS},
        tensor_parallel_without="clip_qkv",
        context_parallel=True,
        ulysses=True,
        stages=True,
    ),
)
