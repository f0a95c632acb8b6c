"""Attention with a norm over the whole of q and of k as projected (models/olmoe, flex_olmo, minimax_m2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import merge
from memcalc.core.ops.shape import transpose, view
from memcalc.families.base.module import Module, Weight
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


class NormedProjections(Llama):
    """Llama's attention with norms over projections."""

    def attention_weights(self) -> Iterator[Weight]:
        yield from super().attention_weights()
        yield Weight("self_attn.q_norm.weight", (merge(self.heads, self.head_dim),), "norm")
        yield Weight("self_attn.k_norm.weight", (merge(self.kv_heads, self.head_dim),), "norm")

    def qkv(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _ = hidden_states.shape
        q = self.norm(m / "q_norm", (m / "q_proj").linear(hidden_states))
        k = self.norm(m / "k_norm", (m / "k_proj").linear(hidden_states))
        v = (m / "v_proj").linear(hidden_states)
        q, k, v = self.clipped(q, k, v)
        q = transpose(view(q, batch, seq, self.heads, self.head_dim), 1, 2)
        k = transpose(view(k, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        v = transpose(view(v, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        return q, k, v

    def clipped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v
