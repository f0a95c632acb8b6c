"""VaultGemma (models/vaultgemma/modeling_vaultgemma.py): Gemma 2 without the norms after attention and MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.gemma2 import Gemma2, Gemma2Config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import Rotary


@dataclass(frozen=True, kw_only=True)
class VaultGemmaConfig(Gemma2Config):
    """The fields and defaults of models/vaultgemma/configuration_vaultgemma.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {}


class VaultGemma(Gemma2):
    """The program of VaultGemmaForCausalLM."""

    Config = VaultGemmaConfig

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield from self.mlp_weights()
        yield from self.norm_weights("input_layernorm")
        yield from self.norm_weights("pre_feedforward_layernorm")

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "pre_feedforward_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual + hidden_states


FAMILY: Final = Family("vaultgemma", VaultGemma, Support(tensor_parallel=LLAMA))
