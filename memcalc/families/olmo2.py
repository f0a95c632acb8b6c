"""OLMo 2 (models/olmo2/modeling_olmo2.py): norms after attention and MLP instead of before, and over all of q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import merge
from memcalc.core.ops.shape import transpose, view
from memcalc.families.base.blocks import QKV, rms_norm_in_fp32
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.plans import OLMO2
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import PostNorm, RotaryInFp32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """The fields and defaults of models/olmo2/configuration_olmo2.py."""

    null_head_dim: ClassVar[bool] = False

    vocab_size: Count = 50304
    pad_token_id: int | None = 1
    hidden_size: Count = 4096
    intermediate_size: Count = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 2048
    attention_bias: bool = False


class Olmo2(PostNorm, RotaryInFp32):
    """The program of Olmo2ForCausalLM."""

    Config = Olmo2Config

    def attention_weights(self) -> Iterator[Weight]:
        yield from super().attention_weights()
        yield Weight("self_attn.q_norm.weight", (merge(self.heads, self.head_dim),), "norm")
        yield Weight("self_attn.k_norm.weight", (merge(self.kv_heads, self.head_dim),), "norm")

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return rms_norm_in_fp32(m, hidden_states)

    def qkv(self, m: Module, hidden_states: Tensor) -> QKV:
        batch, seq, _ = hidden_states.shape
        q = self.norm(m / "q_norm", (m / "q_proj").linear(hidden_states))
        k = self.norm(m / "k_norm", (m / "k_proj").linear(hidden_states))
        v = (m / "v_proj").linear(hidden_states)
        q = transpose(view(q, batch, seq, self.heads, self.head_dim), 1, 2)
        k = transpose(view(k, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        v = transpose(view(v, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        return q, k, v


FAMILY: Final = Family("olmo2", Olmo2, Support(tensor_parallel=OLMO2, context_parallel=True, ulysses=True, stages=True))
