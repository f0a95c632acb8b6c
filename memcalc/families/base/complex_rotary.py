"""Rotary positions as complex numbers (models/deepseek_v2, models/llama4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import divided
from memcalc.core.dtypes import complex64, fp32
from memcalc.core.ops.complex import PAIR, turn, view_as_complex, view_as_real
from memcalc.core.ops.elementwise import cast, like
from memcalc.core.ops.shape import reshape
from memcalc.families.base.blocks import rotary_angles

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module


def complex_rotary_embedding(m: Module, positions: Tensor, kind: str) -> Tensor:
    """Compute freqs_cis: (1, seq, half of the rotary dims) complex64, without a gradient."""
    run = m.run
    run.memory.scope = m.path
    grad_enabled, run.memory.grad_enabled = run.memory.grad_enabled, False
    freqs = rotary_angles(m, positions, kind)
    freqs_cis = _polar(freqs)
    freqs_cis = like(freqs_cis, "scaled freqs_cis")
    run.memory.grad_enabled = grad_enabled
    return freqs_cis


def _polar(freqs: Tensor) -> Tensor:
    """Compute `torch.polar(torch.ones_like(freqs), freqs)`."""
    _ones = like(freqs, "ones")
    return like(freqs, "freqs_cis", complex64)


def as_pairs(x: Tensor) -> Tensor:
    """Compute `torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))`."""
    return view_as_complex(reshape(cast(x, fp32), *x.shape[:-1], divided(x.shape[-1], 2), PAIR))


def turned(pairs: Tensor, freqs_cis: Tensor, x: Tensor) -> Tensor:
    """Compute `torch.view_as_real(pairs * freqs_cis).flatten(3)` in fp32, with the shape of `x`."""
    return reshape(view_as_real(turn(pairs, freqs_cis)), *x.shape)
