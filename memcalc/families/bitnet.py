"""BitNet (models/bitnet/modeling_bitnet.py): Llama with a norm more before the last projection of attention and MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import merge
from memcalc.core.ops.shape import reshape
from memcalc.families.base.blocks import Attended, Rotary, act
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class BitNetConfig(DecoderConfig):
    """The fields and defaults of models/bitnet/configuration_bitnet.py."""

    null_head_dim: ClassVar[bool] = False

    vocab_size: Count = 128256
    hidden_size: Count = 2560
    intermediate_size: Count = 6912
    num_hidden_layers: Layers = 30
    num_attention_heads: Count = 20
    num_key_value_heads: Count | None = 5
    hidden_act: Activation = "relu2"
    max_position_embeddings: Count = 2048
    attention_bias: bool = False

    def check(self) -> None:
        super().check()
        heads, width = self.num_attention_heads, self.width_of_head
        if heads * width != self.hidden_size:
            raise ValueError(f"hidden_size {self.hidden_size} is not num_attention_heads {heads} · head_dim {width}")


class BitNet(Llama):
    """The program of BitNetForCausalLM."""

    Config = BitNetConfig

    def attention_weights(self) -> Iterator[Weight]:
        yield from super().attention_weights()
        yield Weight("self_attn.attn_sub_norm.weight", (self.hidden,), "norm")

    def mlp_weights(self) -> Iterator[Weight]:
        yield from super().mlp_weights()
        yield Weight("mlp.ffn_sub_norm.weight", (self.ffn,), "norm")

    @module
    def attention(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None) -> Attended:
        query_states, key_states, value_states = self.rotated_qkv(m, hidden_states, rotary)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim))
        attn_output = self.norm(m / "attn_sub_norm", attn_output)
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        return (m / "down_proj").linear(
            self.norm(
                m / "ffn_sub_norm",
                act((m / "gate_proj").linear(x), self.config.hidden_act) * (m / "up_proj").linear(x),
            )
        )


FAMILY: Final = Family("bitnet", BitNet, Support(tensor_parallel={}, context_parallel=True, ulysses=True, stages=True))
