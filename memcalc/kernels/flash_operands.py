"""The operands of flash-attn and what becomes of them, for rows of one length and for packed ones
(flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp). Heads are the last dim but one, their width is the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim, plus
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dims import Shape

SOURCE: Final = "flash-attn 2.8.3 flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp"
WIDEST: Final = 256
"""The widest head that flash-attn takes."""
NAMES: Final = ("query", "key", "value")
_ALIGNED: Final = 8
"""Heads whose width is no multiple of this are copied into wider ones."""


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run fa_peft_integration_check: fp32 queries, and keys and values with them, in autocast's dtype."""
    state = q.memory.autocast
    if q.dtype is not fp32 or state is None or state.dtype is None:
        return q, k, v
    return cast(q, state.dtype), cast(k, state.dtype), cast(v, state.dtype)


def aligned(x: Tensor, name: str) -> Tensor:
    """Return x if its heads are aligned, else a copy with wider heads."""
    *rest, width = x.shape
    if not width.size % _ALIGNED:
        return x
    return new_tensor(x.memory, (*rest, plus(width, -width.size % _ALIGNED)), x.dtype, f"{name} with aligned heads")


def cut(x: Tensor, shape: Shape) -> Tensor:
    """Return `x[..., :head_dim]`, a view if x is wider."""
    return x if x.shape[-1].size == shape[-1].size else Tensor(x.storage, shape, x.strides, x.dtype)


def tiled(width: Dim) -> Dim:
    """Return the width of a head in the backward's tiles: of 32 dims, or of 64 for heads wider than 128."""
    return plus(width, -width.size % (32 if width.size <= 128 else 64))
