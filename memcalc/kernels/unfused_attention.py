"""Transformer Engine's UnfusedDotProductAttention, used where no fused kernel runs, as in fp32 (`--attention-backend
unfused`; transformer_engine/pytorch/attention/dot_product_attention/backends.py, softmax.py)."""

from __future__ import annotations

from typing import Final

from memcalc.core.dims import ONE_DIM, Dim, Shape, numel
from memcalc.core.dtypes import DType, boolean, fp32, int32
from memcalc.core.ops.elementwise import cast, dropout, softmax
from memcalc.core.ops.selection import masked_fill_, masked_fill_view_
from memcalc.core.ops.shape import contiguous, transpose
from memcalc.core.tensor import Memory, Tensor, new_tensor
from memcalc.families.base.blocks import repeat_kv
from memcalc.kernels.megatron import masked_softmax, product, scaled_product

_THREADS_PER_WARP: Final = 32
_THREADS_PER_BLOCK: Final = 128


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Compute causal attention of q, k, v (batch, heads, seq, head_dim) with the batch's mask (batch, 1, seq, seq) ->
    (batch, seq, heads, head_dim).

    The scores of every head exist, in a block that the product of q and k does not write into. Names of the real
    forward hold the mask and the scores to its end.
    """
    full = _full_mask(q.memory, q.shape[2], mask)
    key, value = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    preallocated = new_tensor(q.memory, (*q.shape[:3], key.shape[2]), q.dtype, "preallocated scores")
    scores = scaled_product(q, transpose(key, 2, 3), "attention scores")
    del preallocated
    probabilities = dropout(_masked_softmax(scores, full), p)
    return contiguous(transpose(product(probabilities, value, "attention output"), 1, 2))


def _full_mask(memory: Memory, seq: Dim, mask: Tensor | None) -> Tensor:
    """Return the mask of get_full_mask. Every layer makes one from distances of queries and keys, and combines it with
    the batch's mask."""
    shape: Shape = (ONE_DIM, ONE_DIM, seq, seq)
    between = [new_tensor(memory, shape, int32, f"{name} of query and key") for name in ("distance", "left", "right")]
    after, before = (new_tensor(memory, shape, boolean, f"{side} key") for side in ("later", "earlier"))
    not_before = new_tensor(memory, shape, boolean, "not earlier key")
    del before
    seen = new_tensor(memory, shape, boolean, "keys that are seen")
    del after, not_before
    own = new_tensor(memory, shape, boolean, "causal mask")
    del seen
    full = own if mask is None else new_tensor(memory, mask.shape, boolean, "attention mask")
    del between
    return full


def _masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Run FusedScaleMaskSoftmax: one kernel in 16 bits if the sizes allow it, else torch's softmax in fp32."""
    if has_kernel(scores.dtype, numel(scores.shape[:2])[0], scores.shape[3].size):
        return masked_softmax(scores)
    causal = new_tensor(mask.memory, mask.shape, boolean, "mask with the causal one")
    if scores.dtype is fp32:
        return softmax(masked_fill_view_(scores, causal))
    wide = cast(scores, fp32)
    return cast(softmax(masked_fill_(wide, causal)), scores.dtype)


def has_kernel(dtype: DType, attentions: int, seq: int) -> bool:
    """Tell whether the fused softmax takes scores (batch, heads, seq, seq) under a causal mask; `attentions` is batch times
    heads (is_kernel_available)."""
    power = 1 << (seq - 1).bit_length()
    rows = _THREADS_PER_BLOCK // min(power, _THREADS_PER_WARP) * (2 if power <= 128 else 1)
    return dtype is not fp32 and 16 < seq < 16384 and seq % 8 == 0 and attentions % 4 == 0 and seq % rows == 0
