"""Qwen3.5 with experts (models/qwen3_5_moe/modeling_qwen3_5_moe.py), the language model: experts in all layers, beside a gated
shared one.

As `delta` says, the path in plain torch, as runs without the packages fla and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.families.base.config import Count, CountOrNone, Layers
from memcalc.families.base.experts import REFUSED, check_experts
from memcalc.families.base.plans import PROJECTED_APART, QWEN3_HYBRID
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import GatedSharedExpert
from memcalc.families.base.support import Family, Preset, Support
from memcalc.families.qwen3_5_text import Qwen35Config, Qwen35Layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeTextConfig(RouterOutputsConfig, Qwen35Config):
    """The fields and defaults of models/qwen3_5_moe/configuration_qwen3_5_moe.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED
    decoder_sparse_step: ClassVar[int] = 1
    mlp_only_layers: ClassVar[None] = None
    norm_topk_prob: ClassVar[bool] = True

    hidden_size: Count = 2048
    num_hidden_layers: Layers = 40
    num_key_value_heads: Count = 2
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: CountOrNone = 512
    num_experts_per_tok: Count = 8
    num_experts: Count = 256

    @property
    def intermediate_size(self) -> int:
        """Return the width of the shared expert: no layer has an MLP instead of experts."""
        return self.shared_expert_intermediate_size

    def check(self) -> None:
        super().check()
        check_experts(self, "num_experts", "hidden_size", "moe_intermediate_size")


class Qwen35MoeText(Qwen35Layers, GatedSharedExpert):
    """The program of Qwen3_5MoeForCausalLM."""

    Config = Qwen35MoeTextConfig


FAMILY: Final = Family(
    "qwen3_5_moe_text",
    Qwen35MoeText,
    Support(
        tensor_parallel={**QWEN3_HYBRID, **PROJECTED_APART},
        uses_weights_within=True,
        auto_ep=Preset(normalises=True, shared=True, gated=True, returns_logits=True),
    ),
)
