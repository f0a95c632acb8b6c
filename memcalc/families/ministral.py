"""Ministral (models/ministral/modeling_ministral.py): Mistral with windows in the layers that `layer_types` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers, LayerType
from memcalc.families.base.layer_types import WindowedConfig
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import Windowed


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(WindowedConfig, DecoderConfig):
    """The fields and defaults of models/ministral/configuration_ministral.py."""

    vocab_size: Count = 32000
    hidden_size: Count = 4096
    intermediate_size: Count = 14336
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 8
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096 * 32

    def default_kind(self, i: int) -> LayerType:
        return "sliding_attention"

    def check(self) -> None:
        super().check()
        if self.head_dim is None:
            raise ValueError("head_dim None fails in transformers; allowed: a number")


class Ministral(Windowed):
    """The program of MinistralForCausalLM."""

    Config = MinistralConfig


FAMILY: Final = Family(
    "ministral",
    Ministral,
    Support(tensor_parallel=LLAMA, sequence_parallel=True, ulysses=True, ulysses_wants_head_dim=True, stages=True),
)
