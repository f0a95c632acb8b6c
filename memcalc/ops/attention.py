"""Scaled dot-product attention as one kernel.

The fused kernels save q, k, v, their output and one fp32 logsumexp per query and head, and a mask if there is one
(derivatives.yaml: _scaled_dot_product_flash_attention, _scaled_dot_product_efficient_attention). Grouped k and v stay
grouped without a mask. The output is laid out (batch, seq, heads, head_dim) and so are the three gradients.
"""

from __future__ import annotations

from memcalc.autograd import Node
from memcalc.dims import Shape
from memcalc.dtypes import fp32
from memcalc.ops.elementwise import recording
from memcalc.tensor import Strides, Tensor, contiguous_strides, new_tensor


def _heads_inside(shape: Shape) -> Strides:
    """Strides of (batch, heads, seq, head_dim) laid out as (batch, seq, heads, head_dim)."""
    batch, heads, seq, width = contiguous_strides((shape[0], shape[2], shape[1], shape[3]))
    return (batch, seq, heads, width)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim) -> (batch, heads, seq, head_dim)."""
    shape = (*q.shape[:3], v.shape[3])
    out = new_tensor(q.memory, shape, q.dtype, "attention output", _heads_inside(shape))
    logsumexp = new_tensor(q.memory, q.shape[:3], fp32, "attention logsumexp")
    if recording(q, k, v):
        result = Tensor(out.storage, out.shape, out.strides, out.dtype)
        saved = [q, k, v, result, logsumexp]
        out.node = Node(q.memory, _attention_backward, (q, k, v), saved if mask is None else [*saved, mask])
    return out


def _attention_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [
        new_tensor(t.memory, t.shape, t.dtype, f"{name} gradient", _heads_inside(t.shape))
        for t, name in zip(node.unpack()[:3], ("query", "key", "value"), strict=True)
    ]
