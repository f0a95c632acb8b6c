"""Jais 2 (models/jais2/modeling_jais2.py): Llama with layer norms, biases and an MLP without a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memcalc.families.base.config import Activation, Count
from memcalc.families.base.plans import UNGATED
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import LayerNorm, PlainMLP
from memcalc.families.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Jais2Config(LlamaConfig):
    """The fields and defaults of models/jais2/configuration_jais2.py."""

    vocab_size: Count = 150272
    hidden_size: Count = 3328
    intermediate_size: Count = 26624
    num_attention_heads: Count = 26
    hidden_act: Activation = "relu2"
    max_position_embeddings: Count = 8192
    attention_bias: bool = True
    mlp_bias: bool = True


class Jais2(PlainMLP, LayerNorm):
    """The program of Jais2ForCausalLM."""

    Config = Jais2Config


FAMILY: Final = Family(
    "jais2",
    Jais2,
    Support(tensor_parallel=UNGATED, sequence_parallel=True, context_parallel=True, ulysses=True, stages=True),
)
