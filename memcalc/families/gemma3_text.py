"""Gemma 3's text model (models/gemma3/modeling_gemma3.py): Gemma 2 with norms over each head of q and k instead of
capped scores, and frequencies of their own for layers with a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.families.base.blocks import Attended
from memcalc.families.base.config import Count, Decimal, LayerType
from memcalc.families.base.layer_types import RotaryByKindConfig
from memcalc.families.base.module import Module
from memcalc.families.base.plans import LLAMA, NORMED_HEADS
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import HeadNorm, RotaryByKind
from memcalc.families.gemma2 import Gemma2, Gemma2Config
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(Gemma2Config, RotaryByKindConfig):
    """The fields and defaults of models/gemma3/configuration_gemma3.py. Its `attn_logit_softcapping` is a field that no
    attention reads."""

    attribute_map: ClassVar[Mapping[str, str]] = {"_sliding_window_pattern": "sliding_window_pattern"}

    vocab_size: Count = 262208
    max_position_embeddings: Count = 131072
    final_logit_softcapping: Decimal | None = None
    attn_logit_softcapping: Decimal | None = None
    sliding_window_pattern: Count = 6
    rope_local_base_freq: float = 10000.0

    def default_kind(self, i: int) -> LayerType:
        return "sliding_attention" if (i + 1) % self.sliding_window_pattern else "full_attention"


class Gemma3Text(RotaryByKind, HeadNorm, Gemma2):
    """The program of Gemma3ForCausalLM."""

    Config = Gemma3TextConfig
    attention_kinds = ("sdpa", "eager")

    def attend(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        return Llama.attend(self, m, q, k, v, mask)


FAMILY: Final = Family("gemma3_text", Gemma3Text, Support(tensor_parallel={**LLAMA, **NORMED_HEADS}, ulysses=True))
