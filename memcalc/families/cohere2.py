"""Command R7B and A (models/cohere2/modeling_cohere2.py): Command R with windows in three of four layers, which are the
ones that rotate q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers, LayerType
from memcalc.families.base.layer_types import WindowedConfig
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import Windowed
from memcalc.families.cohere import ParallelLayer

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import QKV, Rotary
    from memcalc.families.base.module import Module


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(WindowedConfig, DecoderConfig):
    """The fields and defaults of models/cohere2/configuration_cohere2.py."""

    null_head_dim: ClassVar[bool] = False

    vocab_size: Count = 256000
    pad_token_id: int | None = 0
    hidden_size: Count = 8192
    intermediate_size: Count = 22528
    num_hidden_layers: Layers = 40
    num_attention_heads: Count = 64
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window_pattern: Count = 4

    def default_kind(self, i: int) -> LayerType:
        return "sliding_attention" if (i + 1) % self.sliding_window_pattern else "full_attention"


class Cohere2(Windowed, ParallelLayer):
    """The program of Cohere2ForCausalLM."""

    Config = Cohere2Config

    def variant(self, i: int) -> LayerType:
        return self.kinds[i]

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Rotary) -> QKV:
        assert m.layer is not None
        rotates = self.kinds[m.layer] == "sliding_attention"
        return super().rotated_qkv(m, hidden_states, rotary) if rotates else self.qkv(m, hidden_states)


FAMILY: Final = Family(
    "cohere2",
    Cohere2,
    Support(tensor_parallel=LLAMA, sequence_parallel=True, ulysses=True, ulysses_wants_head_dim=True),
)
