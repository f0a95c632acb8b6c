"""Scaled dot-product attention as one kernel.

The fused kernels save q, k, v, their output and one fp32 logsumexp per query and head, and a mask if there is one
(derivatives.yaml: _scaled_dot_product_flash_attention, _scaled_dot_product_efficient_attention). Grouped k and v stay
grouped without a mask. A boolean mask becomes an additive one in the dtype of q, anew in every layer
(native/transformers/attention.cpp, convert_boolean_attn_mask); on CUDA a sequence that is not a multiple of 8 elements
would pad it besides. The output is laid out as q is; the three gradients as (batch, seq, heads, head_dim).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.autograd import Node
from memcalc.dtypes import boolean, fp32
from memcalc.ops.elementwise import like, recording, where
from memcalc.tensor import Strides, Tensor, contiguous_strides, new_tensor

if TYPE_CHECKING:
    from memcalc.dims import Shape


def heads_inside(shape: Shape) -> Strides:
    """Strides of (batch, heads, seq, head_dim) laid out as (batch, seq, heads, head_dim)."""
    batch, heads, seq, width = contiguous_strides((shape[0], shape[2], shape[1], shape[3]))
    return (batch, seq, heads, width)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim) -> (batch, heads, seq, head_dim)."""
    if mask is not None and mask.dtype is boolean:
        mask = where(mask, new_tensor(q.memory, (), q.dtype, "zero"), "additive mask")
    out = like(q, "attention output")
    logsumexp = new_tensor(q.memory, q.shape[:3], fp32, "attention logsumexp")
    if recording(q, k, v):
        result = Tensor(out.storage, out.shape, out.strides, out.dtype)
        saved = [q, k, v, result, logsumexp]
        out.node = Node(q.memory, _attention_backward, (q, k, v), saved if mask is None else [*saved, mask])
    return out


def _attention_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()  # all of it stays until the kernel is done
    return [
        new_tensor(t.memory, t.shape, t.dtype, f"{name} gradient", heads_inside(t.shape))
        for t, name in zip(saved[:3], ("query", "key", "value"), strict=True)
    ]
