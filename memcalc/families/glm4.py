"""GLM-4 0414 (models/glm4/modeling_glm4.py): GLM with norms after attention and MLP too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import GLM
from memcalc.families.base.support import Family, Support
from memcalc.families.glm import Glm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import Rotary


class Glm4(Glm):
    """The program of Glm4ForCausalLM."""

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from super().layer_weights(i)
        yield from self.norm_weights("post_self_attn_layernorm")
        yield from self.norm_weights("post_mlp_layernorm")

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = self.norm(m / "post_self_attn_layernorm", hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        hidden_states = self.norm(m / "post_mlp_layernorm", hidden_states)
        return residual + hidden_states


FAMILY: Final = Family("glm4", Glm4, Support(tensor_parallel=GLM, context_parallel=True, ulysses=True, stages=True))
