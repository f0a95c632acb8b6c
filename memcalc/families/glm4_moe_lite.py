"""GLM-4.7-Flash (models/glm4_moe_lite/modeling_glm4_moe_lite.py): DeepSeek-V3, its dense layers named one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.families.base.config import Activation, Count, CountOrNone, Layers, Probability
from memcalc.families.base.experts import REFUSED, check_experts, check_groups
from memcalc.families.base.plans import SPLIT_LATENT
from memcalc.families.base.sparse import MlpTypesConfig
from memcalc.families.base.support import Family, Support
from memcalc.families.deepseek_v3 import DeepseekV3, LatentConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(MlpTypesConfig, LatentConfig):
    """The fields and defaults of models/glm4_moe_lite/configuration_glm4_moe_lite.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "head_dim": "qk_rope_head_dim",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {**REFUSED, "partial_rotary_factor": (None, 1, 1.0)}

    vocab_size: Count = 154880
    hidden_size: Count = 2048
    intermediate_size: Count = 10240
    moe_intermediate_size: Count = 1536
    num_hidden_layers: Layers = 47
    num_attention_heads: Count = 20
    num_key_value_heads: Count = 20
    n_shared_experts: CountOrNone = 1
    n_routed_experts: Count = 64
    q_lora_rank: Count | None = 768
    qk_nope_head_dim: Count = 192
    v_head_dim: Count = 256
    n_group: Count = 1
    topk_group: Count = 1
    num_experts_per_tok: Count = 4
    norm_topk_prob: bool = True
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 202752
    tie_word_embeddings: bool = False
    rope_interleave: bool = True
    attention_dropout: Probability = 0.0

    def check(self) -> None:
        super().check()
        check_experts(self, "n_routed_experts", "hidden_size", "moe_intermediate_size")
        check_groups(self, "n_routed_experts")
        if self.rope["partial_rotary_factor"] != 1:
            raise ValueError(f"partial_rotary_factor {self.rope['partial_rotary_factor']!r} fails; allowed: 1.0")


class Glm4MoeLite(DeepseekV3):
    """The program of Glm4MoeLiteForCausalLM."""

    Config = Glm4MoeLiteConfig

    def sparse(self, i: int) -> bool:
        return self.config.mlp_types[i] == "sparse"


FAMILY: Final = Family(
    "glm4_moe_lite", Glm4MoeLite, Support(tensor_parallel=SPLIT_LATENT, context_parallel=True, stages=True)
)
