"""HyperCLOVA X (models/hyperclovax/modeling_hyperclovax.py): Granite with norms after attention and MLP by choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.ops.elementwise import scale
from memcalc.families.base.config import Decimal
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.granite import Granite
from memcalc.families.llama import LlamaConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import Rotary


@dataclass(frozen=True, kw_only=True)
class HyperCLOVAXConfig(LlamaConfig):
    """The fields and defaults of models/hyperclovax/configuration_hyperclovax.py."""

    use_post_norm: bool = True
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: Decimal | None = None


class HyperCLOVAX(Granite):
    """The program of HyperCLOVAXForCausalLM."""

    Config = HyperCLOVAXConfig

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from super().layer_weights(i)
        if self.config.use_post_norm:
            yield from self.norm_weights("post_norm1")
            yield from self.norm_weights("post_norm2")

    def post_norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return self.norm(m, hidden_states) if self.config.use_post_norm else hidden_states

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = self.post_norm(m / "post_norm1", hidden_states)
        hidden_states = residual + scale(hidden_states, "mul")
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        hidden_states = self.post_norm(m / "post_norm2", hidden_states)
        return residual + scale(hidden_states, "mul")


FAMILY: Final = Family("hyperclovax", HyperCLOVAX, Support(tensor_parallel=LLAMA, context_parallel=True, ulysses=True))
