"""InternLM 3 (models/internlm3/configuration_internlm3.py), which is built as LlamaForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.families.base.config import Count, Layers
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama, LlamaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class InternLM3Config(LlamaConfig):
    """The fields and defaults of models/internlm3/configuration_internlm3.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}

    vocab_size: Count = 128512
    pad_token_id: int | None = 2
    intermediate_size: Count = 10240
    num_hidden_layers: Layers = 48
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 128
    max_position_embeddings: Count = 32768

    def check(self) -> None:
        super().check()
        if self.attention_bias != self.mlp_bias:
            raise ValueError(f"qkv_bias {self.attention_bias} and bias {self.mlp_bias} have to be equal")


class InternLM3(Llama):
    """The program of LlamaForCausalLM under this configuration."""

    Config = InternLM3Config


FAMILY: Final = Family(
    "internlm3",
    InternLM3,
    Support(tensor_parallel=LLAMA, sequence_parallel=True, context_parallel=True, ulysses=True, stages=True),
)
