# pyright: basic
"""flash-attn 3 over rows of one length on Hopper: a stand-in for its kernels, which need a GPU.

It saves and allocates what their source says (flash-attn 3.0.0 hopper/flash_attn_interface.py, FlashAttnFunc;
hopper/flash_api.cpp, mha_fwd and mha_bwd), with all widths of heads built, and for causal attention without a cap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import Function
from transformers import modeling_flash_attention_utils

from memcalc.validate import flash, packed


def _up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


class _Flash(Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool, left: int) -> Any:
        batch, tokens, heads, width = q.shape
        assert width % 8 == 0
        if left >= k.shape[1] - 1:
            left = -1
        if tokens == 1 and left == -1:
            causal = False
        is_local, is_causal = left >= 0, causal and left < 0
        out = torch.empty((batch, tokens, heads, width), dtype=q.dtype)
        logsumexp = torch.empty((batch, heads, tokens), dtype=torch.float32)
        if is_local or is_causal:
            vectors = int(not is_local) + 1
            _semaphore = torch.empty((1 + vectors * _up(batch, 4),), dtype=torch.int32)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, _out, _logsumexp = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        batch, tokens, heads, width = q.shape
        rounded = min(size for size in (64, 96, 128, 192, 256) if size >= width)
        block_m = {64: 128}.get(rounded, 64)
        block_n = {192: 96, 256: 80}.get(rounded, 128)
        queries, keys = _up(tokens, block_m), _up(k.shape[1], block_n)
        _sums, _lse_log2 = (torch.empty((batch, heads, queries), dtype=torch.float32) for _ in range(2))
        _dq_accum = torch.empty((batch, heads, queries * rounded), dtype=torch.float32)
        _accumulated = [
            torch.zeros((batch, k.shape[2], keys * rounded), dtype=torch.float32)
            for _ in range(2)
            if k.shape[2] != heads
        ]
        _semaphore = torch.empty((-(-tokens // block_m), batch, heads), dtype=torch.int32)
        return *gradients, None, None


class _Varlen(Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, longest: int, left: int) -> Any:
        total, heads, width = q.shape
        sequences = cu_seqlens_q.shape[0] - 1
        assert width % 8 == 0
        if left >= longest - 1:
            left = -1
        is_local = left >= 0
        swizzles = is_local or longest > 1
        out = torch.empty((total, heads, width), dtype=q.dtype)
        logsumexp = torch.empty((heads, total), dtype=torch.float32)
        vectors = 2 + int(not is_local) + int(swizzles)
        _semaphore = torch.empty((1 + vectors * _up(sequences, 4),), dtype=torch.int32)
        ctx.longest = longest
        ctx.save_for_backward(q, k, v, out, logsumexp, cu_seqlens_q, cu_seqlens_k)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, _out, _logsumexp, cu_seqlens_q, _cu_seqlens_k = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        total, heads, width = q.shape
        sequences = cu_seqlens_q.shape[0] - 1
        rounded = min(size for size in (64, 96, 128, 192, 256) if size >= width)
        block_m = {64: 128}.get(rounded, 64)
        block_n = {192: 96, 256: 80}.get(rounded, 128)
        queries, keys = (_up(total + sequences * block, block) for block in (block_m, block_n))
        _sums, _lse_log2 = (torch.empty((heads, queries), dtype=torch.float32) for _ in range(2))
        _dq_accum = torch.empty((heads, queries * rounded), dtype=torch.float32)
        _accumulated = [
            torch.zeros((k.shape[1], keys, rounded), dtype=torch.float32) for _ in range(2) if k.shape[1] != heads
        ]
        _semaphore = torch.empty((-(-ctx.longest // block_m), sequences, heads), dtype=torch.int32)
        return *gradients, None, None, None, None


def _flash_attn_func(
    q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None,
) -> Any:  # fmt: skip
    # transformers asks one of the two functions for its parameters: this one, where rows have one length
    return _Flash.apply(q, k, v, causal, window_size[0])


def _varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: Any = None, causal: bool = False, qv: Any = None,
    window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    return _Varlen.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), window_size[0])


@contextlib.contextmanager
def third_version() -> Iterator[None]:
    """Let the stand-ins for flash-attn be those for its third version within a block."""
    with (
        patch.object(flash, "_flash_attn_func", _flash_attn_func),
        patch.object(packed, "_flash_attn_varlen_func", _varlen),
        patch.object(modeling_flash_attention_utils, "_flash_varlen_fn", _varlen),
    ):
        yield
