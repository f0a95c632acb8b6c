"""A.X-K1 (models/axk1/modeling_axk1.py): DeepSeek-V3 with a norm after its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.families.base.blocks import rms_norm
from memcalc.families.base.config import Activation, Count, CountOrNone, Layers, Probability
from memcalc.families.base.experts import REFUSED, check_experts, check_groups
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.plans import LATENT
from memcalc.families.base.sparse import MlpTypesConfig
from memcalc.families.base.support import Family, Support
from memcalc.families.deepseek_v3 import DeepseekV3, LatentConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class AXK1Config(MlpTypesConfig, LatentConfig):
    """The fields and defaults of models/axk1/configuration_axk1.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 163840
    hidden_size: Count = 7168
    intermediate_size: Count = 18432
    moe_intermediate_size: Count = 2048
    num_hidden_layers: Layers = 61
    num_attention_heads: Count = 64
    num_key_value_heads: Count = 64
    n_shared_experts: CountOrNone = 1
    n_routed_experts: Count = 192
    q_lora_rank: Count = 1536
    n_group: Count = 8
    topk_group: Count = 4
    num_experts_per_tok: Count = 8
    first_k_dense_replace: int = 1
    moe_layer_freq: Count = 1
    norm_topk_prob: bool | None = True
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 32768
    tie_word_embeddings: bool = False
    rope_interleave: bool | None = True
    attention_dropout: Probability = 0.0

    @property
    def default_mlp_types(self) -> Sequence[str]:
        first, every = self.first_k_dense_replace, self.moe_layer_freq
        return ["sparse" if i >= first and i % every == 0 else "dense" for i in range(self.num_hidden_layers)]

    def check(self) -> None:
        super().check()
        check_experts(self, "n_routed_experts", "hidden_size", "moe_intermediate_size")
        check_groups(self, "n_routed_experts")


class AXK1(DeepseekV3):
    """The program of AXK1ForCausalLM."""

    Config = AXK1Config

    def sparse(self, i: int) -> bool:
        return self.config.mlp_types[i] == "sparse"

    def sparse_weights(self) -> Iterator[Weight]:
        yield from super().sparse_weights()
        yield Weight("mlp.post_mlp_layernorm.weight", (self.hidden,), "norm")

    def of_all_experts(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of AXK1MoE."""
        return rms_norm(m / "post_mlp_layernorm", hidden_states)


FAMILY: Final = Family("axk1", AXK1, Support(tensor_parallel=LATENT, context_parallel=True, stages=True))
