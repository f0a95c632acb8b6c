"""data2vec for text: models/data2vec/modeling_data2vec_text.py, Data2VecTextForCausalLM and Data2VecTextForMaskedLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memcalc.families.base.config import Count
from memcalc.families.base.support import Family, Support
from memcalc.families.roberta import Roberta, RobertaConfig


@dataclass(frozen=True, kw_only=True)
class Data2VecTextConfig(RobertaConfig):
    """The fields and defaults of models/data2vec/configuration_data2vec_text.py."""

    vocab_size: Count = 30522


class Data2VecText(Roberta):
    """The program of Data2VecTextForCausalLM and Data2VecTextForMaskedLM."""

    Config = Data2VecTextConfig
    prefix = "Data2VecText"
    base = "data2vec_text"


FAMILY: Final = Family("data2vec-text", Data2VecText, Support(tensor_parallel={}))
