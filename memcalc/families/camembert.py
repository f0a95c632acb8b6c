"""CamemBERT: models/camembert/modeling_camembert.py, CamembertForCausalLM and CamembertForMaskedLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memcalc.families.base.config import Count
from memcalc.families.base.support import Family, Support
from memcalc.families.roberta import RobertaConfig
from memcalc.families.xlm_roberta import XLMRoberta


@dataclass(frozen=True, kw_only=True)
class CamembertConfig(RobertaConfig):
    """The fields and defaults of models/camembert/configuration_camembert.py."""

    vocab_size: Count = 30522


class Camembert(XLMRoberta):
    """The program of CamembertForCausalLM and CamembertForMaskedLM."""

    Config = CamembertConfig
    prefix = "Camembert"


FAMILY: Final = Family("camembert", Camembert, Support(tensor_parallel={}))
