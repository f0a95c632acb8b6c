"""Mistral (models/mistral/modeling_mistral.py): Llama without biases and with one sliding window in all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memcalc.families.base.config import Activation, Count, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.module import Run


@dataclass(frozen=True, kw_only=True)
class MistralConfig(RotaryConfig):
    """The fields and defaults of models/mistral/configuration_mistral.py."""

    vocab_size: Count = 32000
    pad_token_id: int | None = None
    hidden_size: Count = 4096
    intermediate_size: Count = 14336
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 8
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096 * 32
    sliding_window: Count | None = 4096
    attention_dropout: Probability = 0.0
    tie_word_embeddings: bool = False

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")


class Mistral(Llama):
    """The program of MistralForCausalLM."""

    Config = MistralConfig

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        return {"full_attention": causal_mask(run, self.config.sliding_window)}


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import llama_like

    return llama_like(config)


FAMILY: Final = Family(
    "mistral",
    Mistral,
    Support(
        tensor_parallel=LLAMA,
        sequence_parallel=True,
        context_parallel=True,
        ulysses=True,
        stages=True,
        chunked_loss=True,
        liger="llama",
        liger_loss=False,
        megatron_kernels=True,
        architecture=_architecture,
        megatron_deepspeed=True,
    ),
)
