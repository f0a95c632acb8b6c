"""Granite (models/granite/modeling_granite.py): Llama with multipliers, which cost a tensor each whatever they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.ops.elementwise import scale
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.module import Module, module
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import Rotary


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """The fields and defaults of models/granite/configuration_granite.py."""

    null_head_dim: ClassVar[bool] = False

    vocab_size: Count = 32000
    hidden_size: Count = 4096
    intermediate_size: Count = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0


class Granite(Llama):
    """The program of GraniteForCausalLM."""

    Config = GraniteConfig

    def embed(self, m: Module, ids: Tensor) -> Tensor:
        return scale(super().embed(m, ids), "mul", "embeddings times their multiplier")

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        return scale(super().head(root, hidden_states), "div", "scaled logits")

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + scale(hidden_states, "mul")
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual + scale(hidden_states, "mul")


FAMILY: Final = Family(
    "granite", Granite, Support(tensor_parallel=LLAMA, sequence_parallel=True, context_parallel=True, ulysses=True)
)
