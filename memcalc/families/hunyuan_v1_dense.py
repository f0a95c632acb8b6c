"""HunYuan V1 dense (models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py): Llama with a norm over each head of q and k
once they are rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import QKV, Rotary


@dataclass(frozen=True, kw_only=True)
class HunYuanDenseV1Config(DecoderConfig):
    """The fields and defaults of models/hunyuan_v1_dense/configuration_hunyuan_v1_dense.py."""

    vocab_size: Count = 290943
    pad_token_id: int | None = 0
    hidden_size: Count = 4096
    intermediate_size: Count = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 2048
    attention_bias: bool = False

    def check(self) -> None:
        super().check()
        if self.head_dim is None:
            raise ValueError("head_dim None fails in transformers; allowed: a number")


class HunYuanDenseV1(Llama):
    """The program of HunYuanDenseV1ForCausalLM."""

    Config = HunYuanDenseV1Config

    def attention_weights(self) -> Iterator[Weight]:
        yield from super().attention_weights()
        yield Weight("self_attn.query_layernorm.weight", (self.head_dim,), "norm")
        yield Weight("self_attn.key_layernorm.weight", (self.head_dim,), "norm")

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Rotary) -> QKV:
        q, k, v = super().rotated_qkv(m, hidden_states, rotary)
        q = self.norm(m / "query_layernorm", q)
        k = self.norm(m / "key_layernorm", k)
        return q, k, v


FAMILY: Final = Family(
    "hunyuan_v1_dense",
    HunYuanDenseV1,
    Support(context_parallel=True, ulysses=True, ulysses_wants_head_dim=True, stages=True),
)
