"""K-EXAONE (models/exaone_moe/modeling_exaone_moe.py): DeepSeek-V3's layers, attending over windows with rotary positions or
over everything without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import merge
from memcalc.core.ops.shape import reshape
from memcalc.families.base.blocks import Attended
from memcalc.families.base.config import Activation, Count, CountOrNone, Layers, Probability, check_divides
from memcalc.families.base.experts import REFUSED, check_experts, check_groups
from memcalc.families.base.layer_types import LayerTypesConfig
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Module, Run, module
from memcalc.families.base.normed_heads import NormedHeads
from memcalc.families.base.plans import EXPERTS, LLAMA, NORMED_HEADS
from memcalc.families.base.sparse import GroupedSparseLayers, MlpTypesConfig
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class ExaoneMoeConfig(MlpTypesConfig, LayerTypesConfig):
    """The fields and defaults of models/exaone_moe/configuration_exaone_moe.py."""

    null_head_dim: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 102400
    pad_token_id: int | None = 0
    hidden_size: Count = 4096
    intermediate_size: Count = 16384
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 32
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 2048
    tie_word_embeddings: bool = False
    attention_dropout: Probability = 0.0
    sliding_window: Count = 4096
    sliding_window_pattern: Count | str | None = 4
    first_k_dense_replace: int = 1
    moe_intermediate_size: Count = 1024
    num_experts: Count = 64
    num_experts_per_tok: Count = 8
    num_shared_experts: CountOrNone = 1
    norm_topk_prob: bool = True
    n_group: Count = 1
    topk_group: Count = 1

    @property
    def kinds(self) -> list[str]:
        """Return the kind of attention of each layer."""
        every = self.sliding_window_pattern
        if self.layer_types is not None or not isinstance(every, int):
            return list(self.layer_types or ())
        return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(self.num_hidden_layers)]

    @property
    def default_mlp_types(self) -> Sequence[str]:
        return ["dense" if i < self.first_k_dense_replace else "sparse" for i in range(self.num_hidden_layers)]

    @property
    def n_routed_experts(self) -> int:
        return self.num_experts

    @property
    def n_shared_experts(self) -> int:
        return self.num_shared_experts

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_experts", "hidden_size", "moe_intermediate_size")
        check_groups(self, "num_experts")
        if not self.kinds:
            raise ValueError(f"sliding_window_pattern {self.sliding_window_pattern!r} needs layer_types beside it")


class ExaoneMoe(NormedHeads, GroupedSparseLayers):
    """The program of ExaoneMoeForCausalLM."""

    Config = ExaoneMoeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kinds: list[str] = config.kinds

    def sparse(self, i: int) -> bool:
        return self.config.mlp_types[i] == "sparse"

    def variant(self, i: int) -> Hashable:
        return super().variant(i), self.kinds[i]

    def layer_kind(self, i: int) -> str:
        return self.kinds[i]

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        windows = {"full_attention": None, "sliding_attention": self.config.sliding_window}
        return {kind: causal_mask(run, window) for kind, window in windows.items() if kind in self.kinds}

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Attended:
        query_states, key_states, value_states = self.qkv(m, hidden_states)
        cos, sin = rotary
        assert m.layer is not None
        if self.kinds[m.layer] == "sliding_attention":
            query_states, key_states = self.rotate(query_states, key_states, cos, sin)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim))
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights


FAMILY: Final = Family(
    "exaone_moe", ExaoneMoe, Support(tensor_parallel={**LLAMA, **NORMED_HEADS, **EXPERTS}, ulysses=True, stages=True)
)
