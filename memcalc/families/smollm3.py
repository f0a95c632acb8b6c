"""SmolLM3 (models/smollm3/modeling_smollm3.py): Llama with some layers that do not rotate q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers, LayerType
from memcalc.families.base.layer_types import WindowedConfig
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import Windowed

if TYPE_CHECKING:
    from collections.abc import Hashable

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import QKV, Rotary
    from memcalc.families.base.module import Module


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(WindowedConfig, DecoderConfig):
    """The fields and defaults of models/smollm3/configuration_smollm3.py."""

    null_head_dim: ClassVar[bool] = False
    masks_both: ClassVar[bool] = False

    vocab_size: Count = 128256
    pad_token_id: int | None = 128004
    hidden_size: Count = 2048
    intermediate_size: Count = 11008
    num_hidden_layers: Layers = 36
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 4
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 32768
    use_sliding_window: bool = False
    sliding_window: Count | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True

    def rotates(self, i: int) -> bool:
        """Return True if layer `i` rotates q and k: a 1 in `no_rope_layers`, despite the name."""
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[i])
        return (i + 1) % self.no_rope_layer_interval != 0

    def default_kind(self, i: int) -> LayerType:
        windowed = self.use_sliding_window and self.sliding_window is not None and not self.rotates(i)
        return "sliding_attention" if windowed else "full_attention"

    def check(self) -> None:
        given, layers = self.no_rope_layers, self.num_hidden_layers
        if given is not None and len(given) < layers:
            raise ValueError(f"no_rope_layers has {len(given)} entries, num_hidden_layers is {layers}")
        super().check()


class SmolLM3(Windowed):
    """The program of SmolLM3ForCausalLM."""

    Config = SmolLM3Config

    def variant(self, i: int) -> Hashable:
        return self.kinds[i], self.config.rotates(i)

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Rotary) -> QKV:
        rotates = self.config.rotates(m.layer)
        return super().rotated_qkv(m, hidden_states, rotary) if rotates else self.qkv(m, hidden_states)


FAMILY: Final = Family(
    "smollm3", SmolLM3, Support(tensor_parallel=LLAMA, sequence_parallel=True, context_parallel=True, ulysses=True)
)
