"""cuDNN's fused attention, for values that are not as wide as the keys.

It saves q, k, v, its output, one fp32 logsumexp per query and head, the seed and offset of its dropout, and the mask if there
is one (derivatives.yaml, _scaled_dot_product_cudnn_attention). The output is laid out as q, and every gradient as its own
tensor (torch/_meta_registrations.py, aten/src/ATen/native/cudnn/MHA.cpp).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.attention_scratch import cudnn_scratch
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.selection import where
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.selective import ATTENTION, Results, selected
from memcalc.core.tensor import Strides, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dims import Shape


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Compute attention: q (batch, heads, seq, head_dim), k (batch, kv_heads, seq, head_dim), v (batch, kv_heads, seq,
    value_dim) -> (batch, heads, seq, value_dim)."""
    is_causal = causal and mask is None
    if mask is not None and mask.dtype is boolean:
        mask = where(mask, new_tensor(q.memory, (), q.dtype, "zero"), "additive mask")
    out, *statistics = selected(q.memory, ATTENTION, partial(_kernel, q, k, v, is_causal))
    if recording(q, k, v):
        result = Tensor(out.storage, out.shape, out.strides, out.dtype)
        saved = [q, k, v, *([] if mask is None else [mask]), result, *statistics]
        out.node = Node(q.memory, _cudnn_attention_backward, (q, k, v), saved, is_causal)
    return out


def _kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Results:
    attends(q.memory, q.shape, k.shape, v.shape, q.dtype, is_causal)
    shape = (*q.shape[:3], v.shape[3])
    out = new_tensor(q.memory, shape, q.dtype, "attention output", _laid_out_as(q.strides, shape))
    logsumexp = new_tensor(q.memory, q.shape[:3], fp32, "attention logsumexp")
    seed, offset = (new_tensor(q.memory, (), int64, f"dropout {name}") for name in ("seed", "offset"))
    return out, logsumexp, seed, offset


def _laid_out_as(strides: Strides, shape: Shape) -> Strides:
    """Return the strides of a dense tensor whose dims are in the order of `strides`."""
    out, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        out[dim] = step
        step *= shape[dim].size
    return tuple(out)


def _cudnn_attention_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()  # all saved tensors stay until the kernel is done
    q, k, v = saved[:3]
    attends_backward(node.memory, q.shape, k.shape, v.shape, q.dtype, node.context)
    out = [like(x, f"{name} gradient") for x, name in zip((q, k, v), ("query", "key", "value"), strict=True)]
    _scratch = cudnn_scratch(q, k, v)
    return out
