"""IQuest-Coder (models/iquestcoder/configuration_iquestcoder.py), which is built as LlamaForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.families.base.config import Count, Layers
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama, LlamaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class IQuestCoderConfig(LlamaConfig):
    """The fields and defaults of models/iquestcoder/configuration_iquestcoder.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"clip_qkv": (None,), "use_sliding_window": (False, None)}

    vocab_size: Count = 76800
    hidden_size: Count = 5120
    intermediate_size: Count = 27648
    num_hidden_layers: Layers = 80
    num_attention_heads: Count = 40
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131072


class IQuestCoder(Llama):
    """The program of LlamaForCausalLM under this configuration."""

    Config = IQuestCoderConfig


FAMILY: Final = Family(
    "iquestcoder",
    IQuestCoder,
    Support(tensor_parallel=LLAMA, sequence_parallel=True, context_parallel=True, ulysses=True, stages=True),
)
