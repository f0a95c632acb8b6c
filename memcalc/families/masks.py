"""Attention masks (masking_utils.py). Mostly there are none: a kernel that knows `is_causal` needs no mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.dims import ONE_DIM, Dim
from memcalc.dtypes import boolean, int64
from memcalc.ops.elementwise import like, of_two, where
from memcalc.ops.replaceable import replaceable
from memcalc.ops.shape import expand, unsqueeze
from memcalc.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.families.module import Run


@replaceable
def causal_mask(run: Run, window: int | None = None) -> Tensor | None:
    """create_causal_mask, or with a window create_sliding_window_causal_mask.

    Eager attention adds a mask in the model's dtype; sdpa needs a boolean one once the sequence reaches the window.
    """
    run.memory.scope = "causal mask"
    if run.attention == "eager":
        mask = _boolean_mask(run, window)
        zero = new_tensor(run.memory, (), run.dtype, "zero")
        return where(mask, zero, "additive mask")
    if window is None or run.seq.size < window:
        return None
    return _boolean_mask(run, window)


def _boolean_mask(run: Run, window: int | None) -> Tensor:
    """sdpa_mask: (batch, 1, seq, seq), the batch dim a view."""
    batch, seq = run.batch, run.seq
    _batch_arange = _arange(run, batch)
    _head_arange = _arange(run, ONE_DIM)
    q_arange = like(_arange(run, seq), "query positions")  # arange + q_offset
    kv_arange = like(_arange(run, seq), "key positions")
    q_idx = unsqueeze(unsqueeze(unsqueeze(q_arange, 0), 0), 3)
    kv_idx = unsqueeze(unsqueeze(unsqueeze(kv_arange, 0), 0), 0)
    mask = _causal(q_idx, kv_idx) if window is None else _sliding(q_idx, kv_idx)
    return expand(mask, batch, ONE_DIM, seq, seq)


def _arange(run: Run, dim: Dim) -> Tensor:
    return new_tensor(run.memory, (dim,), int64, "positions")


def _causal(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return of_two(kv_idx, q_idx, "causal mask", boolean)


def _sliding(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """and_masks(sliding_window_overlay(window), causal_mask_function)"""
    result = new_tensor(q_idx.memory, (), boolean, "all positions")
    result = of_two(of_two(kv_idx, like(q_idx, "start of the window"), "window", boolean), result, "window", boolean)
    return of_two(result, _causal(q_idx, kv_idx), "sliding window mask", boolean)
