"""Qwen3 (models/qwen3/modeling_qwen3.py): Qwen2 with a norm over each head of q and k, and biases by choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import merge
from memcalc.core.ops.shape import transpose, view
from memcalc.families.base.blocks import rms_norm
from memcalc.families.base.config import Count
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.plans import LLAMA, NORMED_HEADS
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights
from memcalc.families.qwen2 import Qwen2, Qwen2Config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """The fields and defaults of models/qwen3/configuration_qwen3.py."""

    null_head_dim: ClassVar[bool] = True

    head_dim: Count = 128  # pyright: ignore[reportIncompatibleVariableOverride]
    attention_bias: bool = False


class Qwen3(Qwen2):
    """The program of Qwen3ForCausalLM."""

    Config = Qwen3Config

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        bias = self.config.attention_bias
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=bias)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=bias)
        yield Weight("self_attn.q_norm.weight", (self.head_dim,), "norm")
        yield Weight("self_attn.k_norm.weight", (self.head_dim,), "norm")

    def qkv(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _ = hidden_states.shape
        q = view((m / "q_proj").linear(hidden_states), batch, seq, self.heads, self.head_dim)
        q = transpose(rms_norm(m / "q_norm", q), 1, 2)
        k = view((m / "k_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        k = transpose(rms_norm(m / "k_norm", k), 1, 2)
        v = transpose(view((m / "v_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim), 1, 2)
        return q, k, v


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import llama_like

    return llama_like(config, qk_norm=True)


FAMILY: Final = Family(
    "qwen3",
    Qwen3,
    Support(
        tensor_parallel={**LLAMA, **NORMED_HEADS},
        sequence_parallel=True,
        context_parallel=True,
        ulysses=True,
        stages=True,
        chunked_loss=True,
        liger="llama",
        megatron_kernels=True,
        architecture=_architecture,
    ),
)
