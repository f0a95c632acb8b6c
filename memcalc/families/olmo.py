"""OLMo (models/olmo/modeling_olmo.py): Llama with norms that have no weights, cos and sin in fp32, and clipped q, k, v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast
from memcalc.core.ops.norm import layer_norm
from memcalc.core.ops.selection import clamp_
from memcalc.core.ops.shape import transpose, view
from memcalc.families.base.blocks import QKV
from memcalc.families.base.config import Activation, Count, Decimal, DecoderConfig, Layers
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import RotaryInFp32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """The fields and defaults of models/olmo/configuration_olmo.py."""

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
    clip_qkv: Decimal | None = None


class Olmo(RotaryInFp32):
    """The program of OlmoForCausalLM."""

    Config = OlmoConfig

    def norm_weights(self, name: str) -> Iterator[Weight]:
        yield from ()

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of OlmoLayerNorm."""
        with m:
            orig_dtype = hidden_states.dtype
            return cast(layer_norm(cast(hidden_states, fp32), None, None), orig_dtype)

    def qkv(self, m: Module, hidden_states: Tensor) -> QKV:
        batch, seq, _ = hidden_states.shape
        q = (m / "q_proj").linear(hidden_states)
        k = (m / "k_proj").linear(hidden_states)
        v = (m / "v_proj").linear(hidden_states)
        if self.config.clip_qkv is not None:
            q, k, v = clamp_(q, 2), clamp_(k, 2), clamp_(v, 2)
        q = transpose(view(q, batch, seq, self.heads, self.head_dim), 1, 2)
        k = transpose(view(k, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        v = transpose(view(v, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        return q, k, v


FAMILY: Final = Family(
    "olmo",
    Olmo,
    Support(
        tensor_parallel=LLAMA,
        tensor_parallel_without="clip_qkv",
        sequence_parallel=True,
        context_parallel=True,
        ulysses=True,
    ),
)
