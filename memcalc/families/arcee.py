"""Arcee (models/arcee/modeling_arcee.py): Llama with an MLP without a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memcalc.families.base.config import Activation, Count
from memcalc.families.base.plans import UNGATED
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import PlainMLP
from memcalc.families.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(LlamaConfig):
    """The fields and defaults of models/arcee/configuration_arcee.py."""

    hidden_size: Count = 2560
    intermediate_size: Count = 18432
    hidden_act: Activation = "relu2"
    max_position_embeddings: Count = 4096


class Arcee(PlainMLP):
    """The program of ArceeForCausalLM."""

    Config = ArceeConfig


FAMILY: Final = Family(
    "arcee",
    Arcee,
    Support(tensor_parallel=UNGATED, sequence_parallel=True, context_parallel=True, ulysses=True, stages=True),
)
