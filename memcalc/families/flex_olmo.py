"""FlexOlmo (models/flex_olmo/modeling_flex_olmo.py): OLMoE whose norms come after attention and experts, rotated in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast
from memcalc.families.base.blocks import apply_rotary_pos_emb, rms_norm_in_fp32, rotary_embedding
from memcalc.families.base.config import Count, DecimalProbability, Layers
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import ENDS, EXPERTS, GATHERED_ATTENTION
from memcalc.families.base.support import Family, Support
from memcalc.families.olmoe import Olmoe, OlmoeConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class FlexOlmoConfig(OlmoeConfig):
    """The fields and defaults of models/flex_olmo/configuration_flex_olmo.py."""

    clip_qkv: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]

    vocab_size: Count = 100352
    pad_token_id: int | None = 100277
    hidden_size: Count = 4096
    intermediate_size: Count = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    attention_dropout: DecimalProbability = 0.0
    num_experts_per_tok: Count = 5
    num_experts: Count = 7

    def check_heads(self) -> None:
        """Accept any `head_dim`: the norm over q is as wide as q."""


class FlexOlmo(Olmoe):
    """The program of FlexOlmoForCausalLM."""

    Config = FlexOlmoConfig

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield from self.mlp_weights()
        yield Weight("post_attention_layernorm.weight", (self.hidden,), "norm")
        yield Weight("post_feedforward_layernorm.weight", (self.hidden,), "norm")

    def position_embeddings(self, m: Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_embedding(m, positions, self.rotary_dim, self.rope_type, dtype=fp32)

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return rms_norm_in_fp32(m, hidden_states)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q_embed, k_embed = apply_rotary_pos_emb(q, k, cos, sin)
        return cast(q_embed, q.dtype), cast(k_embed, k.dtype)

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        residual = hidden_states
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.mlp(m / "mlp", hidden_states)
        hidden_states = self.norm(m / "post_feedforward_layernorm", hidden_states)
        return residual + hidden_states


FAMILY: Final = Family(
    "flex_olmo",
    FlexOlmo,
    Support(
        tensor_parallel={**ENDS, **GATHERED_ATTENTION, **EXPERTS},
        tensor_parallel_without="clip_qkv",
        context_parallel=True,
        ulysses=True,
        stages=True,
    ),
)
