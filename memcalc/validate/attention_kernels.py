# pyright: basic
"""CUDA's fused attention kernels on the CPU, which has none for some widths, and which torch's context parallelism
needs. They return zeros of the sizes, dtypes and strides of CUDA's results (torch/_meta_registrations.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memcalc.validate.live import STATE

aten = torch.ops.aten


def _flash(query: Any, key: Any, value: Any, dropout_p: float = 0.0, *rest: Any, scale: Any = None) -> Any:
    logsumexp = torch.zeros(query.shape[:3], dtype=torch.float32)
    state, unused, debug = torch.empty(2, dtype=STATE), torch.empty((), dtype=STATE), torch.empty(0)
    return torch.zeros_like(query), logsumexp, None, None, query.shape[2], key.shape[2], state, unused, debug


def _flash_backward(grad_out: Any, query: Any, key: Any, value: Any, *rest: Any, scale: Any = None) -> Any:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def _heads_inside(like: torch.Tensor, width: int) -> torch.Tensor:
    return torch.empty_permuted((*like.shape[:3], width), (0, 2, 1, 3), dtype=like.dtype).zero_()


def _efficient(query: Any, key: Any, value: Any, bias: Any, *rest: Any, scale: Any = None) -> Any:
    assert bias is None
    logsumexp = torch.zeros((*query.shape[:2], -(-query.shape[2] // 32) * 32), dtype=torch.float32)
    seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))
    return _heads_inside(query, value.shape[3]), logsumexp, seed, offset


def _efficient_backward(grad_out: Any, query: Any, key: Any, value: Any, *rest: Any, scale: Any = None) -> Any:
    return *(_heads_inside(x, x.shape[3]) for x in (query, key, value)), None


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run the kernel that CUDA takes: flash for 16 bits, the memory-efficient one for 32 bits or for values of another
    width than the keys'. The memory-efficient kernel takes no grouped heads."""
    if query.dtype is not torch.float32 and query.shape[3] == value.shape[3]:
        assert attn_mask is None
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    assert not enable_gqa or query.shape[1] == key.shape[1], "the math kernel"
    kernel = aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def logsigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return an empty result. On CUDA there is no buffer, which the CPU's backward would need."""
    return torch.empty_like(x)


@contextlib.contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Give the CPU these kernels within a block, for every caller."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "CPU")
        yield


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let torch's attention, and the merging of its parts, call these kernels within a block."""
    names = {"scaled_dot_product_attention": scaled_dot_product_attention, "logsigmoid": logsigmoid}
    own = {name: getattr(torch.nn.functional, name) for name in names}
    with kernels_of_cuda():
        for name, function in names.items():
            setattr(torch.nn.functional, name, function)
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(torch.nn.functional, name, function)


_KERNELS = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
