"""Solar Open (models/solar_open/modeling_solar_open.py): Llama with DeepSeek-V3's experts in all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.families.base.config import (
    Activation,
    Count,
    CountOrNone,
    Layers,
    Probability,
    RotaryConfig,
    check_divides,
)
from memcalc.families.base.experts import REFUSED, check_experts, check_groups
from memcalc.families.base.plans import ATTENTION, ENDS, EXPERTS
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import GroupedSparseLayers
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.families.base.module import Weight


@dataclass(frozen=True, kw_only=True)
class SolarOpenConfig(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/solar_open/configuration_solar_open.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED
    first_k_dense_replace: ClassVar[int] = 0

    vocab_size: Count = 196608
    hidden_size: Count = 4096
    num_hidden_layers: Layers = 48
    num_attention_heads: Count = 64
    num_key_value_heads: Count = 8
    head_dim: Count = 128
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 131072
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    moe_intermediate_size: Count = 1280
    num_experts_per_tok: Count = 8
    n_shared_experts: CountOrNone = 1
    n_routed_experts: Count = 128
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True

    @property
    def intermediate_size(self) -> int:
        """Return the width of an expert: no layer has an MLP instead of experts."""
        return self.moe_intermediate_size

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "n_routed_experts", "hidden_size", "moe_intermediate_size")
        check_groups(self, "n_routed_experts")


class SolarOpen(GroupedSparseLayers):
    """The program of SolarOpenForCausalLM."""

    Config = SolarOpenConfig

    def attention_weights(self) -> Iterator[Weight]:
        return (w for w in super().attention_weights() if w.name != "self_attn.o_proj.bias")


FAMILY: Final = Family(
    "solar_open",
    SolarOpen,
    Support(tensor_parallel={**ENDS, **ATTENTION, **EXPERTS}, context_parallel=True, ulysses=True, stages=True),
)
