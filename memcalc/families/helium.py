"""Helium (models/helium/modeling_helium.py): Llama with pairs rotated and norms that multiply an fp32 copy of their
weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, mean, power, rsqrt
from memcalc.core.ops.shape import unsqueeze
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.rotary import repeat_pairs, rotate_pairs
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module, Weight


@dataclass(frozen=True, kw_only=True)
class HeliumConfig(DecoderConfig):
    """The fields and defaults of models/helium/configuration_helium.py."""

    vocab_size: Count = 48000
    pad_token_id: int | None = 3
    hidden_size: Count = 2560
    intermediate_size: Count = 7040
    num_hidden_layers: Layers = 24
    num_attention_heads: Count = 20
    num_key_value_heads: Count = 20
    head_dim: Count = 128
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096
    attention_bias: bool = False
    mlp_bias: bool = False

    def check(self) -> None:
        super().check()
        heads, width = self.num_attention_heads, self.head_dim
        if heads * width != self.hidden_size:
            raise ValueError(f"hidden_size {self.hidden_size} is not num_attention_heads {heads} · head_dim {width}")


class Helium(Llama):
    """The program of HeliumForCausalLM."""

    Config = HeliumConfig

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(
                f"self_attn.{name}", self.hidden, out, "attention", bias=self.config.attention_bias
            )
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=False)

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of HeliumRMSNorm."""
        with m:
            input_dtype = hidden_states.dtype
            hidden_states = cast(hidden_states, fp32)
            variance = mean(power(hidden_states, 2))
            hidden_states = hidden_states * rsqrt(variance + 1e-8)
            return cast(cast(m.weight(), fp32) * hidden_states, input_dtype)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
        cos, sin = repeat_pairs(cos), repeat_pairs(sin)
        q_embed = (q * cos) + (rotate_pairs(q) * sin)
        k_embed = (k * cos) + (rotate_pairs(k) * sin)
        return q_embed, k_embed


FAMILY: Final = Family(
    "helium", Helium, Support(tensor_parallel=LLAMA, context_parallel=True, ulysses=True, stages=True)
)
