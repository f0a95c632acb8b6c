"""The blocks that the backward of a fused attention kernel allocates besides its results, and frees at its end.

- Flash attention: a sum for each query and head, and the queries' gradient, both in fp32. Where heads share keys and values,
  also the gradients of keys and values of each head (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd).
- The memory-efficient kernel: the same sums and gradient (transformers/cuda/attention_backward.cu,
  transformers/cuda/mem_eff_attention/kernel_backward.h).
- cuDNN: all of it as one block. No source says so: every size of tests/measured_ops is this sum and 256 bytes.

The rows of the queries' gradient are as wide as the kernel's tiles. Their number is that of the tokens here; flash attention
rounds it up to a multiple of 128. Not counted: what the memory-efficient kernel takes for keys and values wider than 128 in
16 bits, up to 25 MB in tests/measured_ops, and in fp32 a product that is gone before the gradient comes.
"""

from __future__ import annotations

from typing import Final

from memcalc.core.dims import Dim, merge, plus
from memcalc.core.dtypes import fp32, uint8
from memcalc.core.tensor import Tensor, new_tensor

CUDNN_MORE: Final = 256  # bytes, for all heads together
_FLASH_STEPS: Final = (32, 64, 96, 128, 192, 256)
_EFFICIENT_STEPS: Final = (32, 64, 128)


def flash_width(head_dim: int) -> int:
    """Return the width that flash attention's kernel for this width is made for."""
    return next((step for step in _FLASH_STEPS if head_dim <= step), head_dim)


def efficient_width(head_dim: int) -> int:
    """Return the width of the memory-efficient kernel's tiles."""
    return next((step for step in _EFFICIENT_STEPS if head_dim <= step), -(-head_dim // 64) * 64)


def cudnn_bytes(head_dim: int, value_dim: int, itemsize: int, *, shared: bool) -> int:
    """Return the bytes that cuDNN takes for each query and head; `shared`: heads share keys and values."""
    return 4 * head_dim + 4 + (itemsize * (head_dim + value_dim) if shared else 0)


def flash_scratch(q: Tensor, k: Tensor) -> list[Tensor]:
    """Allocate what flash attention's backward takes."""
    out = [_sums(q), _gradient_in_fp32(q, flash_width(q.shape[3].size))]
    if _is_shared(q, k):
        shape = (q.shape[0], k.shape[2], q.shape[1], q.shape[3])
        out += [new_tensor(q.memory, shape, q.dtype, f"{name} gradient of each head") for name in ("key", "value")]
    return out


def efficient_scratch(q: Tensor) -> list[Tensor]:
    """Allocate what the memory-efficient kernel's backward takes."""
    return [_sums(q), _gradient_in_fp32(q, efficient_width(q.shape[3].size))]


def cudnn_scratch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Allocate what cuDNN's backward takes."""
    nbytes = cudnn_bytes(q.shape[3].size, v.shape[3].size, q.dtype.itemsize, shared=_is_shared(q, k))
    size = plus(merge(*q.shape[:3], Dim("bytes of a head", nbytes)), CUDNN_MORE)
    return new_tensor(q.memory, (size,), uint8, "attention workspace")


def _is_shared(q: Tensor, k: Tensor) -> bool:
    return q.shape[1].size != k.shape[1].size


def _sums(q: Tensor) -> Tensor:
    return new_tensor(q.memory, q.shape[:3], fp32, "attention sums")


def _gradient_in_fp32(q: Tensor, width: int) -> Tensor:
    batch, heads, queries, head_dim = q.shape
    shape = (batch, queries, heads, plus(head_dim, width - head_dim.size))
    return new_tensor(q.memory, shape, fp32, "query gradient in fp32")
