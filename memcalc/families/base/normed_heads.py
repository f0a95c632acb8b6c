"""Attention with a norm over each head of q and of k, after all three are projected (models/glm4_moe, exaone_moe, hy_v3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.ops.shape import transpose, view
from memcalc.families.base.module import Module, Weight
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


class NormedHeads(Llama):
    """Llama's attention with norms over heads."""

    def attention_weights(self) -> Iterator[Weight]:
        yield from super().attention_weights()
        yield Weight("self_attn.q_norm.weight", (self.head_dim,), "norm")
        yield Weight("self_attn.k_norm.weight", (self.head_dim,), "norm")

    def qkv(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _ = hidden_states.shape
        q = view((m / "q_proj").linear(hidden_states), batch, seq, self.heads, self.head_dim)
        k = view((m / "k_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        v = view((m / "v_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        q = self.head_norm(m / "q_norm", q)
        k = self.head_norm(m / "k_norm", k)
        return transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)

    def head_norm(self, m: Module, x: Tensor) -> Tensor:
        return self.norm(m, x)
