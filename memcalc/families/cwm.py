"""CWM (models/cwm/modeling_cwm.py): Llama with windows in three of four layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers, LayerType, check_divides
from memcalc.families.base.layer_types import WindowedConfig
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import Windowed


@dataclass(frozen=True, kw_only=True)
class CwmConfig(WindowedConfig, DecoderConfig):
    """The fields and defaults of models/cwm/configuration_cwm.py."""

    vocab_size: Count = 128256
    hidden_size: Count = 6144
    intermediate_size: Count = 21504
    num_hidden_layers: Layers = 64
    num_attention_heads: Count = 48
    num_key_value_heads: Count = 8
    head_dim: Count = 128
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 131072
    sliding_window: Count = 8192
    mlp_bias: bool = False

    def default_kind(self, i: int) -> LayerType:
        return "sliding_attention" if i % 4 else "full_attention"

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")


class Cwm(Windowed):
    """The program of CwmForCausalLM."""

    Config = CwmConfig


FAMILY: Final = Family("cwm", Cwm, Support(tensor_parallel=LLAMA, sequence_parallel=True, ulysses=True))
