"""Seed-OSS (models/seed_oss/modeling_seed_oss.py): Llama with dropout after attention and MLP, and biases by choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import merge
from memcalc.core.ops.elementwise import dropout
from memcalc.families.base.blocks import Attended, Rotary
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers, Probability
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    """The fields and defaults of models/seed_oss/configuration_seed_oss.py."""

    vocab_size: Count = 155136
    pad_token_id: int | None = 1
    hidden_size: Count = 4096
    intermediate_size: Count = 27648
    num_hidden_layers: Layers = 64
    num_attention_heads: Count = 80
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    attention_dropout: Probability = 0.1
    residual_dropout: Probability = 0.1
    mlp_bias: bool = False


class SeedOss(Llama):
    """The program of SeedOssForCausalLM."""

    Config = SeedOssConfig

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        bias, out_bias = self.config.attention_bias, self.config.attention_out_bias
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=bias)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=out_bias)

    def attention(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None) -> Attended:
        attn_output, attn_weights = super().attention(m, hidden_states, rotary, mask)
        return dropout(attn_output, self.config.residual_dropout), attn_weights

    def mlp(self, m: Module, x: Tensor) -> Tensor:
        return dropout(super().mlp(m, x), self.config.residual_dropout)


FAMILY: Final = Family(
    "seed_oss",
    SeedOss,
    Support(tensor_parallel=LLAMA, sequence_parallel=True, context_parallel=True, ulysses=True, stages=True),
)
