"""XLM-RoBERTa: models/xlm_roberta/modeling_xlm_roberta.py, XLMRobertaForCausalLM and XLMRobertaForMaskedLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memcalc.families.base.config import Count
from memcalc.families.base.module import Weight
from memcalc.families.base.support import Family, Support
from memcalc.families.roberta import Roberta, RobertaConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class XLMRobertaConfig(RobertaConfig):
    """The fields and defaults of models/xlm_roberta/configuration_xlm_roberta.py."""

    vocab_size: Count = 30522


class XLMRoberta(Roberta):
    """The program of XLMRobertaForCausalLM and XLMRobertaForMaskedLM.

    Its head comes first, and with it the name of a tied table.
    """

    Config = XLMRobertaConfig
    prefix = "XLMRoberta"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.tie_word_embeddings:
            self.table = self.decoder

    def weights(self) -> Iterator[Weight]:
        model = [weight for weight in super().weights() if not weight.name.startswith("lm_head.")]
        yield from super().head_weights()
        if self.config.tie_word_embeddings:
            table, *model = model
            yield Weight(f"{self.decoder}.weight", table.shape, "embedding")
        yield from model


FAMILY: Final = Family("xlm-roberta", XLMRoberta, Support(tensor_parallel={}))
