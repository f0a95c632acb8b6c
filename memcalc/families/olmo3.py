"""OLMo 3 (models/olmo3/modeling_olmo3.py): OLMo 2 with windows in three of four layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memcalc.families.base.config import LayerType
from memcalc.families.base.layer_types import RotaryByKindConfig, WindowedConfig
from memcalc.families.base.plans import OLMO2
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import RotaryByKind
from memcalc.families.olmo2 import Olmo2, Olmo2Config


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config, RotaryByKindConfig, WindowedConfig):
    """The fields and defaults of models/olmo3/configuration_olmo3.py."""

    def default_kind(self, i: int) -> LayerType:
        return "sliding_attention" if (i + 1) % 4 else "full_attention"


class Olmo3(RotaryByKind, Olmo2):
    """The program of Olmo3ForCausalLM."""

    Config = Olmo3Config


FAMILY: Final = Family("olmo3", Olmo3, Support(tensor_parallel=OLMO2, ulysses=True))
