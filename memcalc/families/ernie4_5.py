"""ERNIE 4.5 (models/ernie4_5/modeling_ernie4_5.py): Llama with all biases or none, pairs rotated in fp32, no dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast
from memcalc.core.ops.shape import unsqueeze
from memcalc.families.base.config import Activation, Count, Layers, RotaryConfig, check_divides
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.rotary import repeat_pairs, rotate_pairs
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Weight


@dataclass(frozen=True, kw_only=True)
class Ernie45Config(RotaryConfig):
    """The fields and defaults of models/ernie4_5/configuration_ernie4_5.py."""

    vocab_size: Count = 103424
    pad_token_id: int | None = 0
    hidden_size: Count = 1024
    intermediate_size: Count = 3072
    num_hidden_layers: Layers = 18
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 2
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 131072
    tie_word_embeddings: bool = True
    use_bias: bool | None = False
    head_dim: Count | None = 128

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")


class Ernie45(Llama):
    """The program of Ernie4_5ForCausalLM."""

    Config = Ernie45Config
    rotary_dtype = fp32

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        bias = bool(self.config.use_bias)
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=bias)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=bias)

    def mlp_weights(self) -> Iterator[Weight]:
        bias = bool(self.config.use_bias)
        yield from linear_weights("mlp.gate_proj", self.hidden, self.ffn, "mlp", bias=bias)
        yield from linear_weights("mlp.up_proj", self.hidden, self.ffn, "mlp", bias=bias)
        yield from linear_weights("mlp.down_proj", self.ffn, self.hidden, "mlp", bias=bias)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        original_dtype = q.dtype
        cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
        cos, sin = repeat_pairs(cos), repeat_pairs(sin)
        q_embed = (cast(q, fp32) * cos) + (cast(rotate_pairs(q), fp32) * sin)
        k_embed = (cast(k, fp32) * cos) + (cast(rotate_pairs(k), fp32) * sin)
        return cast(q_embed, original_dtype), cast(k_embed, original_dtype)


FAMILY: Final = Family(
    "ernie4_5",
    Ernie45,
    Support(tensor_parallel=LLAMA, sequence_parallel=True, context_parallel=True, ulysses=True, stages=True),
)
