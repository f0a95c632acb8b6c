"""Attention masks (masking_utils.py). Without padding there are mostly none: a kernel that knows `is_causal` needs none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.dims import ONE_DIM, Dim
from memcalc.dtypes import boolean, int64
from memcalc.ops.elementwise import cast, like, of_two, where
from memcalc.ops.shape import expand, unsqueeze
from memcalc.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.families.module import Run

    MaskFunction = Callable[[Tensor, Tensor], Tensor]


def causal_mask(run: Run, window: int | None = None) -> Tensor | None:
    """create_causal_mask, or with a window create_sliding_window_causal_mask.

    Eager attention adds a mask in the model's dtype; sdpa needs a boolean one where the batch has padding or the sequence
    reaches the window.
    """
    run.memory.scope = "causal mask"
    padding_mask = None if run.attention_mask is None else cast(run.attention_mask, boolean, "padding mask")
    if run.attention == "eager":
        mask = _boolean_mask(run, window, padding_mask)
        zero = new_tensor(run.memory, (), run.dtype, "zero")
        return where(mask, zero, "additive mask")
    if padding_mask is None and (window is None or run.seq.size < window):
        return None
    return _boolean_mask(run, window, padding_mask)


def _boolean_mask(run: Run, window: int | None, padding_mask: Tensor | None) -> Tensor:
    """sdpa_mask: (batch, 1, seq, seq), the batch dim a view unless padding makes the sequences differ."""
    batch, seq = run.batch, run.seq
    mask_function = _causal if window is None else _and_masks(_sliding_window_overlay, _causal)
    if padding_mask is not None:
        mask_function = _and_masks(mask_function, _padding(padding_mask))
    _batch_arange = _arange(run, batch)
    _head_arange = _arange(run, ONE_DIM)
    q_arange = like(_arange(run, seq), "query positions")  # arange + q_offset
    kv_arange = like(_arange(run, seq), "key positions")
    q_idx = unsqueeze(unsqueeze(unsqueeze(q_arange, 0), 0), 3)
    kv_idx = unsqueeze(unsqueeze(unsqueeze(kv_arange, 0), 0), 0)
    return expand(mask_function(q_idx, kv_idx), batch, ONE_DIM, seq, seq)


def _arange(run: Run, dim: Dim) -> Tensor:
    return new_tensor(run.memory, (dim,), int64, "positions")


def _and_masks(*mask_functions: MaskFunction) -> MaskFunction:
    def and_mask(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = new_tensor(q_idx.memory, (), boolean, "all positions")
        for mask in mask_functions:
            result = of_two(result, mask(q_idx, kv_idx), "causal mask", boolean)
        return result

    return and_mask


def _causal(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return of_two(kv_idx, q_idx, "causal mask", boolean)


def _sliding_window_overlay(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return of_two(kv_idx, like(q_idx, "start of the window"), "window", boolean)


def _padding(padding_mask: Tensor) -> MaskFunction:
    """padding_mask_function: padding_mask[batch_idx, kv_idx]"""

    def inner_mask(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch, seq = padding_mask.shape
        return new_tensor(padding_mask.memory, (batch, ONE_DIM, ONE_DIM, seq), boolean, "padding of the keys")

    return inner_mask
