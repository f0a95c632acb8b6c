"""Rotary positions in other layouts than Llama's: of a part of each head, or of pairs of neighbouring dims."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import Dim, divided
from memcalc.core.ops.shape import cat, every_second, interleave, part, repeat_interleave, rotate_half, unsqueeze

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.tensor import Tensor


def apply_partial_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, turned: Callable[[Tensor], Tensor] = rotate_half
) -> tuple[Tensor, Tensor]:
    """Compute `(x * cos) + (turned(x) * sin)` for the first dims of each head of q and k. The others are not rotated.

    Both are rotated before they are joined with the unrotated dims (models/gpt_neox/modeling_gpt_neox.py).
    """
    cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
    head_dim, rotary_dim = q.shape[3], cos.shape[3]
    rest = Dim("head_dim-rotary_dim", head_dim.size - rotary_dim.size)
    q_rot, q_pass = part(q, rotary_dim), part(q, rest)
    k_rot, k_pass = part(k, rotary_dim), part(k, rest)
    q_embed = (q_rot * cos) + (turned(q_rot) * sin)
    k_embed = (k_rot * cos) + (turned(k_rot) * sin)
    q_embed = cat((q_embed, q_pass), head_dim)
    k_embed = cat((k_embed, k_pass), head_dim)
    return q_embed, k_embed


def rotate_pairs(x: Tensor) -> Tensor:
    """Run rotate_half of GLM and others: stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)."""
    x1 = every_second(x)
    x2 = every_second(x)
    return interleave((-x2, x1), x.shape[-1])


def repeat_pairs(x: Tensor) -> Tensor:
    """Compute `x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1)`."""
    return repeat_interleave(part(x, divided(x.shape[-1], 2)), x.shape[-1])
