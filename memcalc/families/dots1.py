"""dots.llm1 (models/dots1/modeling_dots1.py): DeepSeek-V3's layers with Qwen3's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.families.base.config import Activation, Count, CountOrNone, Layers, Probability, check_divides
from memcalc.families.base.experts import REFUSED, check_experts, check_given, check_groups
from memcalc.families.base.layer_types import LayerTypesConfig
from memcalc.families.base.plans import EXPERTS, LLAMA, NORMED_HEADS, SHARED_EXPERTS
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import GroupedSparseLayers
from memcalc.families.base.support import Family, Support
from memcalc.families.qwen3 import Qwen3

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class Dots1Config(RouterOutputsConfig, LayerTypesConfig):
    """The fields and defaults of models/dots1/configuration_dots1.py."""

    null_head_dim: ClassVar[bool] = False
    attribute_map: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 152064
    hidden_size: Count = 4608
    intermediate_size: Count = 10944
    moe_intermediate_size: Count = 1408
    num_hidden_layers: Layers = 62
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = 32
    head_dim: Count | None = None
    n_shared_experts: CountOrNone | None = None
    n_routed_experts: Count | None = None
    n_group: Count = 1
    topk_group: Count = 1
    num_experts_per_tok: Count | None = None
    first_k_dense_replace: int = 0
    norm_topk_prob: bool | None = False
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    sliding_window: Count | None = 4096
    max_window_layers: int = 62

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def kinds(self) -> list[str]:
        """Return the kind of attention of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        first = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
        return ["sliding_attention" if i >= first else "full_attention" for i in range(self.num_hidden_layers)]

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_given(self, "n_shared_experts", "n_routed_experts", "num_experts_per_tok")
        check_experts(self, "n_routed_experts", "hidden_size", "moe_intermediate_size")
        check_groups(self, "n_routed_experts")
        if self.sliding_window is None and "sliding_attention" in self.kinds:
            raise ValueError("layer_types has sliding_attention: it needs a sliding_window, not None")


class Dots1(GroupedSparseLayers, Qwen3):
    """The program of Dots1ForCausalLM."""

    Config = Dots1Config


FAMILY: Final = Family(
    "dots1",
    Dots1,
    Support(
        tensor_parallel={**LLAMA, **NORMED_HEADS, **EXPERTS, **SHARED_EXPERTS},
        context_parallel=True,
        ulysses=True,
        stages=True,
    ),
)
