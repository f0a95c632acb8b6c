"""GLM-4.5 (models/glm4_moe/modeling_glm4_moe.py): DeepSeek-V3's layers with grouped-query attention that rotates a part of
each head.
"""

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
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.normed_heads import NormedHeads
from memcalc.families.base.plans import EXPERTS, LLAMA, SHARED_EXPERTS
from memcalc.families.base.rotary import apply_partial_rotary_pos_emb
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import GroupedSparseLayers
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/glm4_moe/configuration_glm4_moe.py."""

    null_head_dim: ClassVar[bool] = False
    rotates_part: ClassVar[bool] = True
    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 151552
    hidden_size: Count = 4096
    intermediate_size: Count = 10944
    num_hidden_layers: Layers = 46
    num_attention_heads: Count = 96
    num_key_value_heads: Count = 8
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 131072
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    moe_intermediate_size: Count = 1408
    num_experts_per_tok: Count = 8
    n_shared_experts: CountOrNone = 1
    n_routed_experts: Count = 128
    n_group: Count = 1
    topk_group: Count = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    use_qk_norm: bool = False

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with the default of `partial_rotary_factor` if it is left out; null rotates whole heads."""
        named = super().renamed(config)
        if named.get("partial_rotary_factor", 0.5) is None:
            named["partial_rotary_factor"] = 1.0
        return named

    @property
    def default_rotary_factor(self) -> float:
        return 0.5 if self.partial_rotary_factor is None else self.partial_rotary_factor

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "n_routed_experts", "hidden_size", "moe_intermediate_size")
        check_groups(self, "n_routed_experts")


class Glm4Moe(NormedHeads, GroupedSparseLayers):
    """The program of Glm4MoeForCausalLM."""

    Config = Glm4MoeConfig

    def attention_weights(self) -> Iterator[Weight]:
        for weight in super().attention_weights():
            if weight.name != "self_attn.o_proj.bias" and (self.config.use_qk_norm or weight.component != "norm"):
                yield weight

    def head_norm(self, m: Module, x: Tensor) -> Tensor:
        return super().head_norm(m, x) if self.config.use_qk_norm else x

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_partial_rotary_pos_emb(q, k, cos, sin)


FAMILY: Final = Family(
    "glm4_moe",
    Glm4Moe,
    Support(tensor_parallel={**LLAMA, **EXPERTS, **SHARED_EXPERTS}, context_parallel=True, ulysses=True, stages=True),
)
