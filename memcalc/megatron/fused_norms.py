"""GPTModel whose column-parallel layers have taken in the norm before them (Transformer Engine's LayerNormLinear)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.families.base.module import Module
from memcalc.megatron.gpt_model import GPTModel

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor

_NORMS: Final = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
"""The norm before a layer."""


class FusedNormsModel(GPTModel):
    """The modules of one rank. A norm that is a part of a layer is run by that layer."""

    def norm(self, m: Module, x: Tensor) -> Tensor:
        return x if self.is_fused(m) else super().norm(m, x)

    def is_fused(self, norm: Module) -> bool:
        """Tell whether a norm is a part of the layer that takes its output."""
        if norm.path.endswith(".pre_mlp_layernorm"):
            return not self.has_experts(norm)
        return norm.path.endswith(".input_layernorm") and self.latent is None

    def fused_norm(self, m: Module) -> Module | None:
        """Return the norm that is a part of a column-parallel layer."""
        path, _, name = m.path.rpartition(".")
        layer, _, parent = path.rpartition(".")
        of_norm = _NORMS.get(f"{parent}.{name}")
        if of_norm is None:
            return None
        norm = Module(m.run, f"{layer}.{of_norm}", m.layer)
        return norm if self.is_fused(norm) else None
