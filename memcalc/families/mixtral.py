"""Mixtral (models/mixtral/modeling_mixtral.py): Mistral with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.config import Activation, Count, Decimal, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.experts import REFUSED, Experts, SoftmaxRouter, check_experts
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import ATTENTION, ENDS, EXPERTS
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.base.support import Family, Preset, Support
from memcalc.families.mistral import Mistral

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/mixtral/configuration_mixtral.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {**REFUSED, "router_jitter_noise": (0.0,)}

    vocab_size: Count = 32000
    pad_token_id: int | None = None
    hidden_size: Count = 4096
    intermediate_size: Count = 14336
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 8
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096 * 32
    tie_word_embeddings: bool = False
    sliding_window: Count | None = None
    attention_dropout: Probability = 0.0
    num_experts_per_tok: Count = 2
    num_local_experts: Count = 8
    router_jitter_noise: Decimal = 0.0

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_local_experts", "hidden_size", "intermediate_size")


class Mixtral(RouterOutputs, Mistral):
    """The program of MixtralForCausalLM."""

    Config = MixtralConfig
    balances = True
    router_name = "gate"
    router: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.num_experts_per_tok, config.num_local_experts)
        per_token, experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.router = SoftmaxRouter(experts, per_token, self.hidden, normalised=True, in_fp32=True)
        self.experts = Experts(experts, per_token, self.hidden, self.ffn, config.hidden_act)

    def mlp_weights(self) -> Iterator[Weight]:
        yield from self.router.weights(f"mlp.{self.router_name}")
        yield from self.experts.weights("mlp.experts")

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of MixtralSparseMoeBlock."""
        batch, seq, hidden = x.shape
        hidden_states = view(x, merge(batch, seq), hidden)
        _logits, top_k_weights, top_k_index = self.router.forward(m / self.router_name, hidden_states)
        hidden_states = self.experts.forward(m / "experts", hidden_states, top_k_index, top_k_weights)
        return reshape(hidden_states, batch, seq, hidden)


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import Experts, llama_like

    experts = Experts(
        count=config.num_local_experts, per_token=config.num_experts_per_tok, ffn=config.intermediate_size
    )
    return llama_like(config, experts=experts)


FAMILY: Final = Family(
    "mixtral",
    Mixtral,
    Support(
        tensor_parallel={**ENDS, **ATTENTION, **EXPERTS},
        context_parallel=True,
        ulysses=True,
        ulysses_wants_head_dim=True,
        stages=True,
        zero3_leaf=True,
        auto_ep=Preset(normalises=True),
        chunked_loss=True,
        architecture=_architecture,
    ),
)
